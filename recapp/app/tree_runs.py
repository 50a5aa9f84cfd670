"""The lines of LightGBM in the table of `recapp.results`: one run for all seeds of a log."""

from pathlib import Path

from recapp.app.kept_runs import RESULT_FILE, KeptRun
from recapp.app.recipe_of_job import recipe_under
from recapp.app.result_runs import log_overrides
from recapp.console import note
from recapp.recipe.commands import Results
from recapp.reporting import record
from recapp.reporting.about import machine


def train_trees(settings: Results, folder: Path) -> None:
    """Train boosted trees on each log, unless their results are there, and keep the results.

    Args:
        settings: The settings of the command, with `lightgbm_python`.
        folder: The directory of the command.

    Raises:
        LaunchError: LightGBM has failed.
    """
    from recapp.benchmarks import boosted_trees

    python = settings.lightgbm_python
    for log, path in (settings.logs or {}).items():
        overrides = log_overrides(log, path)
        if python is None:
            return
        if recipe_under("train", overrides).schema.dense:
            overrides.append("dataset.missing_flags=true")
        runs = [
            KeptRun(f"{log}/{boosted_trees.NAME}/seed_{seed}", tuple(overrides))
            for seed in range(1, settings.seeds + 1)
        ]
        if all(run.result(folder) for run in runs):
            continue
        note(f"{log}: {boosted_trees.NAME}")
        recipe = recipe_under("train", overrides)
        seeds = range(1, settings.seeds + 1)
        for run, result in zip(runs, boosted_trees.measure(python, recipe, seeds), strict=True):
            (folder / run.name).mkdir(parents=True, exist_ok=True)
            facts = {"log": log, "model": boosted_trees.NAME, "overrides": list(run.overrides)}
            found = {**result, **facts, **machine()}
            record.write_document(found, folder / run.name / RESULT_FILE)
