"""HugeCTR's later plans, which are Python arguments there and a JSON object of the same names here:
a matrix of GPUs and tables.

    v4.1   {"shard_matrix": [[1, 0, 1], [0, 1, 1]],        GPU x table: 1 where the GPU holds a part
            "table_group_strategy": [[0, 1], [2]],         tables of each group
            "table_placement_strategy": ["mp", "dp"]}      of each group
    later  {"shard_matrix": [["C1", "C3"], ["C2", "C3"]],  by name
            "shard_strategy": [["mp", ["C1", "C2"]], ["dp", ["C3"]]],
            "compression_strategy": {"reduction": ["C1"], "unique": ["C2"]}}

The GPUs of an mp table are its shards, in order; those of a dp table are all. `["C1", 2]` instead
of `"C1"` cuts the columns in two: the first half of its GPUs holds the left strip, by rows.
Reduction asks for pooled vectors, unique for those of distinct rows. Both versions sometimes say
`emb_table_...` for `table_...`.

Sources: `EmbeddingPlanner` of v4.1, `HugeCTR/src/embeddings/embedding_collection.cpp` of 25.03.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from recapp.errors import PlanError, suggest
from recapp.sharding.sharding_plan import Mode, Shard, TableSharding
from recapp.sharding.sharding_types import equal_ranges
from recapp.tables.config import EmbeddingBagConfig

MATRIX = "shard_matrix"
GROUPS = "table_group_strategy"
PLACED = "table_placement_strategy"
STRATEGY = "shard_strategy"
COMPRESSION = "compression_strategy"
WORDS = {"mp": "mp", "localized": "mp", "dp": "dp"}
MODES: dict[str, Mode] = {"reduction": "pooled", "unique": "unique"}


def table_sharding(
    table: EmbeddingBagConfig, gpus: Sequence[int] | None, world: int, strips: int = 1
) -> TableSharding:
    """A table on the GPUs of its shards, in the order of their ids; None: replicated on all.

    Args:
        table: to be cut.
        gpus: as many as `strips` times the shards of a strip.
        world: all GPUs.
        strips: of columns, each on an equal run of the GPUs.
    """
    rows = range(table.num_embeddings)
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
    return TableSharding(tuple(shards), "auto", "column_wise" if strips == len(gpus) > 1 else kind)


def plan_from_matrix(
    plain: Mapping[str, Any], tables: Sequence[EmbeddingBagConfig], source: str
) -> dict[str, TableSharding]:
    """Every table's rectangles.

    Raises:
        PlanError: naming GPU, group, table and what would be right.
    """
    said = {str(key).removeprefix("emb_"): value for key, value in plain.items()}
    for key in said:
        if key not in (known := (MATRIX, GROUPS, PLACED, STRATEGY, COMPRESSION)):
            raise PlanError(f"{source}: unknown key {key}; {suggest(key, known)}")
    names = [t.name for t in tables]
    placed = _placed(said, names, source)
    held = _held(said[MATRIX], names, source)
    made = {}
    for t in tables:
        if t.name not in placed:
            raise PlanError(
                f"{source}: table {t.name} is in no group: every table is in one (rule 12)"
            )
        k, word, strips = placed[t.name]
        gpus = [g for g, own in enumerate(held) if t.name in own]
        where = f"{source}: group {k}: table {t.name}"
        if word == "dp":
            for g in (g for g in range(len(held)) if g not in gpus):
                raise PlanError(
                    f"{where} is dp, but GPU {g} does not hold it: a dp table is in every row of "
                    f"{MATRIX} (rule 8)"
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
                f"and its {len(gpus)} GPUs, "
                "and a dp table has one"
            )
        made[t.name] = table_sharding(t, None if word == "dp" else gpus, len(held), strips)
    return _with_modes(made, said.get(COMPRESSION, {}), source)


def _placed(
    said: Mapping[str, Any], names: list[str], source: str
) -> dict[str, tuple[int, str, int]]:
    """Group, placement and strips of columns by table."""
    if (STRATEGY in said) == (GROUPS in said) or (GROUPS in said) != (PLACED in said):
        raise PlanError(f"{source}: {MATRIX} needs {STRATEGY}, or {GROUPS} and {PLACED}")
    groups = said.get(GROUPS)
    words = said.get(PLACED)
    if STRATEGY in said:
        pairs = said[STRATEGY]
        if not isinstance(pairs, list) or not all(
            isinstance(p, list) and len(p) == 2 for p in pairs
        ):
            raise PlanError(f"{source}: {STRATEGY} must be a list of [placement, tables]")
        words = [p[0] for p in pairs]
        groups = [p[1] for p in pairs]
    if not isinstance(groups, list) or not isinstance(words, list) or len(groups) != len(words):
        raise PlanError(f"{source}: {GROUPS} and {PLACED} must be lists of one length")
    placed: dict[str, tuple[int, str, int]] = {}
    for k, (word, group) in enumerate(zip(words, groups, strict=True)):
        if not isinstance(word, str) or word not in WORDS or not isinstance(group, list):
            raise PlanError(
                f"{source}: group {k}: placement {word}: {suggest(str(word), WORDS)} and a list "
                "of tables (rule 3)"
            )
        for item in group:
            table, strips = item if isinstance(item, list) and len(item) == 2 else (item, 1)
            name = _name(table, names, f"{source}: group {k}")
            if name in placed:
                raise PlanError(
                    f"{source}: group {k}: table {name} is in group {placed[name][0]}, too: a "
                    "table is in one group (rule 12)"
                )
            if not isinstance(strips, int):
                raise PlanError(
                    f"{source}: group {k}: table {name}: strips of columns must be a whole "
                    f"number, not {strips}"
                )
            placed[name] = k, WORDS[word], strips
    return placed


def _held(matrix: Any, names: list[str], source: str) -> list[list[str]]:
    """The tables of every GPU."""
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
    """A table by name or number."""
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
