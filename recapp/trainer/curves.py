"""The numbers of a run while it trains: its curves as CSV, for any spreadsheet, its settings as
hyper-parameters of loggers, and its progress: on a terminal a bar, elsewhere a line every n steps.

    epoch,lr-dense,step,train_auc,train_loss,val_auc
    0,0.001,19,,,
    0,,19,0.6612,0.5093,

A row is a logged step; a cell is empty if the step has no value of the metric. `train_loss` is the
mean over the steps since the previous row with a `train_loss`. `train_auc`, a running metric of the
task, is the AUC of the epoch so far.

    epoch 1 ━━━━━━━━━━━━━━ 120/167 0:00:03 loss 0.4226 AUC 0.7503 13,556 samples/s
    step 120/167, 0.94 s for 20 steps, loss 0.4226, lr 0.001, auc 0.7503

Both fit 80 columns. Steps count the whole run. Loss and running metrics are computed on rank 0's
rows alone, because no step waits for the numbers of another rank. Both print the metrics of each
validation. The task chooses the metrics that are shown, and their titles.
"""

import csv
import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from typing_extensions import override

from recapp.console import note
from recapp.optim.schedule import Plateau
from recapp.reporting.run_record import write_whole
from recapp.settings.records import leaves
from recapp.trainer.callbacks import StepClock
from recapp.trainer.data_protocols import KeepsPosition, datamodule_of
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

    @property
    @override
    def log_dir(self) -> str:
        return str(self.file.parent)

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

    def finalize(self, status: str) -> None:
        """Save the last rows, unless the run failed before its first write."""
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


class LogSettings(Callback):
    """Logs the settings of the run to every logger, as hyper-parameters with dotted names, and the
    chosen options by the names of their groups.

    Settings of loggers and those that look like credentials are left out.

    Args:
        settings: Returns the plain settings once the data module is set up.
    """

    def __init__(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        self.settings = settings

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log the settings on rank 0. A logger that refuses them still gets the curves."""
        if not (trainer.loggers and trainer.is_global_zero):
            return
        plain = self.settings()
        logged = {
            name: value
            for name, value in leaves(plain, is_whole=_is_whole)
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


def _is_whole(name: str, settings: Mapping[str, Any]) -> bool:
    # loggers may refuse the names in a mapping, such as names of columns
    return not all(map(PLAIN_NAME.fullmatch, settings))


# to read a loss, the host waits for the device, and an AUC takes 3 ms
SECONDS_BETWEEN_READINGS = 0.5


class TerminalProgress(BatchCallback):
    """A progress bar for terminals, on standard error.

    Args:
        clock: The clock that measures the steps; None if the run does not train.
    """

    def __init__(self, clock: StepClock | None = None) -> None:
        self._clock = clock
        self._next_reading = 0.0
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=Console(stderr=True),
            expand=True,
        )
        self._training: TaskID | None = None
        self._validation: TaskID | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the bar; after a resume it starts at the completed steps."""
        if trainer.is_global_zero:
            self._training = self._bar.add_task(
                "epoch 1", total=steps_planned(trainer), completed=trainer.global_step, numbers=""
            )
            self._bar.start()

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Advance the bar by a step, and show the numbers at most twice a second."""
        if self._training is None:
            return
        self._bar.update(
            self._training,
            completed=trainer.global_step,
            total=steps_planned(trainer),
            description=f"epoch {trainer.current_epoch + 1}",
        )
        if (now := time.monotonic()) >= self._next_reading:
            self._next_reading = now + SECONDS_BETWEEN_READINGS
            self._show_numbers(trainer)

    @override
    def on_batch(self, trainer: Trainer, done: int) -> None:
        if self._validation is not None:
            self._bar.advance(self._validation)

    def _show_numbers(self, trainer: Trainer) -> None:
        if self._training is not None:
            rate = self._clock.recent_rate() if self._clock else 0.0
            texts = [f"{name} {value:.4f}" for name, value in _loss_and_running(trainer).items()]
            self._bar.update(self._training, numbers=" ".join([*texts, f"{rate:,.0f} samples/s"]))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, "validation", trainer.num_val_batches)

    def _begin(self, trainer: Trainer, name: str, batches: int | float | list[int | float]) -> None:
        if trainer.is_global_zero:
            total = sum(batches) if isinstance(batches, list) else batches
            known = int(total) if math.isfinite(total) else None
            self._validation = self._bar.add_task(name, total=known, numbers="")
            self._bar.start()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the second bar by a line with the metrics of the validation; outside training,
        stop the bar.
        """
        if self._validation is not None and trainer.state.fn == TrainerFn.FITTING:
            self._bar.remove_task(self._validation)
            self._bar.console.print(validated(trainer), highlight=False)
        elif self._validation is not None:
            self._bar.stop()

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, "test", trainer.num_test_batches)

    on_test_end = on_validation_end

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_numbers(trainer)
        self._bar.stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop the bar, so that the error is printed below it."""
        self._bar.stop()


class ProgressLines(BatchCallback):
    """Prints lines on standard error, if it is not a terminal: step, seconds of the last n steps,
    loss, learning rate.

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
            loss, *running = (
                f"{title.lower()} {value:.4f}"
                for title, value in _loss_and_running(trainer).items()
            )
            parts = [
                _step(trainer),
                f"{now - self._since:.2f} s for {trainer.global_step - self._first} steps",
                loss,
                f"lr {trainer.optimizers[0].param_groups[0]['lr']:.6g}",
                *running,
            ]
            print(", ".join(parts), file=sys.stderr, flush=True)
            self._since = now
            self._first = trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the metrics of the validation. Restart the clock, so that the next line excludes
        the time of the validation.
        """
        if trainer.state.fn == TrainerFn.FITTING and trainer.is_global_zero:
            print(validated(trainer), file=sys.stderr, flush=True)
            self.on_train_start(trainer, pl_module)


class NoteEarlyStop(Callback):
    """Prints a note with the step and the reason if early stopping ends a run.

    `reason` is the same text for the summary; None if early stopping did not end the run.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

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


def _loss_and_running(trainer: Trainer) -> dict[str, float]:
    """Return the loss since the last write of the loggers and the running metrics, by title."""
    module = trainer.lightning_module
    running = module.running() if isinstance(module, TaskModule) else {}
    titles = {measure.name: measure.title for measure in measures_of(module)}
    return {"loss": float(trainer.callback_metrics["train_loss"])} | {
        titles[name]: value for name, value in running.items()
    }


def validated(trainer: Trainer) -> str:
    """Return the metrics of a validation in one line of text."""
    measured = trainer.callback_metrics
    metrics = [
        f"{measure.title} {float(measured[measure.of_validation]):.4f}"
        for measure in measures_of(trainer.lightning_module)
        if measure.shown and measure.of_validation in measured
    ]
    return f"{_step(trainer)}, validation: {', '.join(metrics)}"


def _step(trainer: Trainer) -> str:
    total = steps_planned(trainer)
    return f"step {trainer.global_step}" + (f"/{total}" if total else "")


def steps_planned(trainer: Trainer) -> int | None:
    """Return the step at which training ends if nothing stops it earlier; None if no limit is set.

    Lightning assumes that all epochs are as long as this one, but files may be added between two
    epochs.
    """
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total):
        return None
    data = datamodule_of(trainer)
    epochs = trainer.max_epochs
    if isinstance(data, KeepsPosition) and epochs is not None and epochs >= 0:
        each = trainer.num_training_batches
        batches = trainer.accumulate_grad_batches
        left = math.ceil(max(each - data.position.batches, 0) / batches)
        left += math.ceil(each / batches) * (epochs - data.position.epoch - 1)
        total = trainer.global_step + left
        total = min(total, trainer.max_steps) if trainer.max_steps >= 0 else total
    return int(total)
