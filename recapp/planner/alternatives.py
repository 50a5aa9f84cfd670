"""The road not taken: for every table of a plan the best other type, all other tables staying where
they are, and what it would change.

It works for any plan, also for one that rules or a person made: the plan's own rectangles become
one option beside those the planner knows.
"""

from dataclasses import dataclass

import numpy as np

from recapp.planner.constraints import ParameterConstraints
from recapp.planner.cost import PHASES, Floats, fixed_of
from recapp.planner.options import option_of, options_of, phases_of
from recapp.planner.placement import Board
from recapp.planner.problem import PlanningProblem
from recapp.planner.units import Catalogue, Choice, Unit
from recapp.sharding.sharding_plan import ShardingPlan

SMALL = 0.001  # of the step: a phase that differs by less is not worth naming


@dataclass(frozen=True)
class RunnerUp:
    """The best other type for one table.

    Args:
        kind: sharding type.
        seconds: of the step with it.
        why: what it would change, in words.
    """

    kind: str
    seconds: float
    why: str


def runner_ups(
    plan: ShardingPlan, problem: PlanningProblem, step: float
) -> dict[str, RunnerUp | None]:
    """For each table of a plan whose step takes so many seconds; None where no other type is
    possible, as on one rank.
    """
    tables = problem.tables
    others = options_of(tables, {t.name: ParameterConstraints() for t in tables}, problem)
    units = [
        Unit(
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
    board = Board(Catalogue(units, fixed_of(problem)), capacity)
    for number in range(len(units)):
        board.put(number, Choice(0, (0,)))
    found: dict[str, RunnerUp | None] = {}
    for number, (table, unit) in enumerate(zip(tables, units, strict=True)):
        before = board.lanes()
        seconds = board.seconds()
        board.put(number, Choice(0, (0,)), -1)
        different = [
            o for o, (option,) in enumerate(unit.options) if option.kind != unit.options[0][0].kind
        ]
        other = board.best(number, different)
        found[table.name] = None
        if other is not None:
            board.put(number, other)
            after = board.lanes()
            change = board.seconds() - seconds
            found[table.name] = RunnerUp(
                unit.options[other.option][0].kind, step + change, _why(before, after, change, step)
            )
            board.put(number, other, -1)
        elif different:
            found[table.name] = RunnerUp(
                unit.options[different[0]][0].kind, float("inf"), "has no room"
            )
        board.put(number, Choice(0, (0,)))
    return found


def _why(before: Floats, after: Floats, change: float, step: float) -> str:
    """The phases that would differ most: `0.21 ms more: update +0.15, output +0.06`."""
    parts = dict(zip(PHASES, phases_of(after) - phases_of(before), strict=True))
    parts["calls of kernels"] = change - sum(parts.values())
    told = [
        f"{phase} {seconds * 1e3:+.3f}"
        for phase, seconds in sorted(parts.items(), key=lambda p: -abs(p[1]))[:3]
        if abs(seconds) > max(SMALL * step, 1e-7)
    ]
    if not told:
        return "costs the same"
    return f"{abs(change) * 1e3:.3f} ms {'more' if change >= 0 else 'less'}: {', '.join(told)}"
