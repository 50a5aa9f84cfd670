"""Where the plan of a run comes from: the planner, a plan, a file, or a function.

None                        the planner, without constraints
EmbeddingShardingPlanner    that planner; the run fills in the arguments that it leaves open
ShardingPlan, path          that plan, checked against the tables and ranks of the run
function(PlanningProblem)   the plan that the function returns
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recapp.errors import ConfigError, PlanError
from recapp.optim.named_rules import Rules
from recapp.planner.embedding_planner import EmbeddingShardingPlanner, plan_tables
from recapp.planner.problem import PlanningProblem
from recapp.planner.rank_memory import check_memory
from recapp.sharding.plan_file import load_plan
from recapp.sharding.sharding_plan import ShardingPlan

PlanSource = (
    EmbeddingShardingPlanner | ShardingPlan | str | Path | Callable[[PlanningProblem], ShardingPlan]
)


def check_source(source: Any) -> None:
    """Check that a plan can come from a value of this kind.

    Raises:
        ConfigError: The value is none of the kinds that this file takes.
    """
    if source is None or callable(source) or isinstance(source, _NAMED):
        return
    raise ConfigError(
        f"planner={source!r}: must be an EmbeddingShardingPlanner, a ShardingPlan, the path of a "
        "plan file, a function that returns a plan for a PlanningProblem, or None"
    )


_NAMED = (EmbeddingShardingPlanner, ShardingPlan, str, Path)


def rule_of_planner(source: PlanSource | None) -> Rules | None:
    """Return the row rule that a planner was given; None if it was given no rule."""
    return source.rule if isinstance(source, EmbeddingShardingPlanner) else None


def plan_from(source: PlanSource | None, problem: PlanningProblem) -> ShardingPlan:
    """Return the plan of a run.

    Args:
        source: The source of the plan.
        problem: The planning problem, with the hardware and data that the ranks have found.

    Raises:
        PlanError: No plan fits, or the plan is for other tables or ranks.
        ConfigError: A function returned no `ShardingPlan`.
    """
    if source is None:
        return plan_tables(problem).plan
    if isinstance(source, EmbeddingShardingPlanner):
        made = source.plan_problem(problem)
        _check_ranks(made, problem, "planner=EmbeddingShardingPlanner(topology=...)")
        return made
    if isinstance(source, str | Path):
        made = load_plan(source, problem.tables, problem.topology.world_size, problem.lookups)
    elif isinstance(source, ShardingPlan):
        made = source
        _check_ranks(made, problem, "planner=ShardingPlan(...)")
        made.check(problem.tables)
    else:
        made = source(problem)
        if not isinstance(made, ShardingPlan):
            raise ConfigError(
                f"planner: the function returned a {type(made).__name__}: it must return a "
                "ShardingPlan, as EmbeddingShardingPlanner().plan_problem(problem) does"
            )
        return made
    check_memory(problem.tables, made, problem.rule, problem.topology)
    return made


def _check_ranks(plan: ShardingPlan, problem: PlanningProblem, where: str) -> None:
    ranks = problem.topology.world_size
    if plan.world_size != ranks:
        raise PlanError(
            f"{where}: its plan is for {plan.world_size} ranks, and the run has {ranks}: start "
            f"{plan.world_size} ranks, or plan for {ranks}"
        )
