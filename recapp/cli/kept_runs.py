"""Training runs that a command does once: each has a directory of its own, and a run that is
complete there is not run again.

    PATH/NAME/result.json      its settings and what it measured; written last
    PATH/NAME/begun.json       its settings, from its beginning on
    PATH/NAME/log.txt          what its ranks printed
    PATH/NAME/metrics.json     and the other records of a run, without curves and checkpoints
    PATH/NAME/checkpoints/     the measured one, of runs that resume or test

A command that was stopped goes on with the first run that has no result. A result does not count if
it is of other settings, on another number of threads, of another version of recapp or of a package
below it, or in an older form.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recapp import console
from recapp.cli.job import Job, run_recipe
from recapp.cli.recipe_of_job import recipe_under
from recapp.errors import CheckpointError, ConfigError, LaunchError, RecappError
from recapp.processes.start_and_end import redirected
from recapp.reporting import record
from recapp.reporting.about import VERSION, machine, versions
from recapp.reporting.run_record import read_performance
from recapp.run.early_checks import check_data, check_training
from recapp.run.recipe import Train
from recapp.settings.records import to_plain
from recapp.settings.values import in_quotes
from recapp.stored.trust import packages_of_user

RESULT_FILE = "result.json"
FORM = 2
"""The form of results: 2 has samples per CPU second."""
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
            anew, so that its speed is that of the whole run. It keeps the measured checkpoint.
        threads: The compute threads of each of its ranks; None: those of the environment, which its
            result does not hold.
        versions: The versions of packages, besides recapp, on which its result depends; None: those
            of this Python.
    """

    name: str
    overrides: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    tests: bool = False
    resumes: bool = False
    threads: int | None = None
    versions: Mapping[str, str] | None = None

    def result(self, folder: Path) -> dict[str, Any] | None:
        """Return the result of the run if it is complete; else None.

        Args:
            folder: The directory of the command.
        """
        found = record.read_document(folder / self.name / RESULT_FILE)
        return found if found is not None and found.items() >= self._same().items() else None

    def _same(self) -> dict[str, Any]:
        """Return what results have in common that may be averaged with that of this run."""
        found = versions()
        if self.versions is not None:
            found = {n: text for n, text in found.items() if n == "recapp"} | {**self.versions}
        return {
            "overrides": list(self.overrides),
            "form": FORM,
            **({"threads": self.threads} if self.threads else {}),
            **{f"{VERSION}{name}": text for name, text in found.items()},
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
            RecappError: A setting is wrong, the directory has a stopped run of other settings, or a
                rank has failed.
        """
        recipe = self.recipe()
        self.check_attempt(folder)
        directory = folder / self.name
        own = replace(job, directory=directory, overrides=self.overrides)
        begun = self._begun(recipe, own)
        if begun is None:
            self._say_replaced(directory)
            shutil.rmtree(directory, ignore_errors=True)  # of an attempt that did not end
            directory.mkdir(parents=True)
            record.write_document(self._same(), directory / BEGUN_FILE)
        with printed_into(directory / LOG_FILE):
            found = self.measure(*(begun or (recipe, own)))
        return self.keep(found, folder)

    def check_attempt(self, folder: Path) -> None:
        """Check that the directory of a run that resumes has no checkpoint of a stopped run of
        other settings or versions, which the run would delete.

        Args:
            folder: The directory of the command.

        Raises:
            ConfigError: It has one.
        """
        directory = folder / self.name
        begun = record.read_document(directory / BEGUN_FILE)
        stopped = not (directory / RESULT_FILE).exists()
        if not self.resumes or begun == self._same() or not stopped:
            return
        if (directory / "checkpoints" / "last.ckpt").exists():
            raise ConfigError(
                f"{console.short_path(directory)}: has the checkpoint of a run that was stopped, "
                f"which differs in {self._differs_in(begun)} and would be deleted: train with "
                "those, remove the directory, or name another one, path=..."
            )

    def _say_replaced(self, directory: Path) -> None:
        """Say that a complete run of other settings is deleted, if it is one that resumes."""
        complete = record.read_document(directory / RESULT_FILE)
        if self.resumes and complete is not None:
            where = console.short_path(directory)
            console.note(f"{where}: differs in {self._differs_in(complete)}, and is replaced")

    def _differs_in(self, other: Mapping[str, Any] | None) -> str:
        """Return what tells a record of a run from this run."""
        if other is None:
            return f"settings or versions ({BEGUN_FILE} cannot be read)"
        own = self._same()
        words = {"overrides": "settings", "form": "the form of results"}
        found = [name for name in own if other.get(name) != own[name]]
        found += ["threads"] if "threads" in other and "threads" not in own else []
        return ", ".join(
            f"the version of {name.removeprefix(VERSION)}"
            if name.startswith(VERSION)
            else words.get(name, name)
            for name in found
        )

    def _begun(self, recipe: Train, job: Job) -> tuple[Train, Job] | None:
        """Return the recipe and the job of the rest of an attempt with the same settings; None if
        there is none from which the run may go on.
        """
        last = job.directory / "checkpoints" / "last.ckpt"
        same = record.read_document(job.directory / BEGUN_FILE) == self._same()
        if not (self.resumes and same and last.exists()):
            return None
        if _trained(job.directory):
            console.note(f"{self.name}: is trained already, and only measured")
            return recipe, job
        overrides = (f"ckpt_path={in_quotes(last)}", *_trusting(recipe))
        try:
            rest = recipe_under("train", overrides)
        except CheckpointError as error:
            console.note(f"{self.name}: begins anew: {error}")
            return None
        console.note(f"{self.name}: goes on from {console.short_path(last)}")
        return rest, replace(job, overrides=overrides)

    def measure(self, recipe: Train, job: Job) -> dict[str, Any]:
        """Train, unless the directory has the metrics of a whole training; measure the rows that
        test; and return the metrics.

        Args:
            recipe: The recipe of the run.
            job: A job in the directory of the run.

        Raises:
            RecappError: A rank has failed.
        """
        metrics = _trained(job.directory) or run_recipe(recipe, job, "recapp.train", self.threads)
        if self.tests:
            overrides = (f"ckpt_path={in_quotes(metrics['checkpoint'])}", *_trusting(recipe))
            metrics = {**_tested(overrides, job, self.threads), **metrics}
        measured = read_performance(job.directory)
        peaks = [rank.rss_peak or 0 for rank in (measured.memory if measured else ())]
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
        if not self._keeps_checkpoint:
            result.pop("checkpoint", None)
        record.write_document(result, directory / RESULT_FILE)
        self.delete_large(folder)
        return result

    @property
    def _keeps_checkpoint(self) -> bool:
        return self.tests or self.resumes

    def delete_large(self, folder: Path) -> None:
        """Delete what is large of a complete run, but for a measured checkpoint that it keeps.

        Args:
            folder: The directory of the command.
        """
        directory = folder / self.name
        result = record.read_document(directory / RESULT_FILE) or {}
        measured = result.get("checkpoint") if self._keeps_checkpoint else None
        for name in LARGE:
            _delete_but(directory / name, Path(measured) if measured else None)


def _delete_but(directory: Path, kept: Path | None) -> None:
    """Delete a directory, but for one checkpoint in it and links to that."""
    if kept is None or kept.parent != directory:
        shutil.rmtree(directory, ignore_errors=True)
        return
    real = kept.resolve()
    for path in list(directory.glob("*")):
        if path.resolve() != real:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _trained(directory: Path) -> dict[str, Any] | None:
    """Return the metrics of a training that has ended well; None without one."""
    found = record.read_document(directory / record.METRICS_FILE)
    ended = found is not None and found.get("status") in ("ok", record.UNDEFINED)
    return found if ended else None


def _trusting(recipe: Train) -> list[str]:
    """Return the setting `trust` with which a checkpoint of a recipe may name the classes that the
    recipe itself names; nothing where it names none of the user's.
    """
    packages = packages_of_user(to_plain(recipe))
    return [f"trust=[{','.join(packages)}]"] if packages else []


def _tested(overrides: tuple[str, ...], job: Job, threads: int | None) -> dict[str, Any]:
    """Measure a checkpoint on the rows of `dataset.test_path`, and return these metrics."""
    overrides = (*overrides, "split=test")
    directory = job.directory / "test"
    directory.mkdir(exist_ok=True)
    own = replace(job, directory=directory, overrides=overrides)
    found = run_recipe(recipe_under("eval", overrides), own, "recapp.eval", threads)
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
    for run in missing:
        run.check_attempt(folder)
    return missing


def train_missing(
    runs: Sequence[KeptRun],
    folder: Path,
    job: Job,
    first: Callable[[], Sequence[str]] | None = None,
) -> list[dict[str, Any]]:
    """Train the runs that have no result yet, and return all results, in the order of the runs.

    The settings of all missing runs are checked before the first one trains. A run that fails is
    told at once, and the next one goes on.

    Args:
        runs: The runs.
        folder: The directory of the command.
        job: The job of the command.
        first: What else is to be done once the settings are checked, before the first run; it
            returns the names of what has failed.

    Raises:
        ConfigError, DataError: The settings of a run are wrong; the text names the run.
        LaunchError: Some runs have failed.
    """
    missing = _checked(runs, folder)
    failed = list(first()) if first else []
    for run in runs:
        if run not in missing:  # the command may have ended before it deleted them
            run.delete_large(folder)
    if again := [run for run in missing if (folder / run.name / RESULT_FILE).is_file()]:
        console.note(
            f"{len(again)} of {len(runs)} runs have results of other settings or threads, of "
            f"another version or in an older form, and run again; the first is {again[0].name}"
        )
    if len(missing) < len(runs):
        console.note(f"{len(runs) - len(missing)} of {len(runs)} runs are complete already")
    with console.progress("runs", len(missing)) as advance:
        for run in missing:
            with noting_failure(run.name, failed):
                run.train(folder, job)
            advance(1)
    if failed:
        raise LaunchError(
            f"{len(failed)} run{'s' if len(failed) > 1 else ''} failed, the first {failed[0]}: "
            f"{LOG_FILE} in their directories has what they printed"
        )
    return [found for run in runs if (found := run.result(folder)) is not None]


@contextmanager
def noting_failure(name: str, failed: list[str]) -> Iterator[None]:
    """Note an error inside the `with` as one line, so that other runs go on.

    Args:
        name: The name of the run, which is added to `failed` then.
        failed: The names of the runs that have failed.
    """
    try:
        yield
    except (RecappError, OSError) as error:  # OSError: a full disk
        failed.append(name)
        console.note(f"{name}: {' '.join(str(error).split())}")


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
