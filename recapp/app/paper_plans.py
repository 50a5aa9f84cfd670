"""The verbs of `recapp.plan` that need no run: explain, compare or export a plan."""

from dataclasses import replace
from pathlib import Path

from recapp import console
from recapp.app.job import Job
from recapp.app.recipe_of_job import recipe_under
from recapp.compat.hugectr_plan_lists import (
    hugectr_json,
    hugectr_lists,
    notebook_lists,
    printed,
)
from recapp.errors import ConfigError, suggest
from recapp.planner.planner_settings import PlanSettings
from recapp.planner.problem import PlanningProblem
from recapp.recipe.commands import OnPaper
from recapp.recipe.plan_of_run import best_plan, build_plan, made_for, problem_on_paper
from recapp.reporting.plan_explanation import explained
from recapp.reporting.plan_tables import difference, print_difference, print_plan
from recapp.settings.option_files import Folders, options
from recapp.sharding.plan_file import plan_to_yaml
from recapp.sharding.sharding_plan import ShardingPlan

BEST = "best"
"""The name of the planner's own plan."""


def explain(recipe: OnPaper, job: Job) -> None:
    """Print a plan: the shards of each rank and their costs.

    `out` also draws the plan. `as=hugectr` prints it as HugeCTR's notebook does.
    """
    problem = problem_on_paper(recipe)
    plan, bound = chosen_plan(recipe, problem)
    report = explained(plan, problem, lower_bound_seconds=bound)
    if recipe.as_ == "hugectr":
        lists = notebook_lists(hugectr_lists(plan, problem.tables, problem.lookups))
        if recipe.format == "json":
            console.emit_document({"plan": lists})
        else:
            print(printed(lists), end="")
    elif recipe.format == "json":
        console.emit_document(report)
    else:
        print_plan(report)
    if recipe.out:
        from recapp.reporting.plan_figures import draw_plan
        from recapp.reporting.plan_tables import plan_page

        folder = Path(recipe.out)
        for path in [*draw_plan(report, folder), plan_page(report, folder / "plan.html")]:
            console.note(f"written {console.short_path(path)}")


def compare(recipe: OnPaper, job: Job) -> None:
    """Print two plans side by side."""
    problem = problem_on_paper(recipe)
    plans = (
        chosen_plan(with_named_plan(recipe, name, job.folders), problem)[0]
        for name in (recipe.a, recipe.b)
    )
    a, b = (explained(plan, problem, alternatives=False) for plan in plans)
    rows = difference(a, b)
    if recipe.format == "json":
        console.emit(rows, "json")
    else:
        print_difference(a, b, rows)


def export(recipe: OnPaper, job: Job) -> None:
    """Print the plan as a file, or write it to `path`."""
    for_hugectr = recipe.as_ == "hugectr"
    if recipe.indent is not None and not for_hugectr:
        raise ConfigError(
            f"indent={recipe.indent}: is for JSON, as=hugectr; leave it out for a plan in YAML"
        )
    problem = problem_on_paper(recipe)
    plan, _ = chosen_plan(recipe, problem)
    plan = replace(plan, made_for=made_for(plan, problem))
    text = (
        hugectr_json(plan, problem.tables, problem.lookups, recipe.indent)
        if for_hugectr
        else plan_to_yaml(plan)
    )
    if recipe.path is None:
        print(text.rstrip("\n"))
        return
    path = Path(recipe.path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"path={path}: cannot be written ({error.strerror})") from error
    console.note(f"written {console.short_path(path)}")


def with_named_plan(recipe: OnPaper, name: str | None, folders: Folders = ()) -> OnPaper:
    """Return the recipe with another plan.

    Args:
        recipe: The recipe of `recapp.plan`.
        name: An option of the group `plan`, a file, or `best`, the planner's own.
        folders: Directories with further options, besides recapp's own.

    Raises:
        ConfigError: The name is missing, or none of these.
    """
    if name is None:
        raise ConfigError(
            "a and b must be given: names of plans, files, or best: a=mixed b=row_wise"
        )
    if name == BEST:
        return replace(recipe, plan=None)
    if Path(name).suffix in (".yaml", ".yml", ".json"):
        return replace(recipe, plan=PlanSettings(path=str(Path(name).absolute())))
    known = [option for option in options("plan", folders) if option != "file"]
    if name not in known:
        raise ConfigError(
            f"plan {name}: neither a file nor a plan of conf/plan; {suggest(name, [*known, BEST])}"
        )
    return replace(recipe, plan=recipe_under("plan", [f"+plan={name}"]).plan)


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
