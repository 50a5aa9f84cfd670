"""The lines of LightGBM in the table of `recapp.results`: one run for all seeds of a log, on the
rows and columns that the models get.
"""

from collections.abc import Mapping
from pathlib import Path

from recapp.app.kept_runs import KeptRun, noting_failure
from recapp.app.recipe_of_job import recipe_under
from recapp.app.result_runs import log_overrides
from recapp.benchmarks.other_python import THREADS
from recapp.console import note
from recapp.recipe.commands import Results


def train_trees(settings: Results, folder: Path, versions: Mapping[str, str]) -> list[str]:
    """Train boosted trees on each log, unless their results are there, and keep the results. What
    fails is told at once, and the next log goes on.

    Args:
        settings: The settings of the command, with `lightgbm_python`.
        folder: The directory of the command.
        versions: The versions of the packages of `lightgbm_python`.

    Returns:
        The names of what has failed.
    """
    from recapp.benchmarks.boosted_trees import NAME

    failed: list[str] = []
    for log in settings.logs or {} if settings.lightgbm_python else ():
        with noting_failure(f"{log}/{NAME}", failed):
            _train(settings, folder, log, versions)
    return failed


def _train(settings: Results, folder: Path, log: str, versions: Mapping[str, str]) -> None:
    """Train the trees of a log, unless all seeds have results."""
    from recapp.benchmarks import boosted_trees

    assert settings.logs and settings.lightgbm_python  # `train_trees`
    overrides = [*log_overrides(log, settings.logs[log]), *settings.settings]
    overrides += settings.settings_of.get(log, ())
    if recipe_under("train", overrides).schema.dense:
        overrides.append("dataset.missing_flags=true")
    seeds = range(1, settings.seeds + 1)
    runs = [
        KeptRun(
            f"{log}/{boosted_trees.NAME}/seed_{seed}",
            tuple(overrides),
            {"log": log, "model": boosted_trees.NAME},
            threads=THREADS,
            versions=versions,
        )
        for seed in seeds
    ]
    if all(run.result(folder) for run in runs):
        return
    note(f"{log}: {boosted_trees.NAME}")
    recipe = recipe_under("train", overrides)
    found = boosted_trees.measure(settings.lightgbm_python, recipe, seeds)
    for run, measured in zip(runs, found, strict=True):
        run.keep(measured, folder)
