"""Make plans from rules: a list in YAML, where the first match wins, and overrides of single
tables.

    rules:
      - {type: row_wise, rows_above: 100000, dim_below: 256}
      - {type: column_wise, dim_at_least: 256}
      - {type: data_parallel, rows_at_most: 6000, access: frequent}
      - {type: table_wise}
    tables: {large_table: row_wise, "C1*": table_wise}
    deal: balanced

The conditions of a rule test facts of a table and of the machine (`TableFacts`). An unknown fact
fulfils no condition, and the plan's notes name it. The plan names the rule of each decision
(`ShardingPlan.reasons`).

Some sharding types always take all ranks (row_wise, data_parallel). For other types `deal` sets the
choice of ranks. `balanced` places the largest table first, on the ranks with the fewest bytes so
far; the lower rank wins a tie. `round_robin` goes in the model's order and gives a vertical strip
to each rank (or host) in turn. Equal inputs give equal plans.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from recapp.errors import PlanError, suggest
from recapp.planner.planner_settings import PlanRule
from recapp.planner.problem import Topology
from recapp.planner.rank_memory import row_bytes, weight_bytes
from recapp.sharding.sharding_plan import ShardingPlan, TableSharding, tile
from recapp.sharding.sharding_types import (
    COLUMN_WIDTH,
    CandidateRanks,
    sharding_type,
)
from recapp.tables.config import EmbeddingConfig, TableLookup, lookups_of
from recapp.tables.positions import RowOrderName

# each row is read in every step, so a replica's gradients are not larger than the table
FREQUENT_LOOKUPS_PER_ROW = 1.0
SPARSE_LOOKUPS_PER_ROW = 0.01  # a step reads at most one row of a hundred
# sent by a rank in a large all-to-all: NVLink of a V100 gives 37 and more, InfiniBand NDR 40; PCIe
# 4.0 and InfiniBand HDR give 20 to 25
FAST_GB_PER_S = 30.0


@dataclass(frozen=True)
class TableFacts:
    """The facts that conditions of rules test; None is unknown.

    Args:
        name: The name of the table.
        rows: The number of rows, R.
        dim: The number of columns, D.
        lookups_per_row: Mean lookups of a row in a step of all ranks.
        memory_share: The weights as a share of the smallest rank's memory for tables.
        interconnect_gb_per_s: 10^9 bytes that a rank sends a second in a large all-to-all.
        hosts: The number of hosts.
    """

    name: str
    rows: int
    dim: int
    lookups_per_row: float | None = None
    memory_share: float | None = None
    interconnect_gb_per_s: float | None = None
    hosts: int = 1

    @property
    def access(self) -> str | None:
        """Return `frequent`, `sparse` or `between`."""
        per_row = self.lookups_per_row
        if per_row is None:
            return None
        return (
            "frequent"
            if per_row >= FREQUENT_LOOKUPS_PER_ROW
            else "sparse"
            if per_row <= SPARSE_LOOKUPS_PER_ROW
            else "between"
        )

    @property
    def interconnect(self) -> str | None:
        """Return `fast` or `slow`."""
        speed = self.interconnect_gb_per_s
        return None if speed is None else "fast" if speed >= FAST_GB_PER_S else "slow"


def table_facts(
    tables: Sequence[EmbeddingConfig],
    topology: Topology,
    *,
    statistics: Mapping[str, Any] | None = None,
    batch_per_rank: int | None = None,
    lookups: Sequence[TableLookup] | None = None,
) -> list[TableFacts]:
    """Return the facts of each table.

    Args:
        tables: The tables of the model.
        topology: The ranks, their hosts, memory and hardware.
        statistics: Objects with `ids_per_sample`, by table name; without them every lookup counts
            one id in each sample.
        batch_per_rank: The samples of a rank's batch.
        lookups: The lookups that read the tables; None takes those that the tables declare.
    """
    memory = min(topology.memory_bytes) - topology.reserve_bytes if topology.memory_bytes else None
    batch = batch_per_rank * topology.world_size if batch_per_rank else None
    known = statistics or {}
    lookup_counts = Counter(
        x.table.name for x in (lookups_of(tables) if lookups is None else lookups)
    )
    speed = None
    if topology.hardware is not None:
        link = topology.hardware.all_to_all["network" if topology.hosts > 1 else "host"]
        speed = float(1 / link.seconds(max(topology.world_size, 2), 1e9))

    def of(t: EmbeddingConfig) -> TableFacts:
        ids = float(known[t.name].ids_per_sample if t.name in known else lookup_counts[t.name])
        return TableFacts(
            t.name,
            t.num_embeddings,
            t.embedding_dim,
            ids * batch / t.num_embeddings if batch else None,
            None if memory is None else weight_bytes(t) / max(memory, 1),
            speed,
            topology.hosts,
        )

    return [of(t) for t in tables]


# the table fact, the comparison, and the condition in words
_CONDITIONS: dict[str, tuple[str, Callable[[Any, Any], bool], str]] = {
    "rows_above": ("rows", operator.gt, "more than {:,} rows"),
    "rows_at_most": ("rows", operator.le, "at most {:,} rows"),
    "rows_below": ("rows", operator.lt, "fewer than {:,} rows"),
    "dim_above": ("dim", operator.gt, "more than {} columns"),
    "dim_at_least": ("dim", operator.ge, "at least {} columns"),
    "dim_below": ("dim", operator.lt, "fewer than {} columns"),
    "lookups_per_row_above": ("lookups_per_row", operator.gt, "more than {} lookups per row"),
    "lookups_per_row_at_most": ("lookups_per_row", operator.le, "at most {} lookups per row"),
    "access": ("access", operator.eq, "{} access"),
    "memory_share_above": ("memory_share", operator.gt, "more than {:.4g} of a rank's memory"),
    "memory_share_at_most": ("memory_share", operator.le, "at most {:.4g} of a rank's memory"),
    "interconnect": ("interconnect", operator.eq, "{} interconnect"),
    "hosts_at_least": ("hosts", operator.ge, "at least {} hosts"),
    "hosts_at_most": ("hosts", operator.le, "at most {} hosts"),
    "tables": (
        "name",
        lambda name, globs: any(fnmatchcase(name, glob) for glob in globs),
        "named {}",
    ),
}
_WHY_UNKNOWN = {
    "lookups_per_row": "the batch size is not known",
    "access": "the batch size is not known",
    "memory_share": "no memory is known (topology.memory_bytes)",
    "interconnect": "no interconnect is known (topology.hardware)",
}


def conditions_of(rule: PlanRule) -> list[tuple[str, Any]]:
    """Return the name and value of each condition that a rule sets."""
    values = [(name, getattr(rule, name)) for name in _CONDITIONS if name != "tables"]
    return [
        (name, value)
        for name, value in (*values, ("tables", rule.globs or None))
        if value is not None
    ]


def matches(rule: PlanRule, facts: TableFacts) -> bool:
    """Return whether all conditions of a rule hold; a condition on an unknown fact does not."""
    tested = [(*_CONDITIONS[name][:2], value) for name, value in conditions_of(rule)]
    known = [(getattr(facts, fact), holds, value) for fact, holds, value in tested]
    return all(fact is not None and holds(fact, value) for fact, holds, value in known)


def in_words(rule: PlanRule) -> str:
    """Return the type and the conditions of a rule, for people."""
    conditions = [
        _CONDITIONS[name][2].format(" or ".join(value) if name == "tables" else value)
        for name, value in conditions_of(rule)
    ]
    return f"{rule.type} for {', '.join(conditions) or 'all that is left'}"


def plan_by_rules(
    tables: Sequence[EmbeddingConfig],
    topology: Topology,
    rules: Sequence[PlanRule],
    *,
    name: str,
    overrides: Mapping[str, str] | None = None,
    mode: str = "unique",
    column_width: int = COLUMN_WIDTH,
    row_order: RowOrderName = "natural",
    balanced: bool = True,
    statistics: Mapping[str, Any] | None = None,
    batch_per_rank: int | None = None,
    lookups: Sequence[TableLookup] | None = None,
) -> ShardingPlan:
    """Shard every table by the first rule that matches it.

    Args:
        tables: The tables of the model.
        topology: The ranks.
        rules: The rules in order; the first that matches a table decides.
        name: The name of the plan.
        overrides: Sharding types by table name or glob. They win over the rules, and a name wins
            over a glob.
        mode: The mode of tables: "unique", "pooled" or "auto".
        column_width: Columns of a vertical strip.
        row_order: "mixed" distributes rows over the strips of tables that are cut by rows
            (`recapp/tables/positions.py`).
        balanced: Whether types that do not take all ranks are dealt by `balanced`, or else by
            `round_robin`.
        statistics, batch_per_rank, lookups: As for `table_facts`.

    Returns:
        The plan; its `reasons` name the rule of each table, and its `notes` name the unknown facts
            of conditions.

    Raises:
        PlanError: An override names no table, or no rule matches a table.
    """
    facts = table_facts(
        tables, topology, statistics=statistics, batch_per_rank=batch_per_rank, lookups=lookups
    )
    default = _Choice("", mode, row_order, "")
    choices = _overridden(tables, overrides or {}, default)
    choices |= {f.name: _choose(f, rules, name, default) for f in facts if f.name not in choices}
    shardings = _dealt(tables, topology, choices, column_width, balanced)
    return ShardingPlan(
        {t.name: shardings[t.name] for t in tables},
        topology.world_size,
        name,
        _unknown(facts[0], rules),
        {t.name: choices[t.name].why for t in tables},
    )


class _Choice(NamedTuple):
    """The sharding of a table, and its reason: the rule that matched."""

    type: str
    mode: str
    row_order: RowOrderName
    why: str


def _dealt(
    tables: Sequence[EmbeddingConfig],
    topology: Topology,
    choices: Mapping[str, _Choice],
    column_width: int,
    balanced: bool,
) -> dict[str, TableSharding]:
    """Cut all tables: the largest first, on the ranks with the fewest bytes, or in the model's
    order, on the ranks whose turn it is.
    """
    choose = {
        t.name: sharding_type(choices[t.name].type, f"table {t.name}").chooses_ranks for t in tables
    }
    first_ranks = list(range(topology.world_size))
    first_hosts = topology.host_ranks()
    load = [0] * topology.world_size
    turn = 0
    shardings: dict[str, TableSharding] = {}
    by_size = sorted(tables, key=lambda t: (choose[t.name], -weight_bytes(t)))
    for t in by_size if balanced else tables:
        r = turn % len(first_ranks)
        h = turn % len(first_hosts)
        ranks = first_ranks[r:] + first_ranks[:r]
        hosts = first_hosts[h:] + first_hosts[:h]
        if balanced:
            ranks = sorted(first_ranks, key=lambda r: (load[r], r))
            hosts = sorted(first_hosts, key=lambda h: (sum(load[r] for r in h), h))
        shardings[t.name] = tile(
            t,
            choices[t.name].type,
            CandidateRanks(ranks, hosts),
            choices[t.name].mode,
            column_width=column_width,
            row_order=choices[t.name].row_order,
        )
        for s in shardings[t.name].shards:
            load[s.rank] += t.rows_in(s.rows) * row_bytes(t.data_type, len(s.cols))
        turn += choose[t.name] * len({s.cols.start for s in shardings[t.name].shards})
    return shardings


def _choose(facts: TableFacts, rules: Sequence[PlanRule], name: str, default: _Choice) -> _Choice:
    for number, rule in enumerate(rules):
        if matches(rule, facts):
            return _Choice(
                rule.type,
                rule.mode or default.mode,
                rule.row_order or default.row_order,
                f"rules[{number}] of {name}: {in_words(rule)}",
            )
    raise PlanError(
        f"table {facts.name} ({facts.rows:,} x {facts.dim}): no rule of the plan matches; "
        "end the list with a rule without conditions, e.g. {type: table_wise}"
    )


def _unknown(facts: TableFacts, rules: Iterable[PlanRule]) -> tuple[str, ...]:
    """Return a sentence for each unknown fact that rules test."""
    condition_by_fact = {
        _CONDITIONS[name][0]: name
        for rule in reversed(list(rules))
        for name, _ in conditions_of(rule)
    }
    return tuple(
        f"rules that ask for {name} do not fire: {_WHY_UNKNOWN[fact]}"
        for fact, name in sorted(condition_by_fact.items())
        if getattr(facts, fact) is None
    )


def _overridden(
    tables: Sequence[EmbeddingConfig], overrides: Mapping[str, str], default: _Choice
) -> dict[str, _Choice]:
    choices: dict[str, _Choice] = {}
    exact = {t.name for t in tables}
    for pattern, type_name in sorted(overrides.items(), key=lambda o: o[0] in exact):
        names = [t.name for t in tables if fnmatchcase(t.name, pattern)]
        if not names:
            raise PlanError(
                f"plan.tables.{pattern}: no such table; "
                f"{suggest(pattern, [t.name for t in tables])}"
            )
        why = f"plan.tables.{pattern}={type_name}"
        choices |= dict.fromkeys(names, default._replace(type=str(type_name), why=why))
    return choices
