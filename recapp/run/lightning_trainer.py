"""Lightning's objects around a model: callbacks, loggers, the Trainer.

    recipe.callbacks, .logger, .trainer -> [Callback], [Logger], Trainer

Lightning's own classes are used unchanged. Two kinds of callbacks are refused: those that work on
parameters, since tables are no parameters, and those that monitor a metric that is not measured.
The error names an alternative.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from string import Formatter
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ProgressBar,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

from recapp.errors import ConfigError, suggest
from recapp.processes.rank_environment import is_first, rank_info
from recapp.run.constructors import construct, make
from recapp.run.monitors import all_known, check_monitor, measured_by
from recapp.run.recipe import Train
from recapp.settings.check_settings import find_constructor
from recapp.settings.records import Constructor, to_plain
from recapp.stored.checkpoint import read_manifest
from recapp.stored.run_files import goes_on_in
from recapp.tables.named_collections import of_all_members
from recapp.trainer.average_weights import AverageWeights
from recapp.trainer.batch_callback import skip_idle_hooks
from recapp.trainer.curves import CSVCurves
from recapp.trainer.restart_tables import RestartTables
from recapp.trainer.strategy import EmbeddingShardingStrategy
from recapp.trainer.unusable_callbacks import refuse_class

SET_BY_RECAPP = ("devices", "accelerator", "enable_progress_bar", "average")
"""Settings of `trainer` that recapp replaces by values that follow from ranks and callbacks, or by
a callback.
"""

AT_EPOCH_END = "check_on_train_epoch_end"
"""The argument of Lightning's EarlyStopping that says when it checks."""


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turn an error of Lightning about its settings, raised in this block, into an error of one
    line.

    Raises:
        ConfigError: A setting does not fit the data, such as a share of the batches that is less
            than one batch.
    """
    try:
        yield
    except MisconfigurationException as e:
        raise ConfigError(f"trainer: {' '.join(str(e).split())}") from e


def average_of(recipe: Train) -> list[Callback]:
    """Return the callback of `trainer.average`, which must come before those that save."""
    settings = recipe.trainer.average
    if settings.kind == "none":
        return []
    return [AverageWeights(settings, restarts=bool(recipe.optimizer.restart_tables))]


def build_callbacks(recipe: Train, folder: Path, *, logging: bool) -> list[Callback]:
    """Return the callbacks of `conf/callbacks`, after the one of `optimizer.restart_tables`.

    Args:
        recipe: The recipe of the run.
        folder: The directory of checkpoints.
        logging: Whether there is a logger.

    Raises:
        ConfigError: A callback cannot be used here, or its settings are wrong.
    """
    restarts = recipe.optimizer.restart_tables
    all_members = of_all_members(dict.fromkeys(restarts), recipe.all_tables) if restarts else ()
    made: list[Callback] = [RestartTables(list(all_members))] if restarts else []
    measured = measured_by(recipe)
    known = all_known(recipe)
    for name, wanted in recipe.callbacks.items():
        kind = find_constructor(wanted.target, f"callbacks.{name}")
        if _is(kind, LearningRateMonitor) and not logging:
            continue  # Lightning refuses a monitor without a logger
        made.append(build_callback(wanted, f"callbacks.{name}", folder))
        monitor = getattr(made[-1], "monitor", None)
        mode = getattr(made[-1], "mode", None)
        check_monitor(f"callbacks.{name}", monitor, mode, measured, all_known=known)
        if isinstance(made[-1], ModelCheckpoint):
            _check_filename(made[-1], f"callbacks.{name}.filename", measured, known)
    return made


def build_callback(wanted: Constructor, setting: str, folder: Path) -> Any:
    """Return a callback of `conf/callbacks`.

    Args:
        wanted: Its settings.
        setting: Their dotted name.
        folder: The directory of checkpoints.

    Raises:
        ConfigError: It cannot be used here, or its settings are wrong.
    """
    kind = find_constructor(wanted.target, setting)
    extra: dict[str, Any] = {}
    refuse_class(kind, setting)
    if _is(kind, Checkpoint) and "dirpath" in signature(kind).parameters:
        if "dirpath" in wanted.arguments:
            raise ConfigError(
                f"{setting}.dirpath: cannot be set: checkpoints lie in the run's directory, "
                "hydra.run.dir=DIR"
            )
        if wanted.arguments.get("save_last"):
            raise ConfigError(f"{setting}.save_last: cannot be set: every run keeps last.ckpt")
        extra["dirpath"] = str(folder)
    if _is(kind, EarlyStopping) and AT_EPOCH_END in signature(kind).parameters:
        extra |= _check_after_validation(wanted.arguments)
    return _made(wanted, setting, Callback, **extra)


def _made(wanted: Constructor, setting: str, kind: type, **extra: Any) -> Any:
    """Call a constructor that must return a part of Lightning."""
    made = make(wanted, setting, **extra)
    if not isinstance(made, kind):
        raise ConfigError(
            f"{setting}._target_={wanted.target}: makes a {type(made).__name__}, and must make a "
            f"{kind.__name__} of lightning.pytorch"
        )
    return made


def _is(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _check_after_validation(given: Mapping[str, Any]) -> dict[str, bool]:
    """Return the setting by which early stopping checks after a validation. Lightning's own default
    is the end of an epoch, and a run that resumes there has no metric yet.
    """
    if AT_EPOCH_END in given or not str(given.get("monitor")).startswith("val_"):
        return {}
    return {AT_EPOCH_END: False}


def _check_filename(
    callback: ModelCheckpoint, setting: str, measured: Iterable[str], known: bool
) -> None:
    """Check a pattern of checkpoint file names.

    Raises:
        ConfigError: The pattern cannot be filled in, gives the name `last.ckpt`, or contains a
            slash.
    """
    numbers = {"epoch": 0, "step": 0, **dict.fromkeys(measured, 0.5)}
    pattern = callback.filename or ""
    try:
        asked = {
            re.split(r"[.\[]", name)[0]
            for _, name, _, _ in Formatter().parse(pattern)
            if name is not None
        }
        name = Path(
            callback.format_checkpoint_name(
                {key: torch.tensor(value) for key, value in numbers.items()}
            )
        ).name
    except (ValueError, LookupError, AttributeError, TypeError) as e:
        raise ConfigError(
            f"{setting}={pattern}: is no pattern of a file name ({e}): use step_{{step:06d}}"
        ) from e
    if unknown := sorted(asked - numbers.keys()) if known else []:
        raise ConfigError(
            f"{setting}={pattern}: {unknown[0]} is not measured; {suggest(unknown[0], numbers)}"
        )
    if name.startswith("last.ckpt") or "/" in pattern:
        raise ConfigError(
            f"{setting}={pattern}: must not begin with last.ckpt, which every run keeps, nor "
            "contain a slash: use a pattern such as step_{step:06d}"
        )


def has_bar(callbacks: Iterable[Callback]) -> bool:
    """Return whether a callback is one of Lightning's progress bars, which replace recapp's own."""
    return any(isinstance(callback, ProgressBar) for callback in callbacks)


def build_loggers(recipe: Train, folder: Path) -> list[Logger]:
    """Return the loggers of `conf/logger`. They write below the directory of the run.

    Only rank 0 makes them, because a constructor may create a database or a run of a service. Other
    ranks get Lightning's DummyLogger in their places. A run that resumes in its own directory
    continues its stored curves.

    Args:
        recipe: The recipe of the run.
        folder: The directory of the run.
    """
    if not is_first():
        return [DummyLogger() for _ in recipe.logger]
    made = [
        _made(wanted, f"logger.{name}", Logger, save_dir=str(folder))
        for name, wanted in recipe.logger.items()
    ]
    if recipe.ckpt_path and goes_on_in(folder, recipe.ckpt_path):
        for curves in (logger for logger in made if isinstance(logger, CSVCurves)):
            curves.kept_steps = read_manifest(recipe.ckpt_path).step
    return made


def build_trainer(
    recipe: Train,
    strategy: EmbeddingShardingStrategy,
    callbacks: Sequence[Callback],
    loggers: Sequence[Logger],
) -> Trainer:
    """Return Lightning's Trainer of this rank. The number of ranks comes from the environment
    variables of torch elastic, torchrun, srun or the user.

    Args:
        recipe: The recipe of the run.
        strategy: The Strategy that shards the tables.
        callbacks: All callbacks.
        loggers: All loggers.

    Raises:
        ConfigError: A setting of `trainer` has a value that Lightning refuses.
    """
    wanted = {
        k: v
        for k, v in to_plain(recipe.trainer).items()
        if v is not None and k not in SET_BY_RECAPP
    }
    wanted["max_epochs"], wanted["max_steps"] = recipe.trainer.length
    if isinstance(wanted.get("val_check_interval"), int):
        # an int counts steps across epochs, a float is a share of each epoch
        wanted["check_val_every_n_epoch"] = None
    here = rank_info()
    ranks_of_host = here.local_world if here else 1
    accelerator = recipe.trainer.accelerator
    gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
    made = construct(
        Trainer,
        "trainer",
        accelerator="cuda" if gpu else "cpu",
        devices=1 if gpu and torch.cuda.device_count() == 1 else ranks_of_host,
        num_nodes=-(-here.world // ranks_of_host) if here else 1,
        strategy=strategy,
        callbacks=list(callbacks),
        logger=list(loggers),
        enable_progress_bar=has_bar(callbacks),
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=False,
        **wanted,
    )
    assert isinstance(made, Trainer)
    skip_idle_hooks(made.callbacks)  # type: ignore[attr-defined]
    return made
