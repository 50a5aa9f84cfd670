"""The numbers of a run while it trains: its curves as CSV, for any spreadsheet, its settings as
hyper-parameters of loggers, and its progress: a line every n steps where no terminal shows
Lightning's bar.

    epoch,lr-dense,step,train_auc,train_loss,val_auc
    0,0.001,19,,,
    0,,19,0.6612,0.5093,

A row is a logged step; a cell is empty if the step has no value of the metric. `train_loss` is the
mean over the steps since the previous row with a `train_loss`. `train_auc`, a running metric of the
task, is the AUC of the epoch so far.

    step 120/167, 0.94 s for 20 steps, loss 0.4226, lr 0.001, auc 0.7503

Steps count the whole run. Loss and running metrics are computed on rank 0's rows alone, because no
step waits for the numbers of another rank. The task chooses the metrics that are shown, and their
titles.
"""

import csv
import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from recapp.console import note
from recapp.optim.schedule import Plateau
from recapp.settings.records import leaves
from recapp.settings.whole_file import write_whole
from recapp.trainer.lightnings_parts import BatchCallback
from recapp.trainer.module import TaskModule, measures_of


class CSVCurves(Logger):
    """Writes `<save_dir>/csv/metrics.csv`.

    Lightning's own CSV logger deletes the file of an earlier run during set-up: before it is known
    whether the new run can start, and even if the new run resumes from a checkpoint of the same
    directory. This logger does not touch the file before its first write, and a resumed run keeps
    the rows of the steps before its checkpoint.

    Args:
        save_dir: The directory of the run.
        kept_steps: The step before which rows of an existing file are kept; 0 begins a new file.
    """

    name = "csv"
    version = ""  # a run has a directory of its own

    def __init__(self, save_dir: str, kept_steps: int = 0) -> None:
        super().__init__()
        self.file = Path(save_dir) / "csv" / "metrics.csv"
        self.kept_steps = kept_steps
        self._columns: list[str] = []  # empty before the first write
        self._unsaved: list[dict[str, Any]] = []

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._unsaved.append({**metrics, "step": step})

    def log_hyperparams(self, params: object, *args: object, **kwargs: object) -> None:
        """Do nothing, because `resolved.yaml` holds the settings."""

    @rank_zero_only
    def save(self) -> None:
        """Append the rows in memory to the file. If they have new columns, rewrite the file."""
        if not self._unsaved:
            return
        if self._columns and all(row.keys() <= set(self._columns) for row in self._unsaved):
            with open(self.file, "a", newline="") as file:
                csv.DictWriter(file, self._columns).writerows(self._unsaved)
        else:
            rows = [*self._rows(), *self._unsaved]
            self._columns = sorted({name for row in rows for name in row}.union(self._columns))
            text = StringIO(newline="")
            writer = csv.DictWriter(text, self._columns)
            writer.writeheader()
            writer.writerows(rows)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, text.getvalue())
        self._unsaved = []

    @override
    def finalize(self, status: str) -> None:
        if self._columns or status != "failed":
            self.save()

    def _rows(self) -> list[dict[str, Any]]:
        """Return the rows that stay in the file: those of this run, or before its checkpoint."""
        if not (self._columns or (self.kept_steps and self.file.is_file())):
            return []
        with open(self.file, newline="") as file:
            rows = list(csv.DictReader(file))
        return [row for row in rows if self._columns or int(row["step"]) < self.kept_steps]


# a resumed run has another `ckpt_path`, and services refuse another value of a setting
NOT_LOGGED = ("logger", "ckpt_path", "trust", "format", "choices")
CREDENTIALS = re.compile(r"(?i)key$|token|secret|passw|credential")
PLAIN_NAME = re.compile(r"\w[\w. -]*", re.ASCII)


@dataclass(eq=False)
class LogSettings(Callback):
    """Logs the settings of the run to every logger, as hyper-parameters with dotted names, and the
    chosen options by the names of their groups.

    Settings of loggers and those that look like credentials are left out.

    Args:
        settings: Returns the plain settings once the data module is set up.
    """

    settings: Callable[[], Mapping[str, Any]]

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not (trainer.loggers and trainer.is_global_zero):
            return
        plain = self.settings()
        # loggers may refuse the names in a mapping, such as names of columns
        logged = {
            name: value
            for name, value in leaves(
                plain, is_whole=lambda _, group: not all(map(PLAIN_NAME.fullmatch, group))
            )
            if name.partition(".")[0] not in NOT_LOGGED
            and not any(map(CREDENTIALS.search, name.split(".")))
        }
        logged |= plain["choices"]
        for logger in trainer.loggers:
            try:
                logger.log_hyperparams(logged)
            except Exception as error:  # of a service, such as a run that was logged with others
                text = " ".join(str(error).split())
                note(f"{type(logger).__name__}: does not take the settings of the run: {text}")


class ProgressLines(BatchCallback):
    """Prints lines on standard error: step, seconds of the last n steps, loss and running metrics,
    learning rate.

    Args:
        every: The number of steps between two lines.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._since = 0.0
        self._first = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()
        self._first = trainer.global_step

    @override
    def on_step(self, trainer: Trainer, done: int) -> None:
        if trainer.global_step % self.every == 0 and trainer.is_global_zero:
            now = time.perf_counter()
            module = trainer.lightning_module
            running = module.running() if isinstance(module, TaskModule) else {}
            titles = {measure.name: measure.title for measure in measures_of(module)}
            parts = [
                _step(trainer),
                f"{now - self._since:.2f} s for {trainer.global_step - self._first} steps",
                f"loss {float(trainer.callback_metrics['train_loss']):.4f}",
                f"lr {trainer.optimizers[0].param_groups[0]['lr']:.6g}",
                *(f"{titles[name].lower()} {value:.4f}" for name, value in running.items()),
            ]
            print(", ".join(parts), file=sys.stderr, flush=True)
            self._since = now
            self._first = trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the metrics of the validation. Restart the clock, so that the next line excludes
        the time of the validation.
        """
        if trainer.state.fn == TrainerFn.FITTING and trainer.is_global_zero:
            metrics = [
                f"{measure.title} {float(trainer.callback_metrics[measure.of_validation]):.4f}"
                for measure in measures_of(pl_module)
                if measure.shown and measure.of_validation in trainer.callback_metrics
            ]
            text = f"{_step(trainer)}, validation: {', '.join(metrics)}"
            print(text, file=sys.stderr, flush=True)
            self.on_train_start(trainer, pl_module)


class NoteEarlyStop(Callback):
    """Prints a note with the step and the reason if early stopping ends a run.

    `reason` is the same text for the summary; None if early stopping did not end the run.
    """

    reason: str | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the reason of an earlier stop, which the checkpoint has kept."""
        for stopping in trainer.early_stopping_callbacks:
            stopping.stopping_reason_message = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the reason, unless the run would have ended at this step anyway."""
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        reasons = [
            *(stopping.stopping_reason_message for stopping in trainer.early_stopping_callbacks),
            *(schedule.ends for schedule in schedules if isinstance(schedule, Plateau)),
        ]
        reason = next((text for text in reasons if text), None)
        if reason and trainer.global_step != steps_planned(trainer):
            self.reason = f"{_step(trainer)}: {reason.removesuffix(' Signaling Trainer to stop.')}"
            if trainer.is_global_zero:
                note(f"stopped early at {self.reason}")


def _step(trainer: Trainer) -> str:
    total = steps_planned(trainer)
    return f"step {trainer.global_step}" + (f"/{total}" if total else "")


def steps_planned(trainer: Trainer) -> int | None:
    """Return the step at which training ends if nothing stops it earlier; None if no limit is
    set. Lightning assumes that all epochs are as long as this one.
    """
    total = trainer.estimated_stepping_batches
    return int(total) if math.isfinite(total) else None
