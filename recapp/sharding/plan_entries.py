"""Read a plan file, make a plan from it, and check each entry. Each error is one line with
the file, the table, the entry and the allowed values.

YAML has more than a plan needs: its own types, and references with which a few lines expand beyond
any memory. A plan file may have a few references to entries above; all other features raise a
PlanError.

`recapp/sharding/plan_file.py` shows the format.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import yaml  # type: ignore[import-untyped]

from recapp.errors import ConfigError, PlanError, suggest
from recapp.settings.small_files import read_text
from recapp.sharding.sharding_plan import Mode, PlannedFor, Shard, ShardingPlan, TableSharding
from recapp.sharding.sharding_types import CUSTOM, SHARDING_TYPES
from recapp.tables.config import EmbeddingConfig, table_config
from recapp.tables.dynamic import DYNAMIC, RUNS
from recapp.tables.row_order import ROW_ORDERS

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
        held = [(i, s) for i, s in enumerate(sharding.shards) if k in (None, s.rank)]
        for n, (i, a) in enumerate(held):
            for j, b in held[:n]:
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
        if hole := _hole([s for _, s in held], rows, dim):
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
    if dynamic and values["rows"] != RUNS:
        raise PlanError(
            f"{where}.rows={values['rows']}: a dynamic table is cut by its {RUNS} runs: set rows "
            f"to {RUNS}"
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
    given = [key for key in ("batch_per_rank", "statistics") if key in values]
    without = [name for name in done if name not in {t.name for t in configs}]
    if without and (configs or given):
        raise PlanError(
            f"{source}: tables.{without[0]}.table.features must be given where "
            f"{given[0] if given else 'other tables have them'}{' is' if given else ''}"
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
