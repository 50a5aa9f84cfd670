"""From settings to a plan, for training and for `python -m recapp.plan` alike.

    settings                          -> PlanningProblem, on paper
    settings, what the ranks found    -> PlanningProblem, of a run
    settings, PlanningProblem         -> ShardingPlan

`plan.path` names a file, `plan.rules` are rules written by hand; where the settings have neither,
the planner decides within `planner.constraints`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recapp import console
from recapp.app import build
from recapp.app.build_rows import build_statistics, size_on_paper
from recapp.app.own_types import register_own_types
from recapp.dataset.data_scale import scaled
from recapp.errors import ConfigError, PlanError, suggest
from recapp.optim.rules_by_table import rules_of
from recapp.planner.constraints import MODES, Constraints, ParameterConstraints
from recapp.planner.embedding_planner import Outcome, plan_tables
from recapp.planner.plan_rules import PlanRule, plan_by_rules, read_rule
from recapp.planner.problem import NUMBER_BYTES, PlanningProblem, dense_of
from recapp.planner.rank_memory import check_memory
from recapp.planner.reserve import with_reserve
from recapp.planner.topology import Topology, hardware_of, topology_from
from recapp.processes.launch import rank_count
from recapp.reporting.plan_explanation import explained
from recapp.sharding.plan_file import load_plan
from recapp.sharding.sharding_plan import PlannedFor, ShardingPlan
from recapp.sharding.sharding_types import sharding_type
from recapp.tables.row_order import RowOrderName

Settings = Mapping[str, Any]


def planning_problem(
    settings: Settings, found: PlanningProblem | None = None, *, val_rows: int | None = None
) -> PlanningProblem:
    """Return the planning problem: tables, ranks, batches, optimiser, ids, the dense part of the
    model.

    Args:
        settings: Those of a command.
        found: Tables, topology, rule, statistics and dense part as the ranks of a run found them;
            None takes those of the settings, on paper.
        val_rows: The rows that validate; None takes validation batches to be full.
    """
    problem = _on_paper(settings) if found is None else found
    world = problem.topology.world_size
    payload = build.PAYLOADS[settings["engine"]["payload"]]
    problem = replace(
        problem,
        batch_per_rank=-(-scaled(settings["dataset"])["batch_size"] // world),
        payload_bytes=NUMBER_BYTES if payload is None else payload.itemsize,
        val_batch_per_rank=_val_batch(settings, world, val_rows),
        look_ahead=settings["engine"]["look_ahead"],
    )
    return with_reserve(problem) if settings["topology"]["reserve_bytes"] is None else problem


def _on_paper(settings: Settings) -> PlanningProblem:
    """Return the problem without starting anything; ids are read where the data exist and
    `statistics` allows it.
    """
    if assumed := size_on_paper(settings):
        console.note(assumed)
    tables, lookups = build.build_lookups(settings, of_dataset=False)
    measure = settings["statistics"] != "assumed"
    rules = build.build_rules(settings)
    rules_of(rules, [t.name for t in tables])  # names that no table has
    return PlanningProblem(
        tables,
        _topology_on_paper(settings),
        rule=rules,
        statistics=build_statistics(settings, tables, lookups) if measure else {},
        dense=dense_of(build.build_model(settings, tables, lookups, on_paper=True)),
        lookups=lookups,
    )


def _topology_on_paper(settings: Settings) -> Topology:
    """Return the machine of the settings, with as many ranks as `topology` or `trainer` set."""
    machine = dict(settings["topology"])
    hardware = hardware_of(machine["hardware"])
    on = hardware.compute_device if hardware else settings["trainer"]["accelerator"]
    devices = settings["trainer"]["devices"]
    world = machine["ranks"] or (
        devices if isinstance(devices, int) and devices > 0 else rank_count(devices)
    )
    device = "cuda" if on in ("cuda", "gpu") else "cpu"
    return topology_from(machine | {"ranks": world}, world, device)


def _val_batch(settings: Settings, world: int, rows: int | None) -> int:
    """Return a rank's share of the largest validation batch; 0 where nothing validates."""
    if settings["trainer"].get("limit_val_batches") == 0:
        return 0
    dataset = scaled(settings["dataset"])
    size = int(dataset.get("val_batch_size") or dataset["batch_size"])
    return -(-(size if rows is None else min(size, rows)) // world)


def build_plan(settings: Settings, problem: PlanningProblem) -> ShardingPlan:
    """Return the plan that the settings ask for, or the planner's.

    Args:
        settings: `plan` and `planner` of a command.
        problem: What `planning_problem` returned.

    Raises:
        PlanError: The plan names what does not exist, or does not fit.
    """
    register_own_types(settings)
    plan = dict(settings.get("plan") or {})
    topology = problem.topology
    if "path" in plan:
        made = load_plan(plan["path"], problem.tables, topology.world_size, problem.lookups)
    elif "rules" in plan:
        made = plan_by_rules(
            problem.tables,
            topology,
            _rules(plan),
            name=plan.get("name", "custom"),
            overrides=_overrides(plan),
            mode=plan.get("mode", "auto"),
            column_width=plan.get("column_width", 64),
            row_order=plan.get("row_order", "natural"),
            deal=plan.get("deal", "balanced"),
            statistics=problem.statistics,
            batch_per_rank=problem.batch_per_rank,
            lookups=problem.lookups,
        )
    else:
        return best_plan(settings, problem).plan
    check_memory(problem.tables, made, problem.rule, topology)
    return made


def best_plan(settings: Settings, problem: PlanningProblem) -> Outcome:
    """Return the planner's own plan; of `plan` it takes only the types of single tables, the mode,
    and the order of rows where there are no rules beside it.

    Raises:
        PlanError: Constraints cannot hold, or no plan fits.
    """
    register_own_types(settings)
    plan = settings.get("plan") or {}
    constraints = build_constraints(
        settings["planner"].get("constraints") or {},
        _overrides(plan),
        plan.get("mode", settings["planner"]["mode"]),
        None if "rules" in plan else plan.get("row_order"),
    )
    return plan_tables(problem, constraints if problem.tables else {})


def plan_of_run(settings: Settings, found: PlanningProblem) -> ShardingPlan:
    """Return the plan of a run for what its ranks found; rank 0 calls it.

    Raises:
        PlanError: The plan names what does not exist, or does not fit.
    """
    return build_plan(settings, planning_problem(settings, found))


def made_for(plan: ShardingPlan, problem: PlanningProblem) -> PlannedFor:
    """Return what a plan file carries of its problem, so that it can be explained elsewhere."""
    ids = {table.name: problem.statistics_of(table).to_dict() for table in problem.tables}
    return PlannedFor(tuple(problem.tables), problem.batch_per_rank, ids)


def predicted(
    settings: Settings, plan: ShardingPlan, found: PlanningProblem, val_rows: int
) -> dict[str, Any]:
    """Return what is predicted of a run: its plan explained, without other types for its tables.

    Args:
        settings: Those of the run.
        plan: Its plan.
        found: What its ranks found when the plan was made.
        val_rows: The rows that validate.
    """
    problem = planning_problem(settings, found, val_rows=val_rows)
    return explained(plan, problem, alternatives=False)


def build_constraints(
    plain: Settings,
    overrides: Mapping[str, str],
    mode: str,
    row_order: RowOrderName | None = None,
) -> Constraints:
    """Return the planner's constraints, by table or glob.

    Args:
        plain: `planner.constraints`.
        overrides: The types of single tables (`+plan.tables.C3=row_wise`).
        mode: The mode of all tables, or `auto`.
        row_order: The order of the rows of all tables; None leaves it to the planner.

    Raises:
        ConfigError: An entry is none of a constraint's.
        PlanError: A mode or type does not exist.
    """
    known = [name for name in ParameterConstraints.__dataclass_fields__ if name != "statistics"]
    found: dict[str, ParameterConstraints] = {}
    for pattern, wanted in plain.items():
        for key in wanted:
            if key not in known:
                raise ConfigError(
                    f"planner.constraints.{pattern}.{key}: unknown; {suggest(str(key), known)}"
                )
        found[str(pattern)] = ParameterConstraints(**wanted)
    if mode not in ("auto", *MODES):
        raise PlanError(f"planner.mode={mode}: {suggest(mode, ['auto', *MODES])}")
    for pattern, kind in overrides.items():
        sharding_type(kind, f"plan.tables.{pattern}={kind}")
        found[pattern] = ParameterConstraints(sharding_types=[kind]).over(
            found.get(pattern, ParameterConstraints())
        )
    if mode != "auto" or row_order is not None:
        every = ParameterConstraints(
            modes=None if mode == "auto" else [mode],
            row_orders=None if row_order is None else [row_order],
        )
        found = {"*": every.over(found.pop("*", ParameterConstraints()))} | found
    return found


def _overrides(plan: Settings) -> dict[str, str]:
    return {str(k): str(v) for k, v in (plan.get("tables") or {}).items()}


def _rules(plan: Settings) -> list[PlanRule]:
    rules = [read_rule(r, f"plan.rules[{i}]") for i, r in enumerate(plan["rules"])]
    if "dp_max_rows" in plan and plan["dp_max_rows"] not in [r.rows_at_most for r in rules]:
        raise PlanError(
            f"plan.dp_max_rows={plan['dp_max_rows']}: no rule of this plan asks for it; choose "
            "+plan=dp_and_localized with it"
        )
    return rules
