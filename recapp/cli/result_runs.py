"""The runs of `recapp.results`: which models train on which logs, and under which settings.

logs x models x seeds            LOG/MODEL/seed_1, LOG/fuxictr_MODEL/seed_1
verb sizes: logs x sizes x seeds LOG/sizes/MODEL_4/seed_1
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recapp.benchmarks import fuxictr_beside
from recapp.benchmarks.other_python import THREADS
from recapp.cli.job import Job
from recapp.cli.kept_runs import LOG_FILE, KeptRun
from recapp.cli.recipe_of_job import recipe_under
from recapp.errors import ConfigError, RecappError, suggest
from recapp.models.catalogue import MODELS
from recapp.models.fm_checks import check_field_aware
from recapp.reporting.record import read_yaml
from recapp.run.commands import Results
from recapp.run.recipe import Train
from recapp.settings.option_files import Folders, option_file, options
from recapp.settings.values import in_quotes
from recapp.tables.named_collections import BAGS, SEQUENCES

NO_LOGS = (
    'logs must be given: "logs={criteo_kaggle: DIR}", each an option of dataset and the path '
    "of its Parquet files"
)


@dataclass(frozen=True)
class FuxiCTRRun(KeptRun):
    """A run of FuxiCTR's form of a model.

    Args:
        python: The Python with FuxiCTR.
    """

    python: str = ""

    def recipe(self) -> Train:
        """Compose the settings of recapp's model, and check them.

        Raises:
            ConfigError, DataError: What `recapp.train` would refuse, or FuxiCTR cannot have.
        """
        recipe = super().recipe()
        usual = recipe_under("train", [f"model={self._model}"])
        fuxictr_beside.check_settings(recipe, usual)
        return recipe

    def measure(self, recipe: Train, job: Job) -> dict[str, Any]:
        """Train under FuxiCTR, and return the metrics.

        Args:
            recipe: The recipe of recapp's model.
            job: A job in the directory of the run, whose log gets what FuxiCTR prints.

        Raises:
            LaunchError: FuxiCTR has failed.
        """
        return fuxictr_beside.measure(self.python, self._model, recipe, job.directory / LOG_FILE)

    @property
    def _model(self) -> str:
        """Return the option of `model`."""
        return str(self.facts["model"].removeprefix(fuxictr_beside.PREFIX))


def runs_of(settings: Results, job: Job, fuxictr: Mapping[str, str] | None = None) -> list[KeptRun]:
    """Return the runs of a command, the first seed of everything before the second one.

    Args:
        settings: The settings of the command.
        job: The job: its verb and the folders of its options.
        fuxictr: The versions of the packages of `fuxictr_python`.

    Raises:
        ConfigError: A log, a model or a path does not exist, or no run is left.
    """
    if not settings.logs:
        raise ConfigError(NO_LOGS)
    _check_keys(settings, job.folders)
    for log, path in settings.logs.items():
        _check_option("logs", "dataset", log, job.folders)
        if not path or "://" in path:
            raise ConfigError(f"logs.{log}={path}: must be the path of Parquet files")
    given = settings.models
    if given and len({*given}) < len(given):
        twice = next(model for model in given if given.count(model) > 1)
        raise ConfigError(
            f"models=[{','.join(given)}]: {twice} is there twice: name each model once"
        )
    for model in given or ():
        _check_option("models", "model", model, job.folders)
    if job.verb and (strange := sorted({*(given or ())} - {*settings.sizes})):
        raise ConfigError(
            f"models={strange[0]}: sizes lists no settings for it; "
            f"{suggest(strange[0], settings.sizes)}"
        )
    names = given or (settings.sizes if job.verb else options("model", job.folders))
    runs = [
        replace(run, versions=fuxictr) if isinstance(run, FuxiCTRRun) else run
        for seed in range(1, settings.seeds + 1)
        for log, path in settings.logs.items()
        for model in names
        for run in _runs(settings, job, (log, path), model, seed)
    ]
    if not runs:
        raise ConfigError(
            f"models={','.join(names)}: needs behaviour sequences, and histories names none of the "
            f"logs: histories={{LOG: {{history: item}}}}"
        )
    return runs


def _check_keys(settings: Results, folders: Folders) -> None:
    """Check the keys of the settings that are mappings: a misspelt one would change nothing.

    Raises:
        ConfigError: A key is no option.
    """
    logs = options("dataset", folders)
    models = options("model", folders)
    for name in settings.settings_of:
        if name not in (*logs, *models):
            raise ConfigError(
                f"settings_of.{name}: is an option neither of dataset nor of model; "
                f"{suggest(name, [*logs, *models])}"
            )
    for name in settings.histories:
        _check_option("histories", "dataset", name, folders)
    for name in settings.sizes:
        _check_option("sizes", "model", name, folders)


def _check_option(setting: str, group: str, name: str, folders: Folders) -> None:
    known = options(group, folders)
    if name not in known:
        raise ConfigError(f"{setting}: {group}={name} does not exist; {suggest(name, known)}")


def _runs(
    settings: Results, job: Job, named: tuple[str, str], model: str, seed: int
) -> Iterator[KeptRun]:
    """Yield the runs of a model with a seed on a log; none if the log lacks what it needs."""
    log, path = named
    own = _overrides(settings, log, path, model, _target(model, job.folders))
    if own is None:
        return
    facts = {"log": log, "model": model, "seed": seed}
    if not job.verb:
        name = f"{log}/{model}/seed_{seed}"
        yield KeptRun(name, (*own, f"seed={seed}"), facts, threads=THREADS)
    if not job.verb and settings.fuxictr_python and model in fuxictr_beside.MODELS:
        name = f"{fuxictr_beside.PREFIX}{model}"
        yield FuxiCTRRun(
            f"{log}/{name}/seed_{seed}",
            (*own, f"seed={seed}"),
            facts | {"model": name},
            threads=THREADS,
            python=settings.fuxictr_python,
        )
    for size, more in settings.sizes[model].items() if job.verb else ():
        name = f"{log}/sizes/{model}_{size}/seed_{seed}"
        own_facts = facts | {"size": size}
        yield KeptRun(name, (*own, *more, f"seed={seed}"), own_facts, threads=THREADS)


def _overrides(
    settings: Results, log: str, path: str, model: str, target: str | None
) -> tuple[str, ...] | None:
    """Return the command line of a model on a log without a seed; None if it cannot train."""
    known = MODELS.get(target or "")
    history = settings.histories.get(log)
    found = [*log_overrides(log, path), f"model={model}", *settings.settings]
    found += settings.settings_of.get(log, ())
    if history and (known is None or BAGS in known.needs):
        found.append(f"tables.shared={{{','.join(f'{k}: {v}' for k, v in history.items())}}}")
    if known and SEQUENCES in known.needs:
        if not history:
            return None
        found.append(f"tables.sequences=[{','.join(history)}]")
    own = settings.settings_of.get(model, ())
    if known and known.check_fields is check_field_aware:
        try:
            fields = _fields([*found, *own])
        except RecappError as error:
            raise type(error)(f"{log}/{model}: {error}") from error
        found.append(f"tables.dim={settings.columns * fields}")
    return (*found, *own)


def log_overrides(log: str, path: str) -> list[str]:
    """Return the settings that read a log.

    Args:
        log: The option of `dataset`.
        path: The path of its Parquet files.
    """
    return [f"dataset={log}", f"dataset.path={in_quotes(Path(path).expanduser().absolute())}"]


def _fields(overrides: Sequence[str]) -> int:
    """Return the number of fields under a command line: numbers and features of ids."""
    recipe: Train = recipe_under("train", overrides)
    return len(recipe.schema.numbers) + len(recipe.schema.features)


def _target(model: str, folders: Folders) -> str | None:
    """Return the constructor that the file of a model names itself."""
    path = option_file("model", model, folders)
    found = read_yaml(path) if path else None
    return found.get("_target_") if isinstance(found, dict) else None
