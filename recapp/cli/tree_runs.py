"""The lines of LightGBM in the table of `recapp.results`: one run for all seeds of a log, on the
rows and columns that the models get.

    settings -> runs of each log, checked -> LOG/lightgbm/log.txt, LOG/lightgbm/seed_1/result.json
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recapp.benchmarks import boosted_trees
from recapp.benchmarks.other_python import THREADS
from recapp.cli.kept_runs import LOG_FILE, KeptRun, noting_failure
from recapp.cli.recipe_of_job import recipe_under
from recapp.cli.result_runs import log_overrides
from recapp.console import note
from recapp.errors import RecappError
from recapp.run.commands import Results
from recapp.run.recipe import Train


@dataclass(frozen=True)
class Trees:
    """The trees of a log, of all seeds.

    Args:
        log: The log.
        recipe: The recipe of the models, whose rows the trees get.
        runs: The run of each seed.
    """

    log: str
    recipe: Train
    runs: tuple[KeptRun, ...]

    @property
    def name(self) -> str:
        """The directory of the trees, below that of the command."""
        return f"{self.log}/{boosted_trees.NAME}"

    def train(self, python: str, folder: Path) -> None:
        """Train the trees, and keep the result of each seed.

        Args:
            python: The Python with LightGBM.
            folder: The directory of the command.

        Raises:
            LaunchError: LightGBM has failed.
        """
        note(f"{self.log}: {boosted_trees.NAME}")
        directory = folder / self.name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / LOG_FILE).write_text("")
        seeds = range(1, len(self.runs) + 1)
        found = boosted_trees.measure(python, self.recipe, seeds, directory / LOG_FILE)
        for run, measured in zip(self.runs, found, strict=True):
            run.keep(measured, folder)


def missing_trees(settings: Results, folder: Path, versions: Mapping[str, str]) -> list[Trees]:
    """Return the trees of each log that lacks results, with their settings checked.

    Args:
        settings: The settings of the command.
        folder: The directory of the command.
        versions: The versions of the packages of `lightgbm_python`.

    Raises:
        ConfigError: LightGBM cannot follow a setting; the text names the trees.
    """
    found = []
    for log in settings.logs or {} if settings.lightgbm_python else ():
        try:
            trees = _trees(settings, log, versions)
            if all(run.result(folder) for run in trees.runs):
                continue
            boosted_trees.check_settings(trees.recipe)
        except RecappError as error:
            raise type(error)(f"{log}/{boosted_trees.NAME}: {error}") from error
        found.append(trees)
    return found


def train_trees(settings: Results, folder: Path, trees: list[Trees]) -> list[str]:
    """Train boosted trees, and keep their results. What fails is told at once, and the next log
    goes on.

    Args:
        settings: The settings of the command, with `lightgbm_python`.
        folder: The directory of the command.
        trees: The trees that have no result yet.

    Returns:
        The names of what has failed.
    """
    failed: list[str] = []
    for of_log in trees:
        assert settings.lightgbm_python  # `missing_trees`
        with noting_failure(of_log.name, failed):
            of_log.train(settings.lightgbm_python, folder)
    return failed


def _trees(settings: Results, log: str, versions: Mapping[str, str]) -> Trees:
    """Return the trees of a log."""
    assert settings.logs  # `missing_trees`
    overrides = [*log_overrides(log, settings.logs[log]), *settings.settings]
    overrides += settings.settings_of.get(log, ())
    recipe: Train = recipe_under("train", overrides)
    if recipe.schema.dense:
        overrides.append("dataset.missing_flags=true")
        recipe = recipe_under("train", overrides)
    runs = [
        KeptRun(
            f"{log}/{boosted_trees.NAME}/seed_{seed}",
            tuple(overrides),
            {"log": log, "model": boosted_trees.NAME},
            threads=THREADS,
            versions=versions,
        )
        for seed in range(1, settings.seeds + 1)
    ]
    return Trees(log, recipe, tuple(runs))
