"""From settings to Lightning's objects around a model: callbacks, loggers, the Trainer.

    settings.callbacks, .logger, .trainer -> [Callback], [Logger], Trainer

What Lightning offers is taken as it is. What would do half of its work where tables are no
parameters, or watch a metric that nobody measures, is refused here with what to use instead.
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
    LearningRateMonitor,
    ModelCheckpoint,
    ProgressBar,
)
from lightning.pytorch.loggers import Logger
from torchmetrics import Metric

from recapp.app.build import Settings, construct, make, target_of
from recapp.checkpoints.directory import read_manifest
from recapp.errors import ConfigError, suggest
from recapp.metrics import click_metrics
from recapp.trainer.curves import CSVCurves
from recapp.trainer.strategy import EmbeddingShardingStrategy, check_precision

SAID_BY_RECAPP = ("devices", "accelerator", "enable_progress_bar")
"""Of `trainer`: what Lightning is given follows from the ranks that run and the callbacks."""
_AVERAGES = "it averages parameters, and tables are none: half of the model would be an average"
NOT_OF_TABLES = {  # of Lightning's callbacks: why
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
    "EMAWeightAveraging": _AVERAGES,
    "GradientAccumulationScheduler": (
        "tables are updated in every backward; use a larger dataset.batch_size"
    ),
    "ModelPruning": "it prunes parameters, and tables are none",
    "BatchSizeFinder": (
        "dataset.batch_size is part of the order of the data; sweep it: -m "
        "dataset.batch_size=512,1024"
    ),
    "LearningRateFinder": (
        "it knows one learning rate and there are two; sweep them: -m optimizer.dense.lr=0.001,0.01"
    ),
}


@contextmanager
def in_one_line() -> Iterator[None]:
    """Inside, what Lightning finds wrong with its settings once it knows the data is an error for
    people.

    Raises:
        ConfigError: such as a share of the batches that is less than one batch.
    """
    try:
        yield
    except MisconfigurationException as e:
        raise ConfigError(f"trainer: {' '.join(str(e).split())}") from e


def build_callbacks(settings: Settings, folder: Path, *, logging: bool) -> list[Callback]:
    """Those of `conf/callbacks`; checkpoints go to `folder`."""
    made: list[Callback] = []
    measured = {
        f"val_{name}": metric
        for name, metric in click_metrics(settings["metrics"]["names"]).items()
    }
    targets = [str(wanted.get("_target_")) for wanted in settings["callbacks"].values()]
    # others may log what they like
    all_known = all(target.startswith(("lightning.", "recapp.")) for target in targets)
    for name, wanted in settings["callbacks"].items():
        kind = target_of(wanted, f"callbacks.{name}")
        extra = {}
        _refuse_callback(kind, f"callbacks.{name}")
        if _is(kind, Checkpoint) and "dirpath" in signature(kind).parameters:
            if "dirpath" in wanted:
                raise ConfigError(
                    f"callbacks.{name}.dirpath: cannot be set: checkpoints lie in the run's "
                    "directory, hydra.run.dir=DIR"
                )
            if wanted.get("save_last"):
                raise ConfigError(
                    f"callbacks.{name}.save_last: cannot be set: last.ckpt is kept in any case"
                )
            extra["dirpath"] = str(folder)
        if _is(kind, LearningRateMonitor) and not logging:
            continue  # Lightning refuses a monitor without a logger
        made.append(make(wanted, f"callbacks.{name}", **extra))
        _check_monitor(made[-1], f"callbacks.{name}", measured, all_known)
        if isinstance(made[-1], ModelCheckpoint):
            _check_filename(made[-1], f"callbacks.{name}.filename", measured, all_known)
    return made


def _is(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _refuse_callback(kind: Any, setting: str) -> None:
    """Raises ConfigError for those of Lightning's that would do half of their work here, with what
    to use instead.
    """
    for base in getattr(kind, "__mro__", ()):
        if base.__module__.startswith("lightning.") and base.__name__ in NOT_OF_TABLES:
            raise ConfigError(
                f"{setting} ({base.__name__}): cannot be used: {NOT_OF_TABLES[base.__name__]}"
            )


def _check_monitor(
    callback: Callback, setting: str, measured: Mapping[str, Metric], all_known: bool
) -> None:
    """Raises ConfigError where a callback watches what is not measured, or takes worse for better.

    Lightning would find the one out after the first epoch, and the other never.

    Args:
        callback: to be looked at.
        setting: that it is made of.
        measured: what validation measures.
        all_known: whether nothing else is measured, because no callback is the user's own.
    """
    monitor = getattr(callback, "monitor", None)
    mode = getattr(callback, "mode", None)
    if monitor is None or (
        monitor not in measured and not all_known and not monitor.startswith("val_")
    ):
        return
    if monitor not in measured:
        other, metric = next(iter(measured.items()))
        fix = f"{setting}.monitor={other}" + (f" {setting}.mode={_better(metric)}" if mode else "")
        raise ConfigError(
            f"{setting}.monitor={monitor}: not measured (metrics.names); "
            f"{suggest(monitor, measured)}; set {fix}"
        )
    better = _better(measured[monitor])
    if mode in ("min", "max") and better is not None and mode != better:
        said = "larger" if better == "max" else "smaller"
        raise ConfigError(
            f"{setting}.mode={mode}: a {said} {monitor} is better; set {setting}.mode={better}"
        )


def _check_filename(
    callback: ModelCheckpoint, setting: str, measured: Mapping[str, Metric], all_known: bool
) -> None:
    """Raises ConfigError for a pattern of file names that cannot be filled in, or gives the name of
    what training goes on from.
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
            f"{setting}={pattern}: no pattern of a file name ({e}); such as step_{{step:06d}}"
        ) from e
    if unknown := sorted(asked - numbers.keys()) if all_known else []:
        raise ConfigError(
            f"{setting}={pattern}: {unknown[0]} is not measured; {suggest(unknown[0], numbers)}"
        )
    if name.startswith("last.ckpt") or "/" in pattern:
        raise ConfigError(
            f"{setting}={pattern}: must be a name of its own beside last.ckpt, which is kept in "
            "any case; such as step_{step:06d}"
        )


def _better(metric: Metric) -> str | None:
    return {True: "max", False: "min", None: None}[metric.higher_is_better]


def has_bar(callbacks: Iterable[Callback]) -> bool:
    """Whether one of Lightning's progress bars was chosen, which takes the place of recapp's
    own.
    """
    return any(isinstance(callback, ProgressBar) for callback in callbacks)


def build_loggers(settings: Settings, folder: Path) -> list[Logger]:
    """Those of `conf/logger`, below `folder`. Where a run goes on from a checkpoint of its own, its
    curve goes on too.
    """
    made = [
        make(wanted, f"logger.{name}", save_dir=str(folder))
        for name, wanted in settings["logger"].items()
    ]
    if settings["ckpt_path"] and Path(settings["ckpt_path"]).resolve().is_relative_to(
        folder.resolve()
    ):
        for curves in (logger for logger in made if isinstance(logger, CSVCurves)):
            curves.kept_steps = read_manifest(settings["ckpt_path"]).step
    return made


def length(trainer: Settings) -> tuple[int, int]:
    """Epochs and steps after which training ends, -1 for no such end; where nothing is said, one
    epoch.
    """
    steps = trainer.get("max_steps")
    epochs = trainer.get("max_epochs")
    if epochs is None:
        epochs = 1 if steps in (None, -1) else -1
    return epochs, -1 if steps is None else steps


def build_trainer(
    settings: Settings,
    strategy: EmbeddingShardingStrategy,
    callbacks: Sequence[Callback],
    loggers: Sequence[Logger],
    *,
    ranks: tuple[int, int],
) -> Trainer:
    """Lightning's Trainer for one of `ranks`: so many on each host, so many hosts."""
    wanted = {
        k: v for k, v in settings["trainer"].items() if v is not None and k not in SAID_BY_RECAPP
    }
    wanted["max_epochs"], wanted["max_steps"] = length(wanted)
    if isinstance(wanted.get("val_check_interval"), int):
        # steps are counted across epochs; shares are of each epoch
        wanted["check_val_every_n_epoch"] = None
    check_precision(wanted.get("precision"))
    accelerator = settings["trainer"]["accelerator"]
    gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
    made = construct(
        Trainer,
        "trainer",
        accelerator="cuda" if gpu else "cpu",
        devices=ranks[0],
        num_nodes=ranks[1],
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
    return made
