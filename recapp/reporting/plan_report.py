"""Explains a plan: the place of every shard, the memory of each rank, the cost of a step, and the
reason for each table's sharding.

The runner-up of a table is the best other sharding type while all other tables keep their places.
It works for any plan, also for a plan made by plan rules or by hand: the plan's own rectangles are
one more option for the planner.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from recapp.errors import PlanError
from recapp.optim.named_rules import Rules, rule_of
from recapp.optim.rules import rowwise_adagrad
from recapp.planner.cost import PHASES, Floats, PlanCost, cost_of, fixed_of
from recapp.planner.options import Option, option_of, options_of, own_seconds, phases_of
from recapp.planner.planner_settings import ParameterConstraints
from recapp.planner.pricing import buffer_bytes, plan_cost
from recapp.planner.problem import PlanningProblem, Topology
from recapp.planner.rank_memory import bytes_per_rank
from recapp.planner.search import PartialPlan, capacity_of
from recapp.planner.search_space import Placement, SearchSpace, TableBundle
from recapp.reporting.run_record import PlannedRank, PlannedTable, PlanReport, Traffic
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.config import BAG_POOLINGS, EmbeddingConfig, PoolingType, TableLookup
from recapp.tables.statistics import TableStatistics

ANALYZED_BATCH = 1024  # samples per rank, if neither the caller nor the plan has a batch size
GRAPHS = {
    "step": "a step is priced as one CUDA graph, whatever the groups; engine.graph=off has none",
    "dense": "what is between lookup and update is priced as one CUDA graph; engine.graph=off has "
    "none",
}
SMALL = 0.001  # share of the step; a phase that changes by less is not named


@dataclass(frozen=True)
class RunnerUp:
    """The best other sharding type for one table.

    Args:
        sharding_type: The name of the type.
        seconds: The seconds of the step with this type; infinite if the table does not fit.
        why: The phases that would change, in words.
    """

    sharding_type: str
    seconds: float
    why: str


def plan_rows(tables: Sequence[EmbeddingConfig], plan: ShardingPlan) -> list[dict[str, Any]]:
    """Return a record for each table: name, rows, dim, type, bytes of weights on the rank with the
    most of them, and the ranks that have a shard.

    The mode follows the type, unless the type or the default implies it: `row_wise (pooled)`.
    """
    memory_of_ranks = bytes_per_rank(tables, plan, None)
    return [
        {
            "table": t.name,
            "rows": t.num_embeddings if t.dynamic is None else "dynamic",
            "dim": t.embedding_dim,
            "type": s.label if s.mode in ("unique", "replicated") else f"{s.label} ({s.mode})",
            "bytes": max(h.weights.get(t.name, 0) for h in memory_of_ranks),
            "ranks": ranks_text(s.ranks, plan.world_size),
        }
        for t, s in ((t, plan.tables[t.name]) for t in tables)
    ]


def ranks_text(ranks: Sequence[int], world: int) -> str:
    """Return ranks as text, neighbours as ranges: `0,2-5`, or `all`."""
    if len(ranks) == world:
        return "all"
    texts = []
    for _, pairs in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        neighbours = [rank for _, rank in pairs]
        last = f"-{neighbours[-1]}" if len(neighbours) > 1 else ""
        texts.append(f"{neighbours[0]}{last}")
    return ",".join(texts)


def rank_rows(
    tables: Sequence[EmbeddingConfig],
    plan: ShardingPlan,
    rule: Rules | None,
    averaged: bool = False,
) -> list[dict[str, Any]]:
    """Return a record for each rank: the number of tables, the bytes of weights, of optimiser
    state, and of both. Arguments as for `bytes_per_rank`.
    """
    return [
        {
            "rank": rank,
            "tables": len(memory.weights),
            "weights": sum(memory.weights.values()),
            "optimiser_state": sum(memory.state.values()),
            "bytes": memory.total,
        }
        for rank, memory in enumerate(bytes_per_rank(tables, plan, rule, averaged))
    ]


# ---- with prices


def explained(
    plan: ShardingPlan,
    problem: PlanningProblem,
    *,
    lower_bound_seconds: float | None = None,
    alternatives: bool = True,
) -> PlanReport:
    """Return all facts about a plan before it runs.

    Args:
        plan: Any plan of the problem's tables.
        problem: The tables, machine, batch, optimiser and ids for which the plan is priced.
        lower_bound_seconds: The least possible time of a step; None if it is not known.
        alternatives: Whether to search for the best other sharding type of every table.
    """
    tables = problem.tables
    options = [option_of(t, plan.tables[t.name], problem) for t in tables]
    cost = cost_of([o.work for o in options], problem)
    others = runner_ups(plan, problem, cost.step_seconds) if alternatives else {}
    sent = cost.bytes_WW
    return PlanReport(
        name=plan.name,
        world_size=plan.world_size,
        hosts=tuple(tuple(ranks) for ranks in problem.topology.host_ranks()),
        batch_per_rank=problem.batch_per_rank,
        hardware=problem.hardware.name,
        step_ms=cost.step_seconds * 1e3,
        lower_bound_ms=None if lower_bound_seconds is None else lower_bound_seconds * 1e3,
        notes=(*plan.notes, *([GRAPHS[problem.recorded]] if problem.recorded else [])),
        reserve=dict(problem.reserve) or {"set": problem.topology.reserve_bytes},
        rows=tuple(
            _table(t, plan, others.get(t.name), o) for t, o in zip(tables, options, strict=True)
        ),
        uses=tuple(table_uses(tables, problem.lookups, problem.rule)),
        ranks=_ranks(plan, problem, cost),
        between_ranks=tuple(
            Traffic(a, b, round(float(sent[a, b])))
            for a in range(len(sent))
            for b in range(len(sent))
            if sent[a, b] > 0.5
        ),
    )


def _table(
    table: EmbeddingConfig, plan: ShardingPlan, other: RunnerUp | None, option: Option
) -> PlannedTable:
    sharding = plan.tables[table.name]
    why = [plan.reasons.get(table.name, ""), f"{other.sharding_type}: {other.why}" if other else ""]
    return PlannedTable(
        **_milliseconds(phases_of(own_seconds(option, plan.world_size))),
        table=table.name,
        rows=table.num_embeddings,
        plan_rows=table.plan_rows,
        dynamic=table.dynamic is not None,
        dim=table.embedding_dim,
        type=sharding.sharding_type,
        mode=option.mode,
        row_order=sharding.row_order,
        ranks=tuple(sharding.ranks),
        bytes=round(float(option.work.bytes_M.sum())),
        runner_up=other.sharding_type if other else None,
        runner_up_ms=other.seconds * 1e3 if other and other.seconds != float("inf") else None,
        why="; ".join(filter(None, why)),
        shards=tuple(
            (s.rank, s.rows.start, s.rows.stop, s.cols.start, s.cols.stop)
            for s in sharding.shards
            if len(s.rows) and len(s.cols)
        ),
    )


def _milliseconds(seconds: Floats) -> dict[str, float]:
    times = {f"{phase}_ms": float(s) * 1e3 for phase, s in zip(PHASES, seconds, strict=True)}
    return {"predicted_ms": float(seconds.sum()) * 1e3, **times}


def _ranks(plan: ShardingPlan, problem: PlanningProblem, cost: PlanCost) -> tuple[PlannedRank, ...]:
    hosts = {
        rank: number for number, ranks in enumerate(problem.topology.host_ranks()) for rank in ranks
    }
    memory = problem.topology.memory_bytes
    buffers_W = buffer_bytes(plan, problem)
    bytes_W = bytes_per_rank(problem.tables, plan, problem.rule, problem.averaged)
    return tuple(
        PlannedRank(
            **_milliseconds(cost.seconds_PW[:, rank]),
            rank=rank,
            host=hosts[rank],
            bytes=of_rank.total,
            weights=sum(of_rank.weights.values()),
            state=sum(of_rank.state.values()),
            buffers=round(float(buffers_W[rank])),
            capacity=None if memory is None else memory[rank],
        )
        for rank, of_rank in enumerate(bytes_W)
    )


def analyze_plan(
    plan: ShardingPlan,
    *,
    tables: Sequence[EmbeddingConfig] | None = None,
    batch_size: int | None = None,
    statistics: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Count the bytes that a plan puts on each rank and sends between ranks.

    Args:
        plan: Any plan. A plan from the planner or a file stores its tables, batch size and
            statistics; a plan made by hand needs the other arguments.
        tables: The tables of the plan; None takes the tables stored in the plan.
        batch_size: The samples of a rank; None takes the number stored in the plan, else 1024.
        statistics: Id statistics by table name, `TableStatistics` or their plain values; None takes
            the statistics stored in the plan.

    Returns:
        `sharding_types`: The number of tables of each type;
        `memory_distribution`: The bytes of weights on each rank, in their real dtypes;
        `communication_patterns`: The bytes of a training step from each rank (row) to each rank
            (column).

    Raises:
        PlanError: Neither the plan nor `tables` lists the plan's tables, or the plan does not fit
            them.
    """
    made_for = plan.made_for
    if tables is None and made_for is None:
        raise PlanError(
            f"plan {plan.name} has no tables: give them, analyze_plan(plan, tables=[...])"
        )
    known = list(tables) if tables is not None else list(made_for.tables) if made_for else []
    plan.check(known)
    batch = batch_size or (made_for.batch_per_rank if made_for else None) or ANALYZED_BATCH
    statistics_of_tables = (
        statistics if statistics is not None else made_for.statistics if made_for else {}
    )
    ids = {
        name: s
        if isinstance(s, TableStatistics)
        else TableStatistics.from_dict(s, f"statistics.{name}")
        for name, s in statistics_of_tables.items()
    }
    problem = PlanningProblem(known, Topology(plan.world_size), batch, rowwise_adagrad(), ids)
    cost = plan_cost(plan, problem)
    return {
        "sharding_types": dict(Counter(s.sharding_type for s in plan.tables.values())),
        "memory_distribution": [
            sum(memory.weights.values()) for memory in bytes_per_rank(known, plan, None)
        ],
        "communication_patterns": [[round(b) for b in row] for row in cost.bytes_WW.tolist()],
    }


def runner_ups(
    plan: ShardingPlan, problem: PlanningProblem, step: float
) -> dict[str, RunnerUp | None]:
    """Return the runner-up of each table; None if no other type is possible, as on one rank.

    Args:
        plan: Any plan of the problem's tables.
        problem: The problem for which the plan is priced.
        step: The seconds of the plan's step.
    """
    tables = problem.tables
    others = options_of(tables, {t.name: ParameterConstraints() for t in tables}, problem)
    bundles = [
        TableBundle(
            (t.name,),
            tuple((o,) for o in [option_of(t, plan.tables[t.name], problem), *others[t.name]]),
        )
        for t in tables
    ]
    as_planned = Placement(0, (0,))
    partial = PartialPlan(SearchSpace(bundles, fixed_of(problem)), capacity_of(problem.topology))
    for number in range(len(bundles)):
        partial.add(number, as_planned)
    best: dict[str, RunnerUp | None] = {}
    for number, (table, bundle) in enumerate(zip(tables, bundles, strict=True)):
        before = partial.seconds_by_component()
        seconds = partial.seconds()
        partial.remove(number)
        types = [option.sharding_type for (option,) in bundle.options]
        different = [o for o, name in enumerate(types) if name != types[0]]
        other = partial.best(number, different)
        best[table.name] = None
        if other is not None:
            partial.add(number, other)
            change = partial.seconds() - seconds
            why = _why(before, partial.seconds_by_component(), change, step)
            best[table.name] = RunnerUp(types[other.option], step + change, why)
            partial.remove(number)
        elif different:
            best[table.name] = RunnerUp(types[different[0]], float("inf"), "has no room")
        partial.add(number, as_planned)
    return best


def _why(before: Floats, after: Floats, change: float, step: float) -> str:
    """Return the phases that would change most: `0.21 ms more: update +0.15, output +0.06`."""
    parts = dict(zip(PHASES, phases_of(after) - phases_of(before), strict=True))
    parts["calls of kernels"] = change - sum(parts.values())
    largest = [
        f"{phase} {seconds * 1e3:+.3f}"
        for phase, seconds in sorted(parts.items(), key=lambda p: -abs(p[1]))[:3]
        if abs(seconds) > max(SMALL * step, 1e-7)
    ]
    if not largest:
        return "costs the same"
    return f"{abs(change) * 1e3:.3f} ms {'more' if change >= 0 else 'less'}: {', '.join(largest)}"


def table_uses(
    tables: Sequence[EmbeddingConfig], lookups: Sequence[TableLookup], rules: Rules | None
) -> list[dict[str, Any]]:
    """Return a record for each table: its lookups, the name of its row rule, and, if some table is
    dynamic, its rows.

    The list is empty if all tables are used alike: each feature has one lookup per table, all
    lookups have the same pooling (sums or means), all tables have the same row rule, and no table
    is dynamic.

    Args:
        tables: The tables of a model.
        lookups: The lookups of these tables.
        rules: The row rule of all tables, or row rules by table; None if tables are only read.
    """
    of_T = [[x for x in lookups if x.table.name == t.name] for t in tables]
    rule_T = [rule_of(rules, t.name) for t in tables]
    poolings = {x.pooling for x in lookups}
    plain = (
        len(poolings) < 2
        and poolings <= set(BAG_POOLINGS)
        and all(len(of_table) == len({x.feature for x in of_table}) for of_table in of_T)
    )
    grows = any(t.dynamic is not None for t in tables)
    if plain and not grows and len({rule.name for rule in rule_T if rule}) < 2:
        return []
    return [
        {
            "table": t.name,
            "lookups": ", ".join(_words(x) for x in of_table),
            "rule": rule.name if rule else None,
        }
        | ({"rows": "dynamic" if t.dynamic else f"{t.num_embeddings:,}"} if grows else {})
        for t, of_table, rule in zip(tables, of_T, rule_T, strict=True)
    ]


def _words(lookup: TableLookup) -> str:
    words = {
        PoolingType.CONCAT: f"concat of {lookup.hotness}",
        PoolingType.NONE: "sequence",
    }
    return f"{lookup.feature} {words.get(lookup.pooling, lookup.pooling)}"
