"""The planner: constraints -> options -> search -> plan. It is pure and deterministic: no process
group, no clock, no randomness.

    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=8, compute_device="cuda"),
        constraints={
            "large_*": ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value]),
        },
    )
    plan = planner.plan(model, sharders)

Names and arguments are those of TorchRec's class. `plan_tables` does the same for tables without a
model. Only `collective_plan` communicates with other ranks: rank 0 plans and broadcasts the plan.

Serving has no optimiser state and no backward. Its tables request distinct rows: sums of bags at
the owners would have other last bits for other numbers of ranks, and served scores must equal those
of one rank.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn

from recapp.console import size
from recapp.errors import ConfigError, PlanError
from recapp.optim.named_rules import Rules
from recapp.optim.rules import rowwise_adagrad
from recapp.optim.table_rule import table_rule, with_frozen_of
from recapp.planner.choose_modes import initial_plan
from recapp.planner.cost import Floats, PlanCost, cost_of, fixed_of
from recapp.planner.options import (
    Constraints,
    Option,
    constrained_statistics,
    constraints_of,
    options_of,
)
from recapp.planner.planner_settings import ParameterConstraints
from recapp.planner.problem import Dense, PlanningProblem, Topology, dense_of
from recapp.planner.rank_memory import bytes_per_rank, check_memory, check_reserve, weight_bytes
from recapp.planner.search import (
    capacity_of,
    greedy,
    improved,
    of_kinds,
    of_types,
    promising,
    relaxed_choice,
)
from recapp.planner.search_space import Assignment, SearchSpace, TableBundle, lower_bound
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sharding.sharding_types import SHARDING_TYPES
from recapp.tables.collections import collections_in, embedding_lookups, embedding_tables
from recapp.tables.config import DataType, EmbeddingConfig, TableLookup
from recapp.tables.statistics import TableStatistics

AUTOMATIC = "automatic"
ROUNDED = 4  # relaxed problems whose options start the search
LARGE = 20_000  # tables times ranks; above this, only the best start is improved


@dataclass(frozen=True)
class Outcome:
    """A plan with its price and bound.

    Args:
        plan: The plan.
        cost: The price of the plan.
        lower_bound_seconds: A lower bound of the step under the same constraints and prices.
        bundles: The bundles with their options.
        assignment: The chosen options and ranks.
        problem: The problem of the plan and its price.
    """

    plan: ShardingPlan
    cost: PlanCost
    lower_bound_seconds: float
    bundles: tuple[TableBundle, ...]
    assignment: Assignment
    problem: PlanningProblem


def plan_tables(
    problem: PlanningProblem,
    constraints: Constraints | None = None,
    *,
    name: str = AUTOMATIC,
) -> Outcome:
    """Return the best plan that the search finds.

    Args:
        problem: Tables, machine, batch, optimiser and id statistics.
        constraints: The constraints of the plan, by table name or glob.
        name: The name of the plan.

    Raises:
        PlanError: The constraints cannot hold, or no plan fits; the text names the missing bytes,
            the ranks and the fixes.
    """
    tables = problem.tables
    if not tables:
        cost = cost_of([], problem)
        plan = ShardingPlan({}, problem.topology.world_size, name)
        return Outcome(plan, cost, cost.step_seconds, (), (), problem)
    c = constraints_of(tables, constraints or {}, problem.topology)
    typed_tables = [
        t
        if (data_type := c[t.name].data_type) is None
        else replace(t, data_type=DataType(data_type))
        for t in tables
    ]
    statistics = {t.name: constrained_statistics(t, c[t.name], problem) for t in tables}
    problem = replace(problem, statistics=statistics)
    space = SearchSpace(_bundles(typed_tables, c, problem), fixed_of(problem))
    bundles = space.bundles
    capacity = capacity_of(problem.topology)
    best, bound = _best_assignment(space, capacity, problem)
    if best is None:
        raise _does_not_fit(space, capacity, problem, name)
    cost = _cost(bundles, best, problem)
    bound = min(bound, cost.step_seconds)  # may differ by rounding
    search_plan = _plan(bundles, best, problem, name)
    parameters = {
        name: replace(s, as_parameter=True)
        for name, s in search_plan.tables.items()
        if c[name].as_parameter and s.mode == "replicated"
    }
    plan = replace(search_plan, tables={**search_plan.tables, **parameters})
    return Outcome(plan, cost, bound, tuple(bundles), best, problem)


class EmbeddingShardingPlanner:
    """Plan the tables of a model.

    Args:
        topology: The ranks; None plans for one CPU rank, or in `collective_plan` for the ranks of
            the process group.
        batch_size: Samples of a rank's batch, B; None takes the run's batch, or 1,024.
        constraints: The constraints of the plan, by table name or glob.
        rule: The tables' optimiser, or rules by table, if neither the sharders nor the model have
            one; None takes row-wise Adagrad.
        statistics: Id statistics by table; a table without statistics counts as having Zipf-like
            ids.
        dense: The costs of the dense part; None counts them from the model.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        constraints: Constraints | None = None,
        *,
        rule: Rules | None = None,
        statistics: Mapping[str, TableStatistics] | None = None,
        dense: Dense | None = None,
    ) -> None:
        self.topology = topology
        self.batch_size = batch_size
        self.constraints = constraints
        self.rule = rule
        self.statistics = dict(statistics or {})
        self.dense = dense

    def plan(self, module: nn.Module, sharders: Sequence[Any] | None = None) -> ShardingPlan:
        """Return the best plan for the tables of a model.

        Args:
            module: The model; its collections may be sharded or not, on any device.
            sharders: As for `DistributedModelParallel`. Their rule counts, or an optimiser that is
                applied to the tables in backward.

        Raises:
            PlanError: Constraints cannot hold, or no plan fits.
            ConfigError: Sharders or optimisers are unusable, or differ from each other.
        """
        rule = table_rule(module, sharders) or self.rule or rowwise_adagrad()
        plan = self.plan_problem(
            PlanningProblem(
                embedding_tables(module),
                Topology(1),
                rule=with_frozen_of(rule, module),
                dense=dense_of(module),
                lookups=embedding_lookups(module),
            )
        )
        modules = {
            path: [t.name for t in collection.tables()]
            for path, collection in collections_in(module)
        }
        return replace(plan, modules=modules)

    def plan_problem(self, run_problem: PlanningProblem) -> ShardingPlan:
        """Return the best plan for the problem of a run: its tables, lookups, ranks, rule and id
        statistics. The planner's own arguments replace these, except for the rule.

        Args:
            run_problem: The problem that `EmbeddingShardingStrategy` passes to its planner.

        Raises:
            PlanError: Constraints cannot hold, or no plan fits.
        """
        problem = replace(
            run_problem,
            batch_per_rank=self.batch_size or run_problem.batch_per_rank,
            statistics={**run_problem.statistics, **self.statistics},
            dense=self.dense or run_problem.dense,
        )
        problem = replace(problem, topology=self.topology_for(problem))
        return plan_tables(problem, self.constraints).plan

    def topology_for(self, problem: PlanningProblem) -> Topology:
        """Return the ranks to plan for: the planner's own topology, or the problem's.

        Args:
            problem: The problem, final except for its topology.
        """
        return self.topology or problem.topology

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[Any] | None = None,
        pg: "dist.ProcessGroup | None" = None,
    ) -> ShardingPlan:
        """Plan on rank 0 and return that plan on every rank. Every rank calls this; all ranks raise
        an error of rank 0.

        Args:
            module: As for `plan`.
            sharders: As for `plan`.
            pg: The ranks; None takes the default group, or only this process without one.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self.plan(module, sharders)
        group = pg or dist.group.WORLD
        planner = copy(self)
        if self.topology is None:
            ranks = dist.get_world_size(group)
            device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
            planner.topology = Topology(ranks, compute_device=device)
        return initial_plan(partial(planner.plan, module, sharders), _Group(group))


class _Group:
    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank; every rank calls this."""
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]


def _bundles(
    tables: Sequence[EmbeddingConfig],
    c: Mapping[str, ParameterConstraints],
    problem: PlanningProblem,
) -> list[TableBundle]:
    """Return a bundle for each table, and for each set of tables that must lie together."""
    options = options_of(tables, c, problem)
    for name, table_options in options.items():
        if not table_options:
            types = ", ".join(c[name].sharding_types or ())
            everywhere = [record.name for record in SHARDING_TYPES.values() if record.replicated]
            raise PlanError(
                f"constraints.{name}: nothing is left to choose from: sharding_types "
                f"{types or 'any'} on ranks "
                f"{list(c[name].ranks or range(problem.topology.world_size))}; "
                f"{', '.join(everywhere)} needs all ranks, and a cut needs several rows or "
                "columns: allow another type"
            )
    groups: dict[str, list[str]] = {}
    for t in tables:
        label = c[t.name].together
        groups.setdefault(f"one {t.name}" if label is None else f"group {label}", []).append(t.name)
    return [
        TableBundle(
            tuple(names),
            _together([options[n] for n in names]),
            frozenset(a for n in names if (a := c[n].apart) is not None),
        )
        for names in groups.values()
    ]


def _together(options: Sequence[Sequence[Option]]) -> tuple[tuple[Option, ...], ...]:
    """Return the options that tables can take together: with the same type, mode and candidate
    ranks.
    """
    if len(options) == 1:
        return tuple((o,) for o in options[0])
    combinations = []
    for first in options[0]:
        alike = [
            min(
                (
                    o
                    for o in others
                    if o.sharding_type == first.sharding_type
                    and o.mode == first.mode
                    and len(o.blocks) == 1
                    and np.array_equal(o.blocks[0].candidates, first.blocks[0].candidates)
                ),
                key=lambda o: o.row_order != first.row_order,
                default=None,
            )
            for others in options
        ]
        if len(first.blocks) == 1 and all(o is not None for o in alike):
            combinations.append(tuple(o for o in alike if o is not None))
    return tuple(combinations)


def _cost(
    bundles: Sequence[TableBundle], assignment: Assignment, problem: PlanningProblem
) -> PlanCost:
    works = [
        option.on_ranks(candidates) for option, candidates in chosen_options(bundles, assignment)
    ]
    return cost_of(works, problem)


def chosen_options(
    bundles: Sequence[TableBundle], assignment: Assignment
) -> list[tuple[Option, tuple[int, ...]]]:
    """Return the option of each table, and for each of its blocks the index of the candidate
    ranks.
    """
    return [
        (option, placement.candidates)
        for bundle, placement in zip(bundles, assignment, strict=True)
        for option in bundle.options[placement.option]
    ]


def _best_assignment(
    space: SearchSpace, capacity: Floats, problem: PlanningProblem
) -> tuple[Assignment | None, float]:
    """Improve several starts; return the one with the best whole price, and a lower bound."""
    world = problem.topology.world_size
    bounds = lower_bound(space, world)
    worth = promising(space, bounds[:2])
    assignments: list[tuple[float, Assignment]] = []

    def add(start: Assignment | None) -> None:
        if start is not None:
            assignments.append((_cost(space.bundles, start, problem).step_seconds, start))

    for bound in bounds[:ROUNDED]:
        add(greedy(space, capacity, relaxed_choice(space, bound)))
    add(greedy(space, capacity, of_kinds(space, bounds[0], worth)))
    large = len(space.bundles) * world > LARGE
    if not large:
        add(greedy(space, capacity, worth))
    for _, start in sorted(assignments, key=lambda f: f[0])[: 1 if large else 3]:
        add(improved(space, capacity, worth, start))
    for name in dict.fromkeys(cost.sharding_type for cost in space.all_costs):
        uniform_options = of_types(space, [name])
        allowed_N = np.zeros(len(space.all_costs), bool)
        allowed_N[
            [
                first + o
                for first, options in zip(space.first_B.tolist(), uniform_options, strict=True)
                for o in options
            ]
        ] = True
        if (
            not assignments
            or lower_bound(space, world, allowed_N, pieces=False)[0].seconds
            < min(assignments, key=lambda f: f[0])[0]
        ):
            uniform = greedy(space, capacity, uniform_options)
            add(uniform)
            if uniform is not None and assignments[-1] == min(assignments, key=lambda f: f[0]):
                add(improved(space, capacity, worth, uniform))
    if not assignments:
        add(greedy(space, capacity, worth, by_bytes=True))
    return min(assignments, key=lambda f: f[0])[1] if assignments else None, bounds[0].seconds


def _plan(
    bundles: Sequence[TableBundle], best: Assignment, problem: PlanningProblem, name: str
) -> ShardingPlan:
    shardings = {
        option.table: option.sharding(candidates)
        for option, candidates in chosen_options(bundles, best)
    }
    return ShardingPlan(
        {t.name: shardings[t.name] for t in problem.tables}, problem.topology.world_size, name
    )


def _does_not_fit(
    space: SearchSpace,
    capacity: Floats,
    problem: PlanningProblem,
    name: str,
) -> PlanError:
    """Return the error of the plan that comes closest to fitting, which cuts tables by rows or by
    columns and spreads their bytes over the ranks.
    """
    free = np.full(len(capacity), np.inf)
    strips = [r.name for r in SHARDING_TYPES.values() if r.cuts in ("rows", "columns")]
    closest = greedy(space, free, of_types(space, strips), by_bytes=True)
    if closest is not None:
        try:
            check_memory(
                problem.tables,
                _plan(space.bundles, closest, problem, name),
                problem.rule,
                problem.topology,
                problem.averaged,
            )
        except PlanError as error:
            return error
    total = sum(min(cost.bytes for cost in costs) for costs in space.costs)
    return PlanError(
        f"plan {name}: no plan fits these constraints and {size(float(capacity.sum()))} of "
        f"memory on all ranks (tables and optimiser state need about {size(total)}): allow more "
        "types or ranks, or leave out constraints that keep tables apart"
    )


MOST_RANKS = 4096
SERVED = "served"
DISTINCT_ROWS = ParameterConstraints(modes=["unique"])


@dataclass(frozen=True)
class Fit:
    """The fewest ranks on which tables fit.

    Args:
        plan: The plan on these ranks.
        bytes: The bytes of all tables, each counted once.
        largest: The bytes of the fullest rank.
    """

    plan: ShardingPlan
    bytes: int
    largest: int


def serving_plan(
    tables: Sequence[EmbeddingConfig],
    topology: Topology,
    lookups: Sequence[TableLookup] = (),
    constraints: Constraints | None = None,
) -> ShardingPlan:
    """Return the fastest plan for read-only tables.

    Args:
        tables: The tables, with their stored data types.
        topology: The ranks.
        lookups: The lookups that read the tables; an empty list takes the lookups that tables
            declare.
        constraints: The constraints of the plan, by table name or glob.

    Raises:
        PlanError: No plan fits.
    """
    all_constraints = dict(constraints or {})
    all_constraints["*"] = DISTINCT_ROWS.over(all_constraints.get("*", ParameterConstraints()))
    problem = PlanningProblem(tables, topology, rule=None, lookups=lookups, look_ahead=0)
    plan = plan_tables(problem, all_constraints, name=SERVED).plan
    return plan.with_modes(dict.fromkeys(plan.undecided, "unique"))


def fewest_ranks(
    tables: Sequence[EmbeddingConfig], lookups: Sequence[TableLookup], topology: Topology
) -> Fit:
    """Return the fewest ranks on which tables fit, with the memory of the topology's ranks, on one
    host.

    Args:
        tables: The tables, with their stored data types.
        lookups: The lookups that read the tables; an empty list takes the lookups that tables
            declare.
        topology: The topology; each rank gets the memory of its first rank.

    Raises:
        ConfigError: The topology does not set its memory.
        PlanError: The tables fit on no number of ranks.
    """
    if topology.memory_bytes is None:
        raise ConfigError(
            "topology.memory_bytes must be given: the bytes of a device for tables, or a machine "
            "that has them, such as topology=dgx_h100"
        )
    check_reserve(topology)
    memory = topology.memory_bytes[0]
    total = sum(weight_bytes(t) for t in tables)
    least = max(1, -(-total // max(1, memory - topology.reserve_bytes)))
    if memory <= topology.reserve_bytes or least > MOST_RANKS:
        raise PlanError(
            f"{size(total)} of tables do not fit on {MOST_RANKS} devices of {size(memory)}, of "
            f"which topology.reserve_bytes={topology.reserve_bytes} "
            f"({size(topology.reserve_bytes)}) stay free"
        )
    failure: PlanError | None = None
    for ranks in range(least, min(2 * least + 8, MOST_RANKS) + 1):
        there = replace(
            topology,
            world_size=ranks,
            hosts=1,
            local_world_size=None,
            memory_bytes=[memory] * ranks,
        )
        try:
            plan = serving_plan(tables, there, lookups)
        except PlanError as error:
            failure = error
            continue
        rank_bytes = bytes_per_rank(tables, plan, None)
        return Fit(plan, total, max(rank.total for rank in rank_bytes))
    assert failure is not None
    raise failure


def stored_as(
    tables: Sequence[EmbeddingConfig], lookups: Sequence[TableLookup], data_types: Mapping[str, str]
) -> tuple[list[EmbeddingConfig], list[TableLookup]]:
    """Return tables and their lookups, with another data type for some tables.

    Args:
        tables: The tables.
        lookups: The lookups that read them.
        data_types: The data type of some tables, by name.
    """
    tables_by_name = {
        t.name: replace(t, data_type=data_types.get(t.name, t.data_type))  # type: ignore[arg-type]
        for t in tables
    }
    typed_lookups = [replace(x, table=tables_by_name[x.table.name]) for x in lookups]
    return list(tables_by_name.values()), typed_lookups
