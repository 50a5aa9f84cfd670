"""The callbacks of a training run, in the order in which Lightning calls them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from recapp.dataset.schema import Schema
from recapp.run.lightning_trainer import average_of, build_callbacks, has_bar
from recapp.run.recipe import Train
from recapp.run.resume import Resumed
from recapp.trainer.callbacks import (
    ClaimDirectory,
    KeepPosition,
    LogDynamicRows,
    LogRate,
    RecordPerformance,
    StartReport,
    StepClock,
)
from recapp.trainer.ending import EndTogether
from recapp.trainer.fill_tables import FillTables
from recapp.trainer.keep_last import KeepLast
from recapp.trainer.keep_snapshots import KeepSnapshots
from recapp.trainer.log_settings import LogSettings
from recapp.trainer.progress import NoteEarlyStop, NoteFall, ProgressLines, TerminalProgress


class RunCallbacks:
    """The callbacks of a training run: recapp's own and those of `conf/callbacks`.

    Args:
        recipe: The recipe of the run.
        job_dir: The directory of the run.
        resumed: The run if it resumes from a checkpoint, else None.
        schema: The columns of the data set.
        bar: Whether to show recapp's progress bar instead of lines, unless `conf/callbacks` has a
            bar.
        logging: Whether there is a logger.
        settings: Returns the plain settings that loggers get, once the data module is set up.

    Attributes:
        clock: Measures the steps.
        performance: Records the costs of a step.
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
        checkpoints = job_dir / "checkpoints"
        chosen = build_callbacks(recipe, checkpoints, logging=logging)
        self.clock = StepClock()
        self.performance = RecordPerformance(job_dir, self.clock)
        self.early_stop = NoteEarlyStop()
        self.last = KeepLast(checkpoints)
        self.end = EndTogether(self.last.keep_unvalidated, recipe.launch.grace)
        self.snapshots = (
            KeepSnapshots(checkpoints, recipe.snapshots) if recipe.snapshots > 1 else None
        )
        progress = (
            TerminalProgress(self.clock) if bar else ProgressLines(recipe.trainer.log_every_n_steps)
        )
        self.in_order: list[Callback] = [
            ClaimDirectory(job_dir, recipe.built_task.known_measures),
            KeepPosition(),
            *(
                [resumed.changed_optimizer, resumed.changed_callbacks(checkpoints)]
                if resumed
                else [FillTables(recipe.tables.values or {})]
            ),
            self.clock,
            self.performance,
            LogRate(self.clock),
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
            *([] if has_bar(chosen) else [progress]),
            NoteFall(),
            self.early_stop,
            *chosen,
            self.last,
            *([self.snapshots] if self.snapshots else []),
        ]
