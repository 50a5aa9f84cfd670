"""A training run: its callbacks, its start from a checkpoint, the measurements that it leaves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from recapp.console import short_path
from recapp.dataset.schema import Schema
from recapp.planner.problem import dense_weights
from recapp.planner.rank_memory import bytes_per_rank
from recapp.processes.rank_environment import is_first, rank_info
from recapp.reporting.plan_report import explained
from recapp.reporting.run_record import PREDICTED_FILE, write_record
from recapp.reporting.summary import about
from recapp.run.plan_of_run import problem_of_run
from recapp.run.recipe import Train
from recapp.run.trained_model import files_of_values, with_columns_of
from recapp.run.training import (
    average_of,
    build_callback,
    build_callbacks,
    changed_optimizer,
    has_bar,
)
from recapp.settings.records import TARGET, constructor, to_plain
from recapp.settings.uris import path_to
from recapp.stored.checkpoint import folder_of
from recapp.stored.manifest import CheckpointManifest
from recapp.stored.store import is_checkpoint
from recapp.stored.stored_model import Checkpoint, read_manifest, read_meta
from recapp.trainer.callbacks import (
    ClaimDirectory,
    FillTables,
    KeepPosition,
    LogDynamicRows,
    StartReport,
    StepClock,
)
from recapp.trainer.curves import (
    LogSettings,
    NoteEarlyStop,
    ProgressLines,
    steps_planned,
)
from recapp.trainer.data_protocols import datamodule_of
from recapp.trainer.followed_data import FollowedData, MeasureFiles
from recapp.trainer.keep_checkpoints import (
    JOINED_FILE,
    EndTogether,
    KeepLast,
    KeepSnapshots,
    best_known,
    kept_before,
)
from recapp.trainer.restore import ChangedCallbacks
from recapp.trainer.strategy import EmbeddingShardingStrategy, strategy_of


@dataclass(frozen=True)
class Resumed:
    """A run that resumes from a checkpoint.

    Args:
        recipe: The recipe of the run, with the columns of the checkpoint.
        path: The checkpoint.
        manifest: Its manifest.
    """

    recipe: Train
    path: str
    manifest: CheckpointManifest

    @property
    def limit(self) -> str | None:
        """The limit that the checkpoint has reached, such as `trainer.max_steps=20`; None if steps
        are left to train.
        """
        epochs, steps = self.recipe.length
        if 0 <= steps <= self.manifest.step:
            return f"trainer.max_steps={steps}"
        return (
            f"trainer.max_epochs={epochs}"
            if 0 <= epochs <= self.manifest.position["epoch"]
            else None
        )

    @property
    def lacks_validation(self) -> bool:
        """Whether a signal saved the checkpoint before its validation, and validation is on: the
        run then validates first."""
        return not self.manifest.metrics and self.recipe.without_validation is None

    def changed_callbacks(self, folder: Path) -> ChangedCallbacks:
        """Return the callback that lets callbacks with changed settings begin anew.

        Args:
            folder: The directory of checkpoints.
        """
        entry = self.manifest.config.get("callbacks")
        stored = entry.values() if isinstance(entry, Mapping) else ()  # a damaged file may hold any
        before = [
            to_plain(constructor(each, "callbacks"))
            for each in stored
            if isinstance(each, Mapping) and TARGET in each
        ]
        changed = [
            (f"callbacks.{name}", build_callback(now, f"callbacks.{name}", folder))
            for name, now in self.recipe.callbacks.items()
            if to_plain(now) not in before
        ]
        return ChangedCallbacks(changed)

    @property
    def joined(self) -> CheckpointManifest | None:
        """The manifest of the joined models of the last epochs, if they lie measured beside the
        checkpoint of a run that is over.
        """
        beside = folder_of(self.path) / JOINED_FILE
        if self.recipe.snapshots < 2 or not is_checkpoint(beside):
            return None
        manifest = read_manifest(beside)
        same = (manifest.run, manifest.step) == (self.manifest.run, self.manifest.step)
        return manifest if same and manifest.metrics else None

    def snapshots(self) -> list[Path]:
        """Return the checkpoints of the last epochs of a run that is over, if it kept any: its run
        ended before they were joined. This checkpoint is the last of them if it is of the end of an
        epoch and has no snapshot beside it.
        """
        state = read_meta(self.path)["callbacks"].get(KeepSnapshots.__qualname__)
        if state is None:
            return []
        path = path_to(self.path).absolute()
        checkpoints = kept_before(
            state, self.recipe.snapshots, folder_of(path), self.manifest.run, noted=is_first()
        )
        steps = [read_manifest(snapshot).step for snapshot in checkpoints]
        if not self.manifest.position["batches"] and self.manifest.step not in steps:
            checkpoints.append(path)
        return checkpoints[-self.recipe.snapshots :]

    def metrics(self) -> dict[str, Any]:
        """Print that nothing is left to train, and return the content of `metrics.json`: the
        metrics of the best checkpoint. Ranks other than 0 print nothing and return an empty dict.
        """
        if not is_first():
            return {}
        here = rank_info()
        steps = self.manifest.step
        position = self.manifest.position
        print(
            f"nothing is left to train: {short_path(self.path)} has {steps} steps behind it "
            f"({position['epoch']} epochs and {position['batches']} "
            f"batches) and {self.limit}; raise that to go on"
        )
        best = best_known(self.path, read_meta(self.path), self.manifest.run)
        of_best = self.joined or read_manifest(best or self.path)
        return of_best.metrics | {
            "samples_per_second": None,
            "samples_per_cpu_second": None,
            "train_seconds": None,
            "step_ms": None,
            "steps": steps,
            "ranks": here.world if here else 1,
            "plan": self.manifest.plan.name,
            "checkpoint": str(of_best.folder),
            "checkpoint_step": of_best.step,
            "run": self.manifest.run,
            "seed": self.recipe.seed,
            "status": "ok",
        }


def resumed_run(recipe: Train) -> Resumed | None:
    """Return the run of a recipe if it resumes from a checkpoint, else None. The checkpoint is
    opened once; the recipe has its columns. Every rank calls this.

    Raises:
        CheckpointError: The checkpoint does not exist, or is damaged.
    """
    path = recipe.ckpt_path
    if path is None:
        return None
    with Checkpoint.at(path, selector=partial(files_of_values, recipe=recipe)) as stored:
        return Resumed(with_columns_of(recipe, stored), path, stored.manifest)


class RunCallbacks:
    """The callbacks of a training run: recapp's own and those of `conf/callbacks`.

    Args:
        recipe: The recipe of the run.
        job_dir: The directory of the run.
        resumed: The run if it resumes from a checkpoint, else None.
        schema: The columns of the data set.
        bar: Whether to show Lightning's progress bar instead of lines, unless `conf/callbacks` has
            one.
        logging: Whether there is a logger.
        settings: Returns the plain settings that loggers get, once the data module is set up.

    Attributes:
        clock: Measures the steps.
        end: Ends training on all ranks after a signal.
        early_stop: Records why training stopped early.
        last: Keeps the checkpoints.
        snapshots: Keeps the models of the last epochs; None if there is no more than one.
        in_order: All callbacks.

    Raises:
        ConfigError: A callback of `conf/callbacks` cannot be used, or its settings are wrong.
    """

    def __init__(
        self,
        recipe: Train,
        job_dir: Path,
        resumed: Resumed | None,
        schema: Schema,
        *,
        bar: bool,
        logging: bool,
        settings: Callable[[], Mapping[str, Any]],
    ) -> None:
        checkpoints = recipe.checkpoints_in(job_dir)
        callbacks = build_callbacks(recipe, checkpoints, logging=logging)
        self.clock = StepClock(job_dir)
        self.early_stop = NoteEarlyStop()
        follows = recipe.dataset.follow
        self.last = KeepLast(checkpoints, each_epoch=follows)
        self.end = EndTogether(self.last.keep_unvalidated, recipe.launch.grace)
        self.snapshots = (
            KeepSnapshots(checkpoints, recipe.snapshots) if recipe.snapshots > 1 else None
        )
        every = recipe.trainer.log_every_n_steps
        progress = TQDMProgressBar(every) if bar else ProgressLines(every)
        self.in_order: list[Callback] = [
            ClaimDirectory(job_dir, recipe.built_task.known_measures, checkpoints),
            KeepPosition(),
            *([MeasureFiles(self.clock)] if follows else []),
            *(
                [
                    changed_optimizer(
                        resumed.manifest.config.get("optimizer"), to_plain(recipe.optimizer)
                    ),
                    resumed.changed_callbacks(checkpoints),
                ]
                if resumed
                else [FillTables(recipe.tables.values or {})]
            ),
            self.clock,
            LogDynamicRows(),
            LogSettings(settings),
            *average_of(recipe),
            self.end,
            StartReport(
                recipe.seed,
                recipe.format == "text",
                dense_columns=len(schema.numbers),
                features=schema.features,
            ),
            *([] if has_bar(callbacks) else [progress]),
            self.early_stop,
            *callbacks,
            self.last,
            *([self.snapshots] if self.snapshots else []),
        ]


def metrics_of_run(
    recipe: Train, trainer: Trainer, callbacks: RunCallbacks, stopped: str | None
) -> dict[str, Any]:
    """Return the content of `metrics.json`: the validation metrics of the checkpoint that the
    summary names, and the costs of a step over all ranks.

    This is a collective call. Ranks other than 0 return an empty dict.

    Args:
        recipe: The recipe of the run.
        trainer: The trainer of the run.
        callbacks: The callbacks of the run, which measured the steps and kept the checkpoints.
        stopped: The reason why training ended early, or None.
    """
    strategy = strategy_of(trainer)
    measured = callbacks.clock.summary()
    sent = strategy.comm.all_gather(measured.get("bytes_sent_per_step", 0.0))
    cpu = sum(strategy.comm.all_gather(measured.get("cpu_seconds_per_sample", 0.0)))
    waits = [
        strategy.comm.all_gather(measured.get(name))
        for name in ("input_wait_ms", "exchange_wait_ms")
    ]
    shares = strategy.comm.all_gather(strategy.hidden_share() if strategy.comm.world > 1 else {})
    changed = strategy.comm.all_gather(
        sum(n for c in strategy.sharded_tables() for n in c.state.id_rules.changed.values())
    )
    if strategy.comm.rank:
        return {}
    data = datamodule_of(trainer)
    assert strategy.plan is not None
    best = callbacks.last.best_or_last(trainer)
    manifest = read_manifest(best)
    tables = [t for c in strategy.sharded_tables() for t in c.tables()]
    averaged = any(shared.keeps_average for shared in strategy.sharded_tables())
    bytes_by_rank = [
        r.total for r in bytes_per_rank(tables, strategy.plan, strategy.rule, averaged)
    ]
    description = about(
        recipe.dataset,
        recipe.model.target,
        recipe.trainer.precision,
        rows=data.rows,
        rows_read=data.rows_read(),
        hosts=[rank["host"] for rank in strategy.ranks],
        tables=tables,
        device=strategy.ranks[0]["device"],
    )
    return manifest.metrics | {
        "samples_per_second": measured.get("samples_per_second"),
        "samples_per_cpu_second": 1 / cpu if cpu else None,
        "step_ms": measured.get("step_ms"),
        "step_ms_quartiles": measured.get("step_ms_quartiles"),
        "train_seconds": measured.get("train_seconds"),
        **callbacks.clock.start,
        "steps": trainer.global_step,
        "steps_planned": steps_planned(trainer),
        "ranks": strategy.comm.world,
        "plan": strategy.plan.name,
        "checkpoint": best,
        "checkpoint_step": manifest.step,
        "stopped": stopped,
        "run": manifest.run,
        "seed": recipe.seed,
        "bytes_per_rank": max(bytes_by_rank),
        "bytes_by_rank": bytes_by_rank,
        "bytes_exchanged_per_step": sum(sent),
        "collectives_per_step": measured.get("collectives_per_step"),
        "input_wait_ms": None if None in waits[0] else mean(waits[0]),
        "exchange_wait_ms": None if None in waits[1] else mean(waits[1]),
        "ids_changed": sum(changed),
        **{f"hidden_share_{phase}": mean(rank[phase] for rank in shares) for phase in shares[0]},
        **description,
        **({"files_trained": data.trained()} if isinstance(data, FollowedData) else {}),
        "dense_parameters": dense_weights(strategy.problem.dense) if strategy.problem else None,
        "status": "ok",
    }


def write_prediction(
    recipe: Train, strategy: EmbeddingShardingStrategy, val_rows: int, job_dir: Path
) -> None:
    """Write the planner's prediction for this plan next to the measurements, on rank 0."""
    if strategy.problem is not None and strategy.plan is not None and strategy.sharded_tables():
        problem = problem_of_run(recipe, strategy.problem, val_rows=val_rows)
        write_record(
            explained(strategy.plan, problem, alternatives=False), job_dir / PREDICTED_FILE
        )
