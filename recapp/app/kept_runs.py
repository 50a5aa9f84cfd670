"""Training runs that a command does once: each has a directory of its own, and a run that is
complete there is not run again.

    PATH/NAME/result.json      its settings and what it measured; written last
    PATH/NAME/begun.json       its settings, from its beginning on
    PATH/NAME/log.txt          what its ranks printed
    PATH/NAME/metrics.json     and the other records of a run, without curves and checkpoints

A command that was stopped goes on with the first run that has no result. A result does not count if
it is of other settings, of another version of recapp, or in an older form.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recapp import console
from recapp.app.job import Job, run_recipe
from recapp.app.recipe_of_job import recipe_under
from recapp.errors import LaunchError, RecappError
from recapp.processes.start_and_end import redirected
from recapp.recipe.early_checks import check_data, check_training
from recapp.recipe.recipe import Train
from recapp.reporting import record
from recapp.reporting.about import VERSION, machine, versions
from recapp.settings.values import in_quotes

RESULT_FILE = "result.json"
FORM = 2
"""The form of results: 2 has samples per CPU second."""
FORM_OF_OTHERS = 3
"""The form of results of other programs: 3 has the memory of their processes alone."""
BEGUN_FILE = "begun.json"
LOG_FILE = "log.txt"
LARGE = ("checkpoints", "csv", "ranks", ".hydra")


@dataclass(frozen=True)
class KeptRun:
    """A training run with a place of its own.

    Args:
        name: The directory of the run, below that of the command.
        overrides: The command line of `recapp.train` that it stands for.
        facts: What the command says about the run; its result holds it.
        tests: Whether the best checkpoint is measured on the rows of `dataset.test_path`, too.
        resumes: Whether a run that was stopped goes on from its last checkpoint; if not, it begins
            anew, so that its speed is that of the whole run.
        form: The form of its result.
    """

    name: str
    overrides: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    tests: bool = False
    resumes: bool = False
    form: int = FORM

    def result(self, folder: Path) -> dict[str, Any] | None:
        """Return the result of the run if it is complete; else None.

        Args:
            folder: The directory of the command.
        """
        found = record.read_document(folder / self.name / RESULT_FILE)
        return found if found is not None and found.items() >= self._same().items() else None

    def _same(self) -> dict[str, Any]:
        """Return what results have in common that may be averaged with that of this run."""
        return {
            "overrides": list(self.overrides),
            "form": self.form,
            f"{VERSION}recapp": versions().get("recapp"),
        }

    def recipe(self) -> Train:
        """Compose the settings of the run, and check them as `recapp.train` does.

        Raises:
            ConfigError, DataError: What `recapp.train` would refuse.
        """
        recipe: Train = recipe_under("train", self.overrides)
        check_data(recipe)
        check_training(recipe)
        return recipe

    def train(self, folder: Path, job: Job) -> dict[str, Any]:
        """Train in the directory of the run, keep the result, and delete what is large.

        Args:
            folder: The directory of the command.
            job: The job of the command.

        Raises:
            RecappError: A setting is wrong, or a rank has failed.
        """
        recipe = self.recipe()
        directory = folder / self.name
        last = self._stopped_at(directory)
        overrides = self.overrides if last is None else (f"ckpt_path={in_quotes(last)}",)
        if last is None:
            shutil.rmtree(directory, ignore_errors=True)  # of an attempt that did not end
            directory.mkdir(parents=True)
            record.write_document(self._same(), directory / BEGUN_FILE)
        else:
            console.note(f"{self.name}: goes on from {console.short_path(last)}")
            recipe = recipe_under("train", overrides)
        with printed_into(directory / LOG_FILE):
            found = self.measure(recipe, replace(job, directory=directory, overrides=overrides))
        return self.keep(found, folder)

    def _stopped_at(self, directory: Path) -> Path | None:
        """Return the last checkpoint of an attempt with the same settings that did not end, if the
        run can go on from it.
        """
        last = directory / "checkpoints" / "last.ckpt"
        began = record.read_document(directory / BEGUN_FILE)
        return last if self.resumes and began == self._same() and last.exists() else None

    def measure(self, recipe: Train, job: Job) -> dict[str, Any]:
        """Train, and return the metrics.

        Args:
            recipe: The recipe of the run.
            job: A job in the directory of the run.

        Raises:
            RecappError: A rank has failed.
        """
        metrics = run_recipe(recipe, job, "recapp.train")
        if self.tests:
            metrics = {**_tested(metrics["checkpoint"], job), **metrics}
        measured = record.read_performance(job.directory) or {}
        peaks = [rank["rss_peak"] for rank in measured.get("memory", ())]
        return {**metrics, "peak_bytes": max(peaks, default=None)}

    def keep(self, found: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Write the result of the run, delete what is large, and return the result.

        Args:
            found: What it measured.
            folder: The directory of the command.
        """
        directory = folder / self.name
        directory.mkdir(parents=True, exist_ok=True)
        result = {**found, **self.facts, **self._same(), **machine()}
        record.write_document(result, directory / RESULT_FILE)
        _delete_large(directory)
        return result


def _delete_large(directory: Path) -> None:
    for name in LARGE:
        shutil.rmtree(directory / name, ignore_errors=True)


def _tested(checkpoint: str, job: Job) -> dict[str, Any]:
    """Measure a checkpoint on the rows of `dataset.test_path`, and return these metrics."""
    overrides = (f"ckpt_path={in_quotes(checkpoint)}", "split=test")
    directory = job.directory / "test"
    directory.mkdir(exist_ok=True)
    own = replace(job, directory=directory, overrides=overrides)
    found = run_recipe(recipe_under("eval", overrides), own, "recapp.eval")
    return {name: value for name, value in found.items() if name.startswith("test_")}


def _checked(runs: Sequence[KeptRun], folder: Path) -> list[KeptRun]:
    """Check the settings of the runs that have no result yet, and return these runs.

    Args:
        runs: The runs.
        folder: The directory of the command.

    Raises:
        ConfigError, DataError: The settings of a run are wrong; the text names the run.
    """
    missing = [run for run in runs if run.result(folder) is None]
    kinds: dict[tuple[object, ...], KeptRun] = {}
    for run in missing:
        own = (o for o in run.overrides if not o.startswith("seed="))
        kinds.setdefault((type(run), *own), run)
    for run in kinds.values():
        try:
            run.recipe()
        except RecappError as error:
            raise type(error)(f"{run.name}: {error}") from error
    return missing


def train_missing(
    runs: Sequence[KeptRun], folder: Path, job: Job, first: Callable[[], None] | None = None
) -> list[dict[str, Any]]:
    """Train the runs that have no result yet, and return all results, in the order of the runs.

    The settings of all missing runs are checked before the first one trains. A run that fails is
    told at once, and the next one goes on.

    Args:
        runs: The runs.
        folder: The directory of the command.
        job: The job of the command.
        first: What else is to be done once the settings are checked, before the first run.

    Raises:
        ConfigError, DataError: The settings of a run are wrong; the text names the run.
        LaunchError: Some runs have failed.
    """
    missing = _checked(runs, folder)
    if first:
        first()
    for run in runs:
        if run not in missing:  # the command may have ended before it deleted them
            _delete_large(folder / run.name)
    if again := [run for run in missing if (folder / run.name / RESULT_FILE).is_file()]:
        console.note(
            f"{len(again)} of {len(runs)} runs have results of other settings, of another version "
            f"or in an older form, and run again; the first is {again[0].name}"
        )
    failed = []
    if len(missing) < len(runs):
        console.note(f"{len(runs) - len(missing)} of {len(runs)} runs are complete already")
    with console.progress("runs", len(missing)) as advance:
        for run in missing:
            try:
                run.train(folder, job)
            except RecappError as error:
                failed.append(run)
                console.note(f"{run.name}: {' '.join(str(error).split())}")
            advance(1)
    if failed:
        raise LaunchError(
            f"{len(failed)} of {len(missing)} runs failed, the first {failed[0].name}: "
            f"{LOG_FILE} in their directories has what they printed"
        )
    return [found for run in runs if (found := run.result(folder)) is not None]


@contextmanager
def printed_into(path: Path) -> Iterator[None]:
    """Send what this process and its ranks print to a file inside the `with`."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError):
            stream.flush()
    with path.open("ab") as file, redirected(1, file.fileno()), redirected(2, file.fileno()):
        yield
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
