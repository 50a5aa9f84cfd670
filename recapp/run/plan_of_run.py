"""From a recipe to a plan, for training and for `python -m recapp.plan` alike.

    recipe                          -> PlanningProblem, on paper
    recipe, facts that ranks found  -> PlanningProblem, of a run
    recipe, PlanningProblem         -> ShardingPlan

`plan.path` names a plan file, and `plan.rules` are rules written by hand. If the recipe has
neither, the planner decides within `planner.constraints`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from recapp.errors import PlanError
from recapp.optim.named_rules import rules_of
from recapp.planner.embedding_planner import Outcome, plan_tables
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import ParameterConstraints, PlanRule, PlanSettings
from recapp.planner.pricing import with_reserve
from recapp.planner.problem import NUMBER_BYTES, PlanningProblem, Topology, dense_of, topology_of
from recapp.planner.rank_memory import check_memory
from recapp.processes.launch import rank_count
from recapp.run.model import build_model
from recapp.run.recipe import OnPaper, Recipe
from recapp.run.run_rows import sized_on_paper, statistics_of
from recapp.sharding.plan_file import load_plan
from recapp.sharding.sharding_plan import PlannedFor, ShardingPlan
from recapp.sharding.sharding_types import sharding_type
from recapp.tables.collections import embedding_lookups, embedding_tables, read_from_data
from recapp.tables.config import EmbeddingConfig
from recapp.tables.table_settings import of_all_members

# Bytes of one number in a message between ranks, by `engine.payload`.
PAYLOAD_BYTES = {"full": NUMBER_BYTES, "bf16": 2, "fp16": 2}


def problem_on_paper(recipe: OnPaper) -> PlanningProblem:
    """Return the planning problem of a recipe without starting ranks.

    The problem has tables, ranks, batches, optimiser, id statistics and the dense part of the
    model. Tables and lookups are those of the model, in the order of its collections, as ranks find
    them. Id statistics are read if the data exist and `statistics` is not `assumed`.
    """
    recipe = sized_on_paper(recipe)
    model = build_model(recipe, on_paper=True)
    tables = embedding_tables(model)
    measure = recipe.statistics != "assumed"
    rules_of(recipe.rules, [t.name for t in tables])  # refuses names that no table has
    return problem_of_run(
        recipe,
        PlanningProblem(
            tables,
            _topology_on_paper(recipe),
            rule=recipe.rules,
            statistics=statistics_of(recipe, *read_from_data(model)) if measure else {},
            dense=dense_of(model),
            lookups=embedding_lookups(model),
        ),
    )


def problem_of_run(
    recipe: Recipe, facts: PlanningProblem, *, val_rows: int | None = None
) -> PlanningProblem:
    """Return the planning problem of a run.

    Args:
        recipe: The recipe of the run.
        facts: Tables, topology, rule, statistics and dense part as the ranks found them.
        val_rows: The number of validation rows; None assumes full validation batches.
    """
    world = facts.topology.world_size
    dataset = recipe.dataset.scaled
    size = dataset.val_batch_size or dataset.batch_size
    val_batch = size if val_rows is None else min(size, val_rows)
    average = recipe.trainer.average
    averaged = facts.rule is not None and average.kind != "none"
    problem = replace(
        facts,
        batch_per_rank=-(-dataset.batch_size // world),
        payload_bytes=PAYLOAD_BYTES[recipe.engine.payload],
        val_batch_per_rank=-(-val_batch // world) if recipe.trainer.limit_val_batches != 0 else 0,
        look_ahead=recipe.engine.look_ahead,
        average_every=(average.every or math.inf) if averaged else None,
        graphs=recipe.engine.graph == "auto",
    )
    return with_reserve(problem) if recipe.topology.reserve_bytes is None else problem


def _topology_on_paper(recipe: Recipe) -> Topology:
    machines = recipe.topology
    hardware = machines.costs
    on = hardware.compute_device if hardware else recipe.trainer.accelerator
    devices = recipe.trainer.devices
    world = machines.ranks or (devices if isinstance(devices, int) else rank_count(devices))
    device = "cuda" if on in ("cuda", "gpu") else "cpu"
    return topology_of(replace(machines, ranks=world), world, device)


def build_plan(recipe: Recipe, problem: PlanningProblem) -> ShardingPlan:
    """Return the plan of `plan.path` or `plan.rules`, or else the planner's own.

    Raises:
        PlanError: The plan names a table or type that does not exist, or does not fit.
    """
    plan = recipe.plan or PlanSettings()
    topology = problem.topology
    for table, kind in (plan.tables or {}).items():
        sharding_type(kind, f"plan.tables.{table}={kind}")
    if plan.path is not None:
        sharding_plan = load_plan(plan.path, problem.tables, topology.world_size, problem.lookups)
    elif plan.rules is not None:
        sharding_plan = plan_by_rules(
            problem.tables,
            topology,
            _rules(plan, problem.tables),
            name=plan.name or "custom",
            overrides=of_all_members(plan.tables or {}, problem.tables),
            mode=plan.mode or "auto",
            column_width=plan.column_width or 64,
            row_order=plan.row_order or "natural",
            balanced=plan.deal != "round_robin",
            statistics=problem.statistics,
            batch_per_rank=problem.batch_per_rank,
            lookups=problem.lookups,
        )
    else:
        return best_plan(recipe, problem).plan
    check_memory(problem.tables, sharding_plan, problem.rule, topology, problem.averaged)
    return sharding_plan


def best_plan(recipe: Recipe, problem: PlanningProblem) -> Outcome:
    """Return the planner's own plan.

    Of `plan` it uses only the types of single tables, the mode and, if there are no rules, the
    order of rows.

    Raises:
        PlanError: The constraints cannot be met, or no plan fits.
    """
    plan = recipe.plan or PlanSettings()
    constraints = dict(of_all_members(recipe.planner.constraints or {}, problem.tables))
    for pattern, kind in of_all_members(plan.tables or {}, problem.tables).items():
        sharding_type(kind, f"plan.tables.{pattern}={kind}")
        constraints[pattern] = ParameterConstraints(sharding_types=[kind]).over(
            constraints.get(pattern, ParameterConstraints())
        )
    mode = plan.mode or recipe.planner.mode
    row_order = None if plan.rules is not None else plan.row_order
    if mode != "auto" or row_order is not None:
        every = ParameterConstraints(
            modes=None if mode == "auto" else [mode],
            row_orders=None if row_order is None else [row_order],
        )
        constraints = {"*": every.over(constraints.pop("*", ParameterConstraints()))} | constraints
    return plan_tables(problem, constraints if problem.tables else {})


def made_for(problem: PlanningProblem) -> PlannedFor:
    """Return the part of a planning problem that a plan file stores, to explain the plan
    elsewhere. A table of several collections has the features of all.
    """
    ids = {table.name: problem.statistics_of(table).to_dict() for table in problem.tables}
    read = {table.name: dict.fromkeys(table.feature_names) for table in problem.tables}
    for lookup in problem.lookups:
        read[lookup.table.name][lookup.feature] = None
    tables = (replace(table, feature_names=list(read[table.name])) for table in problem.tables)
    return PlannedFor(tuple(tables), problem.batch_per_rank, ids)


def _rules(plan: PlanSettings, tables: Sequence[EmbeddingConfig]) -> list[PlanRule]:
    rules = [
        replace(r, tables=list(of_all_members(dict.fromkeys(r.globs), tables))) if r.globs else r
        for r in plan.rules or ()
    ]
    if plan.dp_max_rows is not None and plan.dp_max_rows not in [r.rows_at_most for r in rules]:
        raise PlanError(
            f"plan.dp_max_rows={plan.dp_max_rows}: no rule of this plan asks for it; choose "
            "+plan=dp_and_localized with it"
        )
    return rules
