"""Plan files: a plan as YAML that people read, edit and compare line by line.

    name: mixed
    ranks: 2
    batch_per_rank: 512
    tables:
      large_table:
        table: {rows: 1000000, dim: 128, data_type: fp32, features: [feature_1]}
        type: row_wise
        mode: unique
        shards:
          - {rank: 0, rows: [0, 500000]}
          - {rank: 1, rows: [500000, 1000000]}
      small_table:
        table: {rows: 100, dim: 16, data_type: fp32, features: [feature_2]}
        type: data_parallel
        mode: replicated
    statistics:
      large_table: {ids_per_sample: 1.0, bags_per_sample: 1.0, distinct: [[512, 400]],
                    load: [0.5, 0.5]}

Rows and columns are [first, one past the last]; the default is all rows or columns, so a whole
table is `{rank: 1}`. With `row_order: mixed` beside the mode, rows are positions
(`recapp/tables/positions.py`). A replicated table needs no shards. `features`, the batch and the
statistics are those for which the plan was made (`PlannedFor`). A plan written by hand may omit
them, but not the sizes: they show without a model whether a file tiles its tables.

Each entry of a file is checked, and each error is one line with the file, the table, the entry and
the allowed values. YAML has more than a plan needs: its own types, and references with which a few
lines expand beyond any memory. A plan file may have a few references to entries above; all other
features raise a PlanError.

Writing a plan and reading it gives an equal plan. Reading a file and writing it gives an equal
text, without the comments.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import yaml  # type: ignore[import-untyped]

from recapp.errors import ConfigError, PlanError, suggest
from recapp.settings.option_files import read_text
from recapp.settings.other_systems import format_of
from recapp.settings.whole_file import write_whole
from recapp.sharding.sharding_plan import Mode, PlannedFor, Shard, ShardingPlan, TableSharding
from recapp.sharding.sharding_types import CUSTOM, SHARDING_TYPES
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig, TableLookup, table_config
from recapp.tables.positions import DYNAMIC, ROW_ORDERS, STRETCHES, DynamicRows

FILE_BYTES = 2**28
DEEPEST = 50  # levels of nested mappings and lists; a plan has seven
REPEATED = 2**20  # values that references may repeat
# libyaml, where it is installed, is ten times faster
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WRONG = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)
TOP = ("name", "ranks", "batch_per_rank", "notes", "tables", "statistics")
ENTRY = ("table", "type", "mode", "row_order", "shards")
SIZES = ("rows", "dim")
START = ("init_range", "weight_init_max", "weight_init_min")
CONFIG = (*SIZES, "data_type", "features", "pooling", "id_rule", *START, "min_key", "dynamic")
PARTS = ("rows", "cols")
MOST_RANKS = 65_536  # one line of a file, a replicated table, becomes this many shards
MOST_ROWS = 2**53


class _Strict(_Loader):  # type: ignore[misc]
    """A safe loader that refuses a mapping with a duplicate key, which YAML allows."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        if not isinstance(node, yaml.MappingNode):
            raise _refused("this is no mapping", node.start_mark)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                raise _refused(f"{key.value} stands twice", key.start_mark)
            seen.add(str(key.value) if isinstance(key.value, str) else "")
        return super().construct_mapping(node, deep)


def read_plain_values(path: str | Path) -> Any:
    """Read a plan file, JSON or YAML, as plain values.

    Raises:
        PlanError: The file cannot be read, is neither JSON nor YAML, or holds more than plain
            values.
    """
    try:
        text = read_text(path, FILE_BYTES)
    except (OSError, ValueError) as e:
        raise PlanError(
            f"plan.path={path}: {getattr(e, 'strerror', None) or 'not a text'}: name a plan file; "
            "python -m recapp.plan export writes one"
        ) from None
    values = _parsed(path, text)
    if _count(path, values, 0, {}) > len(text) + REPEATED:
        raise PlanError(
            f"{path}: its YAML references (&, *) repeat far more entries than the file has: "
            "write the entries out"
        )
    return values


def _parsed(path: str | Path, text: str) -> Any:
    try:
        if text.lstrip()[:1] in ("[", "{"):
            with suppress(json.JSONDecodeError):  # JSON is YAML, unless tabs indent it
                return json.loads(text)
        _check_depth(path, text)
        return yaml.load(text, Loader=_Strict)  # safe: only adds checks to the safe loader
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(e, "problem", None) or str(e)
    except PlanError:
        raise
    except _WRONG as e:
        position = ""
        reason = "too many brackets" if isinstance(e, RecursionError) else str(e)
    raise PlanError(f"{path}{position}: neither YAML nor JSON: {' '.join(reason.split())}")


def _check_depth(path: str | Path, text: str) -> None:
    """Refuse nesting so deep that a loader, which recurs at each level, would crash."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise _too_deep(path)


def _too_deep(path: str | Path) -> PlanError:
    return PlanError(
        f"{path}: has more than {DEEPEST} nested levels, and a plan has fewer: "
        "write it as python -m recapp.plan export does"
    )


def _count(path: str | Path, value: Any, depth: int, known: dict[int, int]) -> int:
    """Count the values with all references expanded; each container is visited once."""
    if depth > DEEPEST:
        raise _too_deep(path)
    if isinstance(value, dict | list):
        if id(value) not in known:
            parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            known[id(value)] = 1 + sum(_count(path, part, depth + 1, known) for part in parts)
        return known[id(value)]
    if value is None or isinstance(value, str | int | float):
        return 1
    raise PlanError(
        f"{path}: holds a {type(value).__name__}: a plan must have texts and numbers only"
    )


def _refused(why: str, mark: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, why, mark)


def plan_from_plain_values(values: Any, source: str) -> ShardingPlan:
    """Return the plan in the plain values of a plan file.

    Args:
        values: Mappings, lists and scalars.
        source: The file, for messages.

    Raises:
        PlanError: An entry is wrong; the message names file, table, entry and the allowed values.
    """
    _keys(values, source, TOP, ("ranks", "tables"))
    world = _whole(values["ranks"], f"{source}: ranks", 1, MOST_RANKS)
    entries = values["tables"]
    if not isinstance(entries, Mapping) or not entries:
        raise PlanError(
            f"{source}: tables: must name at least one table, each with `table` and `shards`"
        )
    done: dict[str, TableSharding] = {}
    configs: list[EmbeddingConfig] = []
    for name, entry in entries.items():
        where = f"{source}: tables.{name}"
        _keys(entry, where, ENTRY, ("table",))
        _keys(entry["table"], f"{where}.table", CONFIG, SIZES)
        rows, dim = (_whole(entry["table"][key], f"{where}.table.{key}", 1) for key in SIZES)
        sharding = _sharding(entry, where, rows, dim, world)
        table = EmbeddingConfig(
            name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"]
        )
        try:
            sharding.cells(table, world)
        except PlanError:
            fault = _fault(sharding, rows, dim, world)
            raise PlanError(f"{where}.shards{fault}") from None
        done[str(name)] = sharding
        if "features" in entry["table"]:
            configs.append(_config(str(name), entry["table"], f"{where}.table"))
    return ShardingPlan(
        done,
        world,
        str(values.get("name", "custom")),
        tuple(str(n) for n in _list(values, "notes", source)),
        made_for=_made_for(values, configs, done, source),
    )


def shard_text(shard: Shard, rows: int, dim: int) -> str:
    """Return a shard in the form of a plan file: `{rank: 0, rows: [0, 500]}`.

    Args:
        shard: The shard.
        rows: Rows of the whole table.
        dim: Columns of the whole table.
    """
    parts = [f"rank: {shard.rank}"]
    parts += [
        f"{key}: [{part.start}, {part.stop}]"
        for key, part, whole in (("rows", shard.rows, rows), ("cols", shard.cols, dim))
        if part != range(whole)
    ]
    return "{" + ", ".join(parts) + "}"


def everywhere(rows: int, dim: int, world: int) -> list[Shard]:
    """Return a replica of the whole table on every rank."""
    return [Shard(k, range(rows), range(dim)) for k in range(world)]


def _sharding(
    entry: Mapping[str, Any], where: str, rows: int, dim: int, world: int
) -> TableSharding:
    known_words = (
        ("type", (*SHARDING_TYPES, CUSTOM)),
        ("mode", get_args(Mode)),
        ("row_order", ROW_ORDERS),
    )
    for key, known in known_words:
        if key in entry and entry[key] not in known:
            raise PlanError(f"{where}.{key}={entry[key]}: {suggest(str(entry[key]), known)}")
    mode = entry.get("mode", "auto")
    kind = entry.get("type", CUSTOM)
    order = entry.get("row_order", "natural")
    if "shards" not in entry and mode == "replicated":
        return TableSharding(tuple(everywhere(rows, dim, world)), mode, kind, order)
    shards = []
    for i, values in enumerate(_list(entry, "shards", where)):
        here = f"{where}.shards[{i}]"
        _keys(values, here, ("rank", *PARTS), ("rank",))
        rank = _whole(values["rank"], f"{here}.rank", 0)
        if rank >= world:
            raise PlanError(f"{here}.rank={rank}: there are {world} ranks (0..{world - 1})")
        shards.append(
            Shard(
                rank,
                *(
                    _range(values.get(key), f"{here}.{key}", end)
                    for key, end in (("rows", rows), ("cols", dim))
                ),
            )
        )
    if not shards:
        raise PlanError(
            f"{where}: needs shards, e.g. `shards: [{{rank: 0}}]` for the whole table on rank 0, "
            "or `mode: replicated`"
        )
    return TableSharding(tuple(shards), mode, kind, order)


def _fault(sharding: TableSharding, rows: int, dim: int, world: int) -> str:
    """Return a text that names the shards that overlap or a rectangle that no shard covers.
    A replicated table is checked rank by rank.
    """
    for k in range(world) if sharding.mode == "replicated" else (None,):
        numbered_shards = [(i, s) for i, s in enumerate(sharding.shards) if k in (None, s.rank)]
        for n, (i, a) in enumerate(numbered_shards):
            for j, b in numbered_shards[:n]:
                both = [
                    range(max(p.start, q.start), min(p.stop, q.stop))
                    for p, q in ((a.rows, b.rows), (a.cols, b.cols))
                ]
                if all(len(part) for part in both):
                    return (
                        f"[{i}] {shard_text(a, rows, dim)} overlaps [{j}] "
                        f"{shard_text(b, rows, dim)} in rows {_range_text(both[0])}, columns "
                        f"{_range_text(both[1])}: each cell lies in one "
                        f"shard{'' if k is None else ' of a rank'}"
                    )
        if hole := _hole([s for _, s in numbered_shards], rows, dim):
            add = shard_text(Shard(k or 0, *hole), rows, dim)
            of = "" if k is None else f" of rank {k}"
            return (
                f": rows {_range_text(hole[0])}, columns {_range_text(hole[1])} lie in no "
                f"shard{of}: widen one, or add "
                f"{add if k is not None else add.replace('rank: 0', 'rank: ...', 1)}"
            )
    return ": does not tile its table"


def _hole(shards: Sequence[Shard], rows: int, dim: int) -> tuple[range, range] | None:
    """Return the first rectangle, along the edges of the shards, that no shard covers."""
    row, col = (
        sorted(
            {
                0,
                end,
                *(edge for s in shards for edge in (getattr(s, key).start, getattr(s, key).stop)),
            }
        )
        for key, end in (("rows", rows), ("cols", dim))
    )
    for c0, c1 in pairwise(col):
        for r0, r1 in pairwise(row):
            if not any(r0 in s.rows and c0 in s.cols for s in shards):
                return range(r0, r1), range(c0, c1)
    return None


def _range_text(part: range) -> str:
    return f"{part.start}..{part.stop - 1}"


def _config(name: str, values: Mapping[str, Any], where: str) -> EmbeddingConfig:
    more = {key: values[key] for key in CONFIG[2:] if key in values and key != "features"}
    dynamic = "dynamic" in values
    if dynamic and values["rows"] != STRETCHES:
        raise PlanError(
            f"{where}.rows={values['rows']}: a dynamic table is cut by its {STRETCHES} stretches: "
            f"set rows to {STRETCHES}"
        )
    try:
        return table_config(
            name=name,
            num_embeddings=DYNAMIC if dynamic else values["rows"],
            embedding_dim=values["dim"],
            feature_names=values["features"],
            **more,
        )
    except (ConfigError, TypeError) as e:
        raise PlanError(f"{where}: {e}") from None


def _made_for(
    values: Mapping[str, Any],
    configs: list[EmbeddingConfig],
    done: Mapping[str, Any],
    source: str,
) -> PlannedFor | None:
    keys = [key for key in ("batch_per_rank", "statistics") if key in values]
    without = [name for name in done if name not in {t.name for t in configs}]
    if without and (configs or keys):
        raise PlanError(
            f"{source}: tables.{without[0]}.table.features must be given where "
            f"{keys[0] if keys else 'other tables have them'}{' is' if keys else ''}"
        )
    if not configs:
        return None
    known = values.get("statistics", {})
    _keys(known, f"{source}: statistics", tuple(done), ())
    batch = (
        _whole(values["batch_per_rank"], f"{source}: batch_per_rank", 1)
        if "batch_per_rank" in values
        else None
    )
    return PlannedFor(tuple(configs), batch, known)


def _keys(values: Any, where: str, known: Sequence[str], needed: Sequence[str]) -> None:
    if not isinstance(values, Mapping):
        raise PlanError(f"{where}: must be a mapping with {', '.join(needed or known)}")
    for key in values:
        if key not in known:
            raise PlanError(f"{where}: unknown key {key}; {suggest(str(key), known)}")
    for key in needed:
        if key not in values:
            raise PlanError(f"{where}: {key} must be given")


def _whole(value: Any, where: str, least: int, most: int = MOST_ROWS) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(f"{where}={value}: must be a whole number of at least {least}")
    if value > most:
        raise PlanError(f"{where}={value}: must be at most {most:,}")
    return value


def _range(value: Any, where: str, end: int) -> range:
    if value is None:
        return range(end)
    whole = (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    )
    if not whole or not 0 <= value[0] < value[1] <= end:
        raise PlanError(f"{where}={value}: must be [first, one past the last] within [0, {end}]")
    return range(*value)


def _list(values: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = values.get(key, [])
    if not isinstance(value, list):
        raise PlanError(f"{where}: {key}: must be a list")
    return value


HEADER = """\
# A sharding plan. To train with it: python -m recapp.train +plan=file plan.path=THIS_FILE \
trainer.devices={ranks}
# A shard is a rectangle on a rank: rows and cols are [first, one past the last]; left out, they \
are all there are.
"""
_AS_IT_IS = {f.name: f.default for f in fields(EmbeddingBagConfig)}
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


# ---- writing


def plan_to_yaml(plan: ShardingPlan) -> str:
    """Return a plan as the text of a plan file.

    Raises:
        PlanError: A table is a parameter.
    """
    for name, sharding in plan.tables.items():
        if sharding.as_parameter:
            raise PlanError(
                f"table {name} is a parameter (as_parameter): only DistributedModelParallel "
                "makes parameters, and a plan file cannot have them"
            )
    made_for = plan.made_for or PlannedFor(())
    configs = {t.name: t for t in made_for.tables}
    lines = [f"name: {_word(plan.name)}", f"ranks: {plan.world_size}"]
    if made_for.batch_per_rank is not None:
        lines.append(f"batch_per_rank: {made_for.batch_per_rank}")
    if plan.notes:
        lines += ["notes:", *(f"  - {_word(note)}" for note in plan.notes)]
    lines.append("tables:")
    for name in configs or plan.tables:
        lines += _table_lines(name, plan.tables[name], configs.get(name), plan.world_size)
    if made_for.statistics:
        lines += [
            "statistics:",
            *(f"  {_word(name)}: {_flow(known)}" for name, known in made_for.statistics.items()),
        ]
    return HEADER.format(ranks=plan.world_size) + "\n".join(lines) + "\n"


def write_plan(plan: ShardingPlan, path: str | Path) -> None:
    """Write a plan file.

    Raises:
        PlanError: The file cannot be written.
    """
    try:
        write_whole(path, plan_to_yaml(plan))
    except OSError as e:
        raise PlanError(f"{path}: cannot be written ({e.strerror}): choose another path") from None


def _said_of_rows(rows: DynamicRows) -> dict[str, Any]:
    """Return the settings of a dynamic table's rows, without defaults, as plain values."""
    usual = DynamicRows()
    return {
        f.name: str(value) if isinstance(value, str) else value
        for f in fields(rows)
        if (value := getattr(rows, f.name)) != getattr(usual, f.name)
    }


def _table_lines(
    name: str, sharding: TableSharding, config: EmbeddingConfig | None, world: int
) -> list[str]:
    rows, dim = (max(getattr(s, part).stop for s in sharding.shards) for part in PARTS)
    sizes: dict[str, Any] = {"rows": rows, "dim": dim}
    if config is not None:
        rows = config.plan_rows
        dim = config.embedding_dim
        sizes = {
            "rows": rows,
            "dim": dim,
            "data_type": str(config.data_type),
            "features": list(config.feature_names),
        }
        for key in ("pooling", "id_rule", *START, "min_key"):
            value = getattr(config, key)
            sizes |= (
                {key: str(value) if isinstance(value, str) else value}
                if value != _AS_IT_IS[key]
                else {}
            )
        if config.dynamic is not None:
            sizes["dynamic"] = _said_of_rows(config.dynamic)
    lines = [
        f"  {_word(name)}:",
        f"    table: {_flow(sizes)}",
        f"    type: {_word(sharding.sharding_type)}",
        f"    mode: {sharding.mode}",
        *(["    row_order: mixed"] if sharding.row_order == "mixed" else []),
    ]
    if sharding.mode == "replicated" and list(sharding.shards) == everywhere(rows, dim, world):
        return lines
    return [
        *lines,
        "    shards:",
        *(f"      - {shard_text(s, rows, dim)}" for s in sharding.shards),
    ]


def _flow(value: Any) -> str:
    """Return plain values in one line, in PyYAML's form and hundreds of times faster."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{_word(str(key))}: {_flow(part)}" for key, part in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        text = repr(float(value))
        if not math.isfinite(value):
            return text.replace("inf", ".inf").replace("nan", ".nan")
        return text if "." in text else text.replace("e", ".0e")  # YAML reads 1e-05 as a text
    return _word(value) if isinstance(value, str) else json.dumps(value)


@lru_cache(maxsize=4096)
def _word(text: str) -> str:
    """Return a text in YAML's form: without quotes if YAML reads the same text back."""
    if _PLAIN.fullmatch(text) and yaml.safe_load(text) == text:
        return text
    return str(yaml.safe_dump(text, default_style='"', width=10**9, allow_unicode=True)).strip()


# ---- reading


def load_plan(
    path: str | Path,
    tables: Sequence[EmbeddingConfig],
    world_size: int | None,
    lookups: Sequence[TableLookup] | None = None,
) -> ShardingPlan:
    """Return the plan of a file for these tables on these ranks.

    Args:
        path: A plan file in YAML, or in a format of `recapp/settings/other_systems.py`, such as
            HugeCTR's JSON. The content decides the format.
        tables: The tables of the model.
        world_size: The number of ranks; None takes the number in the file.
        lookups: The lookups of the tables in the order of their declaration, by which HugeCTR's
            plans number them; None takes the lookups that the tables declare.

    Raises:
        PlanError: The file cannot be read, does not tile the tables, or was made for other tables
            or ranks. The message names file, table and entry.
    """
    values = read_plain_values(path)
    foreign = format_of(values)
    plan = (
        foreign.plan_from_values(values, tables, str(path), lookups)
        if foreign
        else plan_from_plain_values(values, str(path))
    )
    again = foreign.AGAIN if foreign else "export"
    world = plan.world_size if world_size is None else world_size
    check_made_for(
        plan, tables, world, str(path), f"python -m recapp.plan {again} trainer.devices={world}"
    )
    return plan


def read_plan(path: str | Path) -> ShardingPlan:
    """Return the plan of a plan file in YAML, complete. It tiles the tables that it names.

    Raises:
        PlanError: The file cannot be read or an entry is wrong; the message names file, table and
            entry.
    """
    return plan_from_plain_values(read_plain_values(path), str(path))


def check_made_for(
    plan: ShardingPlan,
    tables: Sequence[EmbeddingConfig],
    world_size: int,
    source: str,
    again: str,
) -> None:
    """Refuse a plan that was made for other ranks or other tables.

    Args:
        plan: A plan that tiles the tables that it names.
        tables: The tables of the model.
        world_size: The number of ranks.
        source: The plan's file.
        again: The command that makes a plan for these ranks and tables.

    Raises:
        PlanError: The plan was made for others; one line names the plan's ranks or tables and the
            fix.
    """
    if plan.world_size != world_size:
        raise PlanError(
            f"{source} was made for {plan.world_size} ranks, and there are {world_size}: "
            f"set trainer.devices={plan.world_size}, or make one for {world_size}: {again}"
        )
    names = [t.name for t in tables]
    for name in plan.tables:
        if name not in names:
            raise PlanError(
                f"{source}: tables.{name}: the model has no such table; {suggest(name, names)}"
            )
    for t in tables:
        if t.name not in plan.tables:
            raise PlanError(
                f"{source}: has no entry for table {t.name} ({t.num_embeddings} rows x "
                f"{t.embedding_dim}); add tables.{t.name}, or make it again: {again}"
            )
        had = [max(getattr(s, part).stop for s in plan.tables[t.name].shards) for part in PARTS]
        if had != [t.plan_rows, t.embedding_dim]:
            grows = " (a dynamic table is cut by its 64 stretches)" if t.dynamic is not None else ""
            raise PlanError(
                f"{source}: tables.{t.name} was made for {had[0]} rows x {had[1]}, the model's "
                f"table has {t.plan_rows} x {t.embedding_dim}{grows}: make it again: {again}"
            )
