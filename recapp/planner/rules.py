"""Plans from rules: a list in YAML, first match wins, and single tables overridden by name.

    rules:
      - {type: row_wise, rows_above: 100000, dim_below: 256}
      - {type: column_wise, dim_at_least: 256}
      - {type: data_parallel, rows_at_most: 6000}
      - {type: table_wise}
    tables: {large_table: row_wise, "C1*": table_wise}

Balance: tables whose place is free (table_wise, column_wise, and the hosts of table_row_wise and grid_shard) are placed largest first on
the ranks that hold the fewest bytes so far; ties go to the lower rank. So equal inputs give equal plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from recapp.errors import ConfigError, PlanError, suggest
from recapp.planner.topology import Topology
from recapp.sharding.plan import ShardingPlan, TableSharding
from recapp.sharding.tilings import COLUMN_WIDTH, Places, ShardingType, tile
from recapp.tables.config import EmbeddingBagConfig

_FIXED = (ShardingType.ROW_WISE.value, ShardingType.DATA_PARALLEL.value)       # their place is not a choice


@dataclass(frozen=True)
class PlanRule:
    """One line of a rule list; every condition that is set must hold.

    Args:
        type: a sharding type.
        rows_above: more rows than this.
        rows_at_most: as many rows or fewer.
        dim_at_least: as many columns or more.
        dim_below: fewer columns.
        tables: names or globs, one of which must match.
        mode: "unique" or "pooled" instead of the plan's mode.
    """

    type: str
    rows_above: int | None = None
    rows_at_most: int | None = None
    dim_at_least: int | None = None
    dim_below: int | None = None
    tables: Sequence[str] | None = None
    mode: str | None = None

    def matches(self, table: EmbeddingBagConfig) -> bool:
        """Whether every condition holds."""
        rows, dim = table.num_embeddings, table.embedding_dim
        return ((self.rows_above is None or rows > self.rows_above) and (self.rows_at_most is None or rows <= self.rows_at_most)
                and (self.dim_at_least is None or dim >= self.dim_at_least) and (self.dim_below is None or dim < self.dim_below)
                and (self.tables is None or any(fnmatchcase(table.name, g) for g in self.tables)))


def read_rule(plain: Mapping[str, Any], setting: str) -> PlanRule:
    """A rule from YAML.

    Raises:
        ConfigError: a condition that does not exist, or no type.
    """
    known = [f.name for f in fields(PlanRule)]
    for key in plain:
        if key not in known:
            raise ConfigError(f"{setting}: unknown condition {key}; {suggest(str(key), known)}")
    if "type" not in plain:
        raise ConfigError(f"{setting}: a rule needs a type, one of {', '.join(t.value for t in ShardingType)}")
    globs = plain.get("tables")
    return PlanRule(**(dict(plain) | {"tables": [globs] if isinstance(globs, str) else globs}))


def plan_by_rules(tables: Sequence[EmbeddingBagConfig], topology: Topology, rules: Sequence[PlanRule], *, name: str,
                  overrides: Mapping[str, str] | None = None, mode: str = "unique", column_width: int = COLUMN_WIDTH) -> ShardingPlan:
    """Shard every table by the first rule that matches it.

    Args:
        tables: of the model.
        topology: the ranks.
        rules: first match wins.
        name: of the plan.
        overrides: sharding type by table name or glob; wins over the rules, and a name over a glob.
        mode: how tables ask for rows, "unique" or "pooled".
        column_width: columns of a vertical strip.

    Raises:
        PlanError: an override names no table, or no rule matches a table.
    """
    chosen = _overridden(tables, overrides or {}, mode)
    chosen |= {t.name: _choose(t, rules, mode) for t in tables if t.name not in chosen}
    load = [0] * topology.world_size
    done: dict[str, TableSharding] = {}
    itemsize = {t.name: t.data_type.dtype.itemsize for t in tables}
    for t in sorted(tables, key=lambda t: (chosen[t.name][0] not in _FIXED, -t.num_embeddings * t.embedding_dim * itemsize[t.name])):
        kind, how = chosen[t.name]
        ranks = sorted(range(topology.world_size), key=lambda r: (load[r], r))
        hosts = sorted(topology.host_ranks(), key=lambda h: (sum(load[r] for r in h), h))
        done[t.name] = tile(t, kind, Places(ranks, hosts, column_width), how)
        for s in done[t.name].shards:
            load[s.rank] += len(s.rows) * len(s.cols) * itemsize[t.name]
    return ShardingPlan({t.name: done[t.name] for t in tables}, topology.world_size, name)


def _choose(table: EmbeddingBagConfig, rules: Sequence[PlanRule], mode: str) -> tuple[str, str]:
    for rule in rules:
        if rule.matches(table):
            return rule.type, rule.mode or mode
    raise PlanError(f"table {table.name} ({table.num_embeddings:,} x {table.embedding_dim}): no rule of the plan matches; "
                    "end the list with a rule without conditions, e.g. {type: table_wise}")


def _overridden(tables: Sequence[EmbeddingBagConfig], overrides: Mapping[str, str], mode: str) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    exact = {t.name for t in tables}
    for pattern, kind in sorted(overrides.items(), key=lambda o: o[0] in exact):
        names = [t.name for t in tables if fnmatchcase(t.name, pattern)]
        if not names:
            raise PlanError(f"plan.tables.{pattern}: no such table; {suggest(pattern, [t.name for t in tables])}")
        found |= dict.fromkeys(names, (str(kind), mode))
    return found
