"""Lightning's objects of a recipe: module, data module, Strategy, callbacks, loggers, Trainer.

Lightning's own classes are used unchanged. Two kinds of callbacks are refused: those that work on
parameters, since tables are no parameters, and those that monitor a metric that is not measured.
The error names an alternative.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from string import Formatter
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from recapp.dataset.data_settings import ScoringSettings
from recapp.engine.row_store import RowStore, StoredGroup
from recapp.errors import ConfigError, alike, suggest
from recapp.optim.rules import sgd
from recapp.planner.problem import RESERVE_BYTES
from recapp.processes.rank_environment import is_first, rank_info
from recapp.run.constructors import construct, make_a
from recapp.run.model import check_outputs
from recapp.run.plan_of_run import build_plan, problem_of_run
from recapp.run.recipe import Recipe, Train
from recapp.run.run_rows import write_generated
from recapp.settings.records import Constructor, constructor, find_constructor, to_plain
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.stored.checkpoint import goes_on_in
from recapp.stored.manifest import CheckpointManifest, Manifest
from recapp.tables.table_settings import of_all_members
from recapp.trainer.callbacks import RestartTables
from recapp.trainer.curves import CSVCurves
from recapp.trainer.datamodule import ClickData
from recapp.trainer.followed_data import FollowedData
from recapp.trainer.lightnings_parts import AverageWeights, skip_idle_hooks
from recapp.trainer.module import TaskModule
from recapp.trainer.restore import TOTAL, ChangedOptimizer
from recapp.trainer.strategy import EmbeddingShardingStrategy
from recapp.trainer.trainer_settings import refuse_class

CYCLES = "cycle_momentum"  # of OneCycleLR and CyclicLR


def build_data(
    recipe: Train,
    set_table_rows: Callable[[list[int]], object] = list,
    scoring: ScoringSettings | None = None,
    trains: bool = False,
) -> ClickData:
    """Return the data module.

    Args:
        recipe: The recipe.
        set_table_rows: Called with the sizes of tables once the ids of the training rows are
            counted; `list` does nothing.
        scoring: The settings of the rows to score; None without prediction.
        trains: Whether a model trains on the rows; else files are not followed.
    """
    generated = recipe.dataset.generate is not None
    follows = recipe.dataset.follow and trains
    return (FollowedData if follows else ClickData)(
        recipe.dataset.scaled,
        recipe.schema if scoring else recipe.labelled_schema,
        recipe.order_seed,
        partial(write_generated, recipe.dataset) if generated else None,
        set_table_rows=set_table_rows if recipe.counts_ids else None,
        max_table_rows=recipe.most_rows,
        scoring=scoring,
        resume_data=recipe.resume_data,
        number_rows=recipe.metrics.bootstrap is not None,
    )


def sized_by(recipe: Train, data: ClickData) -> Callable[[], Train]:
    """Return a function that gives the recipe with the sizes of tables and the fitted values of
    derived columns that the data module found.

    Until the data module is set up, the sizes are those of the settings.
    """
    return lambda: recipe.sized(data.table_rows, data.schema.values or None)


def build_module(recipe: Train, make_model: Callable[[], nn.Module]) -> TaskModule:
    """Return the LightningModule: task and optimiser around the model.

    Args:
        recipe: The recipe.
        make_model: Makes the model.
    """
    schedule = schedule_of(recipe)
    monitor = schedule.arguments.get("monitor") if schedule else None

    def total() -> int | None:
        data = module.trainer.datamodule  # type: ignore[attr-defined]
        return data.steps_of_run() if isinstance(data, ClickData) else None

    module = TaskModule(
        recipe.built_task,
        make_model,
        partial(dense_optimizer, recipe.optimizer.dense),
        (lambda optimizer: make_schedule(schedule, optimizer, total)) if schedule else None,
        recipe.seed,
        monitor=monitor,
        measures_training=recipe.dataset.follow,
    )
    return module


def make_schedule(
    settings: Constructor, optimizer: Optimizer, total: Callable[[], int | None]
) -> LRScheduler:
    """Make the schedule of a run. A schedule that takes `total_steps` gets the number of steps of
    the run, if the settings leave it open.

    Args:
        settings: The settings of the schedule.
        optimizer: The optimiser; its param groups get the first rates.
        total: Returns the number of steps of the run.

    Raises:
        ConfigError: The schedule cannot be made.
    """
    settings = without_monitor(settings)
    parameters = signature(find_constructor(settings.target, "optimizer.schedule")).parameters
    open_total = TOTAL in parameters and settings.arguments.get(TOTAL) is None
    more = {TOTAL: total()} if open_total else {}
    try:
        return make_a(LRScheduler, settings.without(*more), "optimizer.schedule", optimizer, **more)
    except ConfigError as error:
        if CYCLES not in parameters or not isinstance(error.__cause__, LookupError):
            raise
        raise ConfigError(
            f"optimizer.schedule ({settings.target}): cycles the momentum of all param groups, and "
            f"those of tables have none: add {CYCLES}: false to optimizer.schedule"
        ) from error


def without_monitor(schedule: Constructor) -> Constructor:
    """Return a schedule without the metric that it follows, which Lightning reads."""
    follows = _is(find_constructor(schedule.target, "optimizer.schedule"), ReduceLROnPlateau)
    return schedule.without("monitor") if follows else schedule


def changed_optimizer(before: Any, now: Mapping[str, Any]) -> ChangedOptimizer:
    """Return the callback that applies changed settings of the optimiser.

    Args:
        before: The group `optimizer` of the checkpoint's settings; None if it has none.
        now: That of this run's settings.
    """
    return ChangedOptimizer(
        before,
        now,
        lambda plain, optimizer, total: make_schedule(
            constructor(plain, "optimizer.schedule"), optimizer, lambda: total
        ),
    )


def dense_optimizer(settings: Constructor, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimiser of the dense part.

    Args:
        settings: The settings `optimizer.dense`.
        parameters: The parameters of the dense part.

    Raises:
        ConfigError: The settings make no optimiser.
    """
    # a model of tables alone has no parameters, and torch's optimisers refuse an empty list
    groups: list[Any] = list(parameters) or [{"params": []}]
    return make_a(Optimizer, settings, "optimizer.dense", groups)


# ---- the validation metrics that callbacks and schedules may monitor

# The schedules that follow a metric.
PLATEAUS = ("torch.optim.lr_scheduler.ReduceLROnPlateau", "recapp.optim.schedule.Plateau")


def measured_by(recipe: Train) -> dict[str, str | None]:
    """Return the validation metrics, each with `max` if larger is better, `min` if smaller is, or
    None if neither is.
    """
    return {each.of_validation: each.better for each in recipe.built_task.measures}


def all_known(recipe: Train) -> bool:
    """Return whether every callback is Lightning's or recapp's. Other callbacks may log other
    metrics.
    """
    return all(
        each.target.startswith(("lightning.", "recapp.")) for each in recipe.callbacks.values()
    )


def check_monitor(
    setting: str,
    monitor: str | None,
    mode: str | None,
    measured: Mapping[str, str | None],
    *,
    all_known: bool,
) -> None:
    """Check that a callback monitors a measured metric, and in the right direction.

    Lightning would find a wrong metric only after the first epoch, and a wrong direction never.

    Args:
        setting: The dotted name of the callback's settings.
        monitor: The metric.
        mode: `max` if larger is better, `min` if smaller is.
        measured: The validation metrics (`measured_by`).
        all_known: Whether no other metrics are logged.

    Raises:
        ConfigError: The metric is not measured, or the mode is wrong.
    """
    if monitor is None or (
        monitor not in measured and not all_known and not monitor.startswith("val_")
    ):
        return
    if monitor not in measured:
        other = next(iter([*alike(monitor, measured), *measured]))
        fix = f"{setting}.monitor={other}" + (f" {setting}.mode={measured[other]}" if mode else "")
        raise ConfigError(
            f"{setting}.monitor={monitor}: not measured (metrics.names); "
            f"{suggest(monitor, measured)}; set {fix}"
        )
    better = measured[monitor]
    if mode in ("min", "max") and better is not None and mode != better:
        word = "larger" if better == "max" else "smaller"
        raise ConfigError(
            f"{setting}.mode={mode}: a {word} {monitor} is better; set {setting}.mode={better}"
        )


def schedule_of(recipe: Train) -> Constructor | None:
    """Return the schedule of learning rates.

    Raises:
        ConfigError: The metric that it follows is not measured, or its mode is wrong.
    """
    schedule = recipe.optimizer.schedule
    if schedule is None or schedule.target not in PLATEAUS:
        return schedule
    if recipe.without_validation is not None:
        raise ConfigError(
            f"{recipe.without_validation}: optimizer.schedule ({schedule.target}) follows a metric "
            "of validations; validate, or choose another schedule"
        )
    monitor = str(schedule.arguments.get("monitor"))
    mode = schedule.arguments.get("mode", "min")  # torch's own default
    measured = measured_by(recipe)
    check_monitor("optimizer.schedule", monitor, mode, measured, all_known=True)
    if measured[monitor] is None:
        raise ConfigError(
            f"optimizer.schedule.monitor={monitor}: neither larger nor smaller values of it are "
            f"better; {suggest(monitor, [name for name, better in measured.items() if better])}"
        )
    return schedule


# ---- callbacks, loggers, Trainer

# Settings of `trainer` that recapp replaces by values that follow from ranks and callbacks, or by a
# callback.
SET_BY_RECAPP = ("devices", "accelerator", "enable_progress_bar", "average")

# The argument of Lightning's EarlyStopping that says when it checks.
AT_EPOCH_END = "check_on_train_epoch_end"


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
    callbacks: list[Callback] = [RestartTables(list(all_members))] if restarts else []
    measured = measured_by(recipe)
    known = all_known(recipe)
    for name, settings in recipe.callbacks.items():
        kind = find_constructor(settings.target, f"callbacks.{name}")
        if _is(kind, LearningRateMonitor) and not logging:
            continue  # Lightning refuses a monitor without a logger
        callbacks.append(build_callback(settings, f"callbacks.{name}", folder))
        monitor = getattr(callbacks[-1], "monitor", None)
        mode = getattr(callbacks[-1], "mode", None)
        check_monitor(f"callbacks.{name}", monitor, mode, measured, all_known=known)
        if isinstance(callbacks[-1], ModelCheckpoint):
            _check_filename(callbacks[-1], f"callbacks.{name}.filename", measured, known)
    return callbacks


def build_callback(settings: Constructor, setting: str, folder: Path) -> Any:
    """Return a callback of `conf/callbacks`.

    Args:
        settings: Its class and arguments.
        setting: Their dotted name.
        folder: The directory of checkpoints.

    Raises:
        ConfigError: It cannot be used here, or its settings are wrong.
    """
    kind = find_constructor(settings.target, setting)
    extra: dict[str, Any] = {}
    refuse_class(kind, setting)
    if _is(kind, Checkpoint) and "dirpath" in signature(kind).parameters:
        if "dirpath" in settings.arguments:
            raise ConfigError(
                f"{setting}.dirpath: cannot be set: checkpoints=DIR says where they are written"
            )
        if settings.arguments.get("save_last"):
            raise ConfigError(f"{setting}.save_last: cannot be set: every run keeps last.ckpt")
        extra["dirpath"] = os.fspath(folder)
    if (
        _is(kind, EarlyStopping)
        and AT_EPOCH_END in signature(kind).parameters
        and AT_EPOCH_END not in settings.arguments
        and str(settings.arguments.get("monitor")).startswith("val_")
    ):
        # its own default is the end of an epoch, and a run that resumes there has no metric yet
        extra[AT_EPOCH_END] = False
    return make_a(Callback, settings, setting, **extra)


def _is(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


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
    """Return whether a callback is a progress bar of Lightning, in the place of the usual one."""
    return any(isinstance(callback, ProgressBar) for callback in callbacks)


def build_loggers(
    recipe: Train, folder: Path, resumed: CheckpointManifest | None = None
) -> list[Logger]:
    """Return the loggers of `conf/logger`. They write below the directory of the run.

    Only rank 0 makes them, because a constructor may create a database or a run of a service. Other
    ranks get Lightning's DummyLogger in their places. A run that resumes in its own directory
    continues its stored curves.

    Args:
        recipe: The recipe of the run.
        folder: The directory of the run.
        resumed: The manifest of the checkpoint from which it resumes.
    """
    if not is_first():
        return [DummyLogger() for _ in recipe.logger]
    loggers = [
        make_a(Logger, each, f"logger.{name}", save_dir=str(folder))  # type: ignore[type-abstract]
        for name, each in recipe.logger.items()
    ]
    if (
        resumed
        and recipe.ckpt_path
        and goes_on_in(folder, recipe.checkpoints_in(folder), recipe.ckpt_path)
    ):
        for curves in (logger for logger in loggers if isinstance(logger, CSVCurves)):
            curves.kept_steps = resumed.step
    return loggers


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
    arguments = {
        k: v
        for k, v in to_plain(recipe.trainer).items()
        if v is not None and k not in SET_BY_RECAPP
    }
    arguments["max_epochs"], arguments["max_steps"] = recipe.length
    if isinstance(arguments.get("val_check_interval"), int):
        # an int counts steps across epochs, a float is a share of each epoch
        arguments["check_val_every_n_epoch"] = None
    here = rank_info()
    ranks_of_host = here.local_world if here else 1
    accelerator = recipe.trainer.accelerator
    gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
    trainer: Trainer = construct(
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
        **arguments,
    )
    skip_idle_hooks(trainer.callbacks)  # type: ignore[attr-defined]
    return trainer


# The dtype of messages for each value of `engine.payload`; None keeps the dtype of the computation.
PAYLOADS: dict[str, torch.dtype | None] = {
    "full": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def build_strategy(
    recipe: Train,
    *,
    training: bool,
    resumed: CheckpointManifest | None = None,
    make_store: Callable[[StoredGroup], RowStore] | None = None,
    sized: Callable[[], Recipe] | None = None,
) -> EmbeddingShardingStrategy:
    """Return the Strategy that shards the tables.

    Args:
        recipe: The recipe.
        training: Whether tables are updated; evaluation holds no optimiser state.
        resumed: The manifest of a checkpoint whose tables keep their modes.
        make_store: Makes the store of each group, with its rows; None leaves them to be filled.
        sized: Returns the recipe with the sizes of tables that the data module found; None uses
            `recipe`.
    """
    now = sized or (lambda: recipe)
    stored = resumed.plan.tables if resumed else {}
    topology = recipe.topology
    engine = recipe.engine
    reserve = topology.reserve_bytes
    return EmbeddingShardingStrategy(
        lambda facts: build_plan(now(), problem_of_run(now(), facts)),
        recipe.rules if training else sgd(0.0),
        hosts=topology.hosts,
        memory_bytes=topology.memory_bytes,
        reserve_bytes=RESERVE_BYTES if reserve is None else reserve,
        hardware=topology.costs,
        transport=engine.transport,
        backend=engine.backend,
        payload=PAYLOADS[engine.payload],
        modes={name: s.mode for name, s in stored.items() if s.mode != "replicated"},
        look_ahead=engine.look_ahead,
        clip_tables=engine.clip_tables,
        compiled=engine.compile,
        graphs=engine.graph == "auto",
        stored=lambda: {"config": to_plain(now())},
        make_store=make_store,
        timeout=timedelta(seconds=recipe.launch.timeout),
    )


def meet(recipe: Train) -> None:
    """Make the process group of several ranks, as a trainer does. Every rank calls it."""
    here = rank_info()
    if here is None or here.world == 1:
        return
    strategy = build_strategy(recipe, training=False)
    build_trainer(recipe, strategy, [], [])
    strategy.setup_distributed()


@dataclass(frozen=True)
class RankModel:
    """A model that a rank evaluates or predicts with.

    Args:
        module: The module; its tables are sharded when the trainer starts.
        strategy: The Strategy that shards the tables.
        ckpt_path: The checkpoint that Lightning restores; None if the model is already filled.
        callbacks: Callbacks that the trainer needs for this model.
    """

    module: TaskModule
    strategy: EmbeddingShardingStrategy
    ckpt_path: str | None
    callbacks: tuple[Callback, ...] = ()

    def trainer(
        self, recipe: Train, callbacks: Sequence[Callback], *, bar: bool = False
    ) -> Trainer:
        """Return the Trainer of this rank, without loggers.

        Args:
            recipe: The recipe of the command.
            callbacks: The callbacks of the command.
            bar: Whether to show Lightning's progress bar.
        """
        bars = [TQDMProgressBar(recipe.trainer.log_every_n_steps)] if bar else []
        return build_trainer(recipe, self.strategy, [*self.callbacks, *callbacks, *bars], [])

    def facts(self) -> dict[str, Any]:
        """Return the end of `metrics.json`: the number of ranks, the plan and the status."""
        assert self.strategy.plan is not None
        return {
            "ranks": self.strategy.comm.world,
            "plan": self.strategy.plan.name,
            "status": "ok",
        }


@dataclass(eq=False)
class CheckExample(Callback):
    """Compare the outputs of an artefact's example with the exported ones before its first batch.
    Every rank scores the example.

    Args:
        artefact: The artefact.
        batch: The batch of its example.
    """

    artefact: Manifest
    batch: Batch

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score the example and compare its outputs.

        Raises:
            ArtefactError: The outputs differ.
        """
        assert isinstance(pl_module, TaskModule)
        # TF32, which ranks compute with on a GPU, is too coarse for a comparison of files
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.no_grad():
                outputs = pl_module.outputs(self.batch.to(pl_module.device))
        finally:
            torch.set_float32_matmul_precision(precision)
        check_outputs(self.artefact, outputs)

    on_validation_start = on_test_start = on_predict_start
