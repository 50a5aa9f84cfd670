"""Read the plans of HugeCTR's later versions: a matrix of GPUs and tables. HugeCTR takes it as
Python arguments; recapp reads a JSON object with the names of these arguments.

    v4.1   {"shard_matrix": [[1, 0, 1], [0, 1, 1]],        GPU x table: 1 where the GPU holds a part
            "table_group_strategy": [[0, 1], [2]],         tables of each group
            "table_placement_strategy": ["mp", "dp"]}      of each group
    later  {"shard_matrix": [["C1", "C3"], ["C2", "C3"]],  by name
            "shard_strategy": [["mp", ["C1", "C2"]], ["dp", ["C3"]]],
            "compression_strategy": {"reduction": ["C1"], "unique": ["C2"]}}

Each GPU of an mp table holds one shard, in order; all GPUs hold a dp table. `["C1", 2]` instead of
`"C1"` cuts the columns in two: the first half of its GPUs holds the left strip, by rows.
`reduction` sets the mode `pooled`, `unique` the mode `unique`. Both versions also accept
`emb_table_...` for `table_...`.

Sources: `EmbeddingPlanner` of v4.1, `HugeCTR/src/embeddings/embedding_collection.cpp` of 25.03.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from recapp.errors import PlanError, suggest
from recapp.sharding.sharding_plan import Mode, Shard, TableSharding
from recapp.sharding.sharding_types import equal_ranges
from recapp.tables.config import EmbeddingConfig

MATRIX = "shard_matrix"
GROUPS = "table_group_strategy"
PLACEMENT = "table_placement_strategy"
STRATEGY = "shard_strategy"
COMPRESSION = "compression_strategy"
WORDS = {"mp": "mp", "localized": "mp", "dp": "dp"}
MODES: dict[str, Mode] = {"reduction": "pooled", "unique": "unique"}


def table_sharding(
    table: EmbeddingConfig, gpus: Sequence[int] | None, world: int, strips: int = 1
) -> TableSharding:
    """Return the sharding of a table on some GPUs. If several GPUs hold rows of one strip, the rows
    are mixed, which balances them like HugeCTR's key mod n.

    Args:
        table: The table to shard.
        gpus: The GPUs of its shards in the order of the shards' ids: `strips` times the number of
            shards of a strip. None replicates the table on all GPUs.
        world: The number of GPUs.
        strips: The number of strips of columns; each lies on an equal range of `gpus`.
    """
    rows = range(table.plan_rows)
    dim = table.embedding_dim
    if gpus is None:
        return TableSharding(
            tuple(Shard(g, rows, range(dim)) for g in range(world)), "replicated", "data_parallel"
        )
    shards = [
        Shard(g, part, cols)
        for run, cols in zip(
            equal_ranges(len(gpus), strips), equal_ranges(dim, strips), strict=True
        )
        for g, part in zip([gpus[i] for i in run], equal_ranges(len(rows), len(run)), strict=False)
    ]
    kind = (
        "table_wise"
        if len(gpus) == 1
        else "row_wise"
        if list(gpus) == list(range(world)) and strips == 1
        else "custom"
    )
    if strips == len(gpus) > 1:
        kind = "column_wise"
    mixed = len(gpus) > strips and table.dynamic is None
    return TableSharding(tuple(shards), "auto", kind, "mixed" if mixed else "natural")


def plan_from_matrix(
    values: Mapping[str, Any], tables: Sequence[EmbeddingConfig], source: str
) -> dict[str, TableSharding]:
    """Return the sharding of every table, by its name.

    Args:
        values: The plan as plain values of JSON.
        tables: The tables of the model.
        source: The file, for messages.

    Raises:
        PlanError: An entry is wrong; the error names the GPU, group or table and the rule.
    """
    given = {str(key).removeprefix("emb_"): value for key, value in values.items()}
    for key in given:
        if key not in (known := (MATRIX, GROUPS, PLACEMENT, STRATEGY, COMPRESSION)):
            raise PlanError(f"{source}: unknown key {key}; {suggest(key, known)}")
    names = [t.name for t in tables]
    group_of = _placements(given, names, source)
    held = _held(given[MATRIX], names, source)
    made = {}
    for t in tables:
        if t.name not in group_of:
            raise PlanError(f"{source}: table {t.name} is in no group: add it to one (rule 12)")
        k, word, strips = group_of[t.name]
        gpus = [g for g, own in enumerate(held) if t.name in own]
        where = f"{source}: group {k}: table {t.name}"
        if word == "dp":
            for g in (g for g in range(len(held)) if g not in gpus):
                raise PlanError(
                    f"{where} is dp, but GPU {g} does not hold it: add a dp table to every row "
                    f"of {MATRIX} (rule 8)"
                )
        if not gpus:
            raise PlanError(f"{where} is held by no GPU: add it to a row of {MATRIX} (rule 12)")
        if (
            strips < 1
            or (word == "dp" and strips > 1)
            or len(gpus) % strips
            or t.embedding_dim % strips
        ):
            raise PlanError(
                f"{where}: {strips} strips of columns: must divide its {t.embedding_dim} columns "
                f"and its {len(gpus)} GPUs, and a dp table has one"
            )
        made[t.name] = table_sharding(t, None if word == "dp" else gpus, len(held), strips)
    return _with_modes(made, given.get(COMPRESSION, {}), source)


def _placements(
    given: Mapping[str, Any], names: list[str], source: str
) -> dict[str, tuple[int, str, int]]:
    """Return the group, placement and number of strips of columns of each table."""
    if (STRATEGY in given) == (GROUPS in given) or (GROUPS in given) != (PLACEMENT in given):
        raise PlanError(f"{source}: {MATRIX} needs {STRATEGY}, or {GROUPS} and {PLACEMENT}")
    groups = given.get(GROUPS)
    words = given.get(PLACEMENT)
    if STRATEGY in given:
        pairs = given[STRATEGY]
        if not isinstance(pairs, list) or not all(
            isinstance(p, list) and len(p) == 2 for p in pairs
        ):
            raise PlanError(f"{source}: {STRATEGY} must be a list of [placement, tables]")
        words = [p[0] for p in pairs]
        groups = [p[1] for p in pairs]
    if not isinstance(groups, list) or not isinstance(words, list) or len(groups) != len(words):
        raise PlanError(f"{source}: {GROUPS} and {PLACEMENT} must be lists of one length")
    group_of: dict[str, tuple[int, str, int]] = {}
    for k, (word, group) in enumerate(zip(words, groups, strict=True)):
        if not isinstance(word, str) or word not in WORDS or not isinstance(group, list):
            raise PlanError(
                f"{source}: group {k}: placement {word}: {suggest(str(word), WORDS)} and a list "
                "of tables (rule 3)"
            )
        for item in group:
            table, strips = item if isinstance(item, list) and len(item) == 2 else (item, 1)
            name = _name(table, names, f"{source}: group {k}")
            if name in group_of:
                raise PlanError(
                    f"{source}: group {k}: table {name} is also in group {group_of[name][0]}: a "
                    "table must be in one group (rule 12)"
                )
            if not isinstance(strips, int):
                raise PlanError(
                    f"{source}: group {k}: table {name}: strips of columns must be a whole "
                    f"number, not {strips}"
                )
            group_of[name] = k, WORDS[word], strips
    return group_of


def _held(matrix: Any, names: list[str], source: str) -> list[list[str]]:
    """Return the tables of every GPU."""
    if (
        not isinstance(matrix, list)
        or not matrix
        or not all(isinstance(row, list) for row in matrix)
    ):
        raise PlanError(
            f"{source}: {MATRIX} must be a list of GPUs, each with a list of its tables (rule 1)"
        )
    held = []
    for g, row in enumerate(matrix):
        if row and all(isinstance(item, int) for item in row):
            if len(row) != len(names) or not set(row) <= {0, 1}:
                raise PlanError(
                    f"{source}: GPU {g}: a row of {MATRIX} has a 0 or a 1 for each of the "
                    f"{len(names)} tables (rule 1)"
                )
            held.append([name for name, part in zip(names, row, strict=True) if part])
        else:
            held.append([_name(item, names, f"{source}: GPU {g}") for item in row])
    return held


def _name(table: Any, names: list[str], where: str) -> str:
    """Return the name of a table for its name or number in the plan."""
    if isinstance(table, int) and 0 <= table < len(names):
        return names[table]
    if table not in names:
        raise PlanError(f"{where}: no such table {table}; {suggest(str(table), names)} (rule 2)")
    return str(table)


def _with_modes(
    made: dict[str, TableSharding], compression: Any, source: str
) -> dict[str, TableSharding]:
    if not isinstance(compression, Mapping):
        raise PlanError(
            f"{source}: {COMPRESSION} must be an object of {' and '.join(MODES)} with lists of "
            "tables"
        )
    for word, group in compression.items():
        if not isinstance(group, list):
            raise PlanError(f"{source}: {COMPRESSION}.{word} must be a list of tables")
        if str(word).lower() not in MODES:
            raise PlanError(f"{source}: {COMPRESSION}.{word}: {suggest(str(word), MODES)}")
        for name in (
            _name(table, list(made), f"{source}: {COMPRESSION}.{word}") for table in group
        ):
            if made[name].mode != "replicated":
                made[name] = replace(made[name], mode=MODES[str(word).lower()])
    return made
