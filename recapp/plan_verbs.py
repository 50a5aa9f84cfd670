"""Verbs of `recapp.plan`: explain, export, scale, devices."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from recapp import console
from recapp.cli.job import Job
from recapp.cli.stored_recipe import recipe_of_stored
from recapp.errors import ConfigError, PlanError, suggest
from recapp.inference.held_tables import QUANTIZE, storage_of
from recapp.planner.embedding_planner import fewest_ranks, plan_tables, stored_as
from recapp.planner.hardware import Hardware, default_hardware
from recapp.planner.options import MODES
from recapp.planner.planner_settings import ParameterConstraints
from recapp.planner.problem import PlanningProblem, Topology
from recapp.reporting.plan_report import explained
from recapp.reporting.plan_views import plan_page, plan_pictures, print_plan
from recapp.run.model import meta_model
from recapp.run.plan_of_run import (
    best_plan,
    build_plan,
    made_for,
    problem_on_paper,
)
from recapp.run.recipe import OnPaper
from recapp.settings.other_systems import plan_format
from recapp.settings.records import to_plain
from recapp.settings.values import shown
from recapp.settings.whole_file import write_whole
from recapp.sharding.plan_file import plan_to_yaml
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sharding.sharding_types import SHARDING_TYPES
from recapp.stored.stored_model import Artefact
from recapp.tables.collections import embedding_lookups, embedding_tables
from recapp.tables.config import EmbeddingConfig, TableLookup

# the name of the planner's own plan
BEST = "best"

Settings = dict[str, Any]
DEVICE_COLUMNS = (
    console.Column("quantize", "tables\nstored as"),
    console.Column("bytes", "all tables,\nMB", ",.1f", 1e6),
    console.Column("devices", "fewest\ndevices"),
    console.Column("largest", "fullest\ndevice, MB", ",.1f", 1e6),
    console.Column("types", "how they are cut"),
)


def explain(recipe: OnPaper, job: Job) -> None:
    """Print a plan: the shards of each rank and their costs.

    `out` also draws the plan. `as=hugectr` prints it as HugeCTR's notebook does.
    """
    problem = problem_on_paper(recipe)
    plan, bound = chosen_plan(recipe, problem)
    report = explained(plan, problem, lower_bound_seconds=bound)
    if recipe.as_ == "hugectr":
        groups, text = plan_format("hugectr").shown_plan(plan, problem.tables, problem.lookups)
        if recipe.format == "json":
            console.emit_document({"plan": groups})
        else:
            print(text, end="")
    elif recipe.format == "json":
        console.emit_document(to_plain(report))
    else:
        print_plan(report)
    if recipe.out:
        folder = Path(recipe.out)
        page = plan_page(report, folder / "plan.html")  # makes the folder
        for path in [*(picture.write(folder) for picture in plan_pictures(report)), page]:
            console.note(f"written {console.short_path(path)}")


def export(recipe: OnPaper, job: Job) -> None:
    """Print the plan as a file, or write it to `path`."""
    for_hugectr = recipe.as_ == "hugectr"
    if recipe.indent is not None and not for_hugectr:
        raise ConfigError(
            f"indent={recipe.indent}: is for JSON, as=hugectr; leave it out for a plan in YAML"
        )
    problem = problem_on_paper(recipe)
    plan, _ = chosen_plan(recipe, problem)
    plan = replace(plan, made_for=made_for(problem))
    text = (
        plan_format("hugectr").written_plan(plan, problem.tables, problem.lookups, recipe.indent)
        if for_hugectr
        else plan_to_yaml(plan)
    )
    if recipe.path is None:
        print(text.rstrip("\n"))
        return
    path = Path(recipe.path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"path={path}: cannot be written ({error.strerror})") from error
    console.note(f"written {console.short_path(path)}")


def chosen_plan(recipe: OnPaper, problem: PlanningProblem) -> tuple[ShardingPlan, float | None]:
    """Return the plan that the settings ask for, and the planner's lower bound of a step in
    seconds, or None.
    """
    plan = recipe.plan
    if plan is not None and (plan.path is not None or plan.rules is not None):
        return build_plan(recipe, problem), None
    with console.progress(
        f"planning {len(problem.tables):,} tables on {problem.topology.world_size:,} ranks", 1
    ) as advance:
        outcome = best_plan(recipe, problem)
        advance(1)
    return outcome.plan, outcome.lower_bound_seconds


def scale(recipe: OnPaper, job: Job) -> None:
    """Print step time, memory and bytes of the tables for growing numbers of ranks."""
    known = [BEST, *SHARDING_TYPES]
    if not recipe.ranks:
        raise ConfigError("ranks=[]: must be a list of numbers of ranks, such as ranks=[8,16,32]")
    plans = [recipe.plans] if isinstance(recipe.plans, str) else list(recipe.plans)
    for name in plans:
        if name not in known:
            text = shown(to_plain(recipe.plans))
            raise ConfigError(f"plans={text}: {name}: {suggest(name, known)}")
    hardware = recipe.topology.costs or default_hardware("cpu")
    problem = replace(problem_on_paper(recipe), batch_per_rank=recipe.weak_batch)
    rows = []
    with console.progress("plans", len(MODES) * len(recipe.ranks) * len(plans)) as advance:
        for plan, mode in product(plans, MODES):
            types = None if plan == BEST else [plan]
            wish = ParameterConstraints(modes=[mode], sharding_types=types)
            for world in sorted(recipe.ranks):
                at = replace(problem, topology=_topology(world, hardware))
                rows.append({"plan": plan, "mode": mode, "ranks": world, **_cost(at, wish)})
                advance(1)
    columns = [
        console.Column("plan", "plan"),
        console.Column("mode", "mode"),
        console.Column("ranks", "ranks"),
        console.Column("step_ms", "step\nms", ",.2f"),
        console.Column("samples_per_second", "samples\n/ s", ",.0f"),
        console.Column("bytes_per_rank", "MB a\nrank", ",.1f", 1e6),
        console.Column("sent_per_rank", "MB sent\na rank", ",.2f", 1e6),
    ]
    title = f"{recipe.weak_batch:,} samples a rank on {hardware.name}; -: no room"
    console.emit(rows, recipe.format, columns, title=title)


def _topology(world: int, hardware: Hardware) -> Topology:
    """Return ranks that fill hosts of some hardware."""
    hosts = world // hardware.ranks_per_host if world % hardware.ranks_per_host == 0 else 1
    memory = None if hardware.memory_bytes is None else [hardware.memory_bytes] * world
    return Topology(world, hosts, hardware.compute_device, memory, hardware=hardware)


def _cost(problem: PlanningProblem, wish: ParameterConstraints) -> dict[str, float | None]:
    """Return what the best plan costs; None for each number if the tables do not fit."""
    try:
        cost = plan_tables(problem, {"*": wish}).cost
    except PlanError:
        names = ("step_ms", "samples_per_second", "bytes_per_rank", "sent_per_rank")
        return dict.fromkeys(names)
    world = problem.topology.world_size
    return {
        "step_ms": cost.step_seconds * 1e3,
        "samples_per_second": world * problem.batch_per_rank / cost.step_seconds,
        "bytes_per_rank": float(cost.bytes_W.max()),
        "sent_per_rank": cost.sent_bytes / world,
    }


# ---- serving


def devices(recipe: OnPaper, job: Job) -> None:
    """Print the fewest devices on which the tables fit, for each width or, with `path`, as an
    artefact stores them.
    """
    problem = problem_on_paper(recipe)
    topology = problem.topology
    if recipe.path is None:
        ways = {q: {t.name: str(storage_of(t, q)) for t in problem.tables} for q in QUANTIZE}
        tables = list(problem.tables)
        lookups = list(problem.lookups)
    else:
        tables, lookups = _tables_of(recipe.path)
        ways = {"stored": {}}
    rows = [_devices_row(name, tables, lookups, topology, ways[name]) for name in ways]
    memory = topology.memory_bytes
    if recipe.format == "json":
        console.emit_document({"rows": rows, "memory_bytes": memory and memory[0]})
        return
    assert memory is not None
    free = (memory[0] - topology.reserve_bytes) / 1e6
    title = f"Tables that are only read, on devices with {free:,.1f} MB for them"
    console.print_table(rows, DEVICE_COLUMNS, title=title)


def _tables_of(path: str) -> tuple[list[EmbeddingConfig], list[TableLookup]]:
    """Return the tables of an artefact and their lookups. Dynamic tables have their stored rows."""
    artefact = Artefact.at(path).manifest
    model = meta_model(artefact, recipe_of_stored(artefact))
    count = {t.name: max(t.rows, 1) for t in artefact.tables}
    tables = {
        t.name: t if t.dynamic is None else replace(t, num_embeddings=count[t.name], dynamic=None)
        for t in embedding_tables(model)
    }
    read = [replace(x, table=tables[x.table.name]) for x in embedding_lookups(model)]
    return list(tables.values()), read


def _devices_row(
    name: str,
    tables: list[EmbeddingConfig],
    lookups: list[TableLookup],
    topology: Topology,
    data_types: dict[str, str],
) -> dict[str, Any]:
    fit = fewest_ranks(*stored_as(tables, lookups, data_types), topology)
    types = [s.sharding_type for s in fit.plan.tables.values()]
    return {
        "quantize": name,
        "bytes": fit.bytes,
        "devices": fit.plan.world_size,
        "largest": fit.largest,
        "types": ", ".join(f"{types.count(t)} {t}" for t in dict.fromkeys(types)),
    }
