"""The runner-up of every table of a plan: the best other sharding type while all other tables keep
their places, and the phases that it would change.

It works for any plan, also for a plan made by plan rules or by hand: the plan's own rectangles are
one more option for the planner.
"""

from dataclasses import dataclass

import numpy as np

from recapp.planner.constraints import ParameterConstraints
from recapp.planner.cost import PHASES, Floats, fixed_of
from recapp.planner.options import option_of, options_of, phases_of
from recapp.planner.partial_plan import PartialPlan
from recapp.planner.problem import PlanningProblem
from recapp.planner.search_space import Placement, SearchSpace, TableBundle
from recapp.sharding.sharding_plan import ShardingPlan

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
    memory = problem.topology.memory_bytes
    capacity = (
        np.full(plan.world_size, np.inf)
        if memory is None
        else np.array(memory, float) - problem.topology.reserve_bytes
    )
    as_planned = Placement(0, (0,))
    partial = PartialPlan(SearchSpace(bundles, fixed_of(problem)), capacity)
    for number in range(len(bundles)):
        partial.add(number, as_planned)
    found: dict[str, RunnerUp | None] = {}
    for number, (table, bundle) in enumerate(zip(tables, bundles, strict=True)):
        before = partial.seconds_by_component()
        seconds = partial.seconds()
        partial.remove(number)
        types = [option.sharding_type for (option,) in bundle.options]
        different = [o for o, name in enumerate(types) if name != types[0]]
        other = partial.best(number, different)
        found[table.name] = None
        if other is not None:
            partial.add(number, other)
            change = partial.seconds() - seconds
            why = _why(before, partial.seconds_by_component(), change, step)
            found[table.name] = RunnerUp(types[other.option], step + change, why)
            partial.remove(number)
        elif different:
            found[table.name] = RunnerUp(types[different[0]], float("inf"), "has no room")
        partial.add(number, as_planned)
    return found


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
