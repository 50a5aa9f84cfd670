"""The lines of LightGBM in the table of `recapp.results`: one run for all seeds of a log, on the
rows and columns that the models get.
"""

from pathlib import Path

from recapp.app.kept_runs import FORM_OF_OTHERS, KeptRun
from recapp.app.recipe_of_job import recipe_under
from recapp.app.result_runs import log_overrides
from recapp.console import note
from recapp.recipe.commands import Results


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
        overrides = [*log_overrides(log, path), *settings.settings]
        overrides += settings.settings_of.get(log, ())
        if python is None:
            return
        if recipe_under("train", overrides).schema.dense:
            overrides.append("dataset.missing_flags=true")
        facts = {"log": log, "model": boosted_trees.NAME}
        runs = [
            KeptRun(
                f"{log}/{boosted_trees.NAME}/seed_{seed}",
                tuple(overrides),
                facts,
                form=FORM_OF_OTHERS,
            )
            for seed in range(1, settings.seeds + 1)
        ]
        if all(run.result(folder) for run in runs):
            continue
        note(f"{log}: {boosted_trees.NAME}")
        recipe = recipe_under("train", overrides)
        seeds = range(1, settings.seeds + 1)
        for run, found in zip(runs, boosted_trees.measure(python, recipe, seeds), strict=True):
            run.keep(found, folder)
