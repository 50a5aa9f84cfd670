"""The progress of a run: on a terminal a progress bar, elsewhere a line every n steps.

    epoch 1 ━━━━━━━━━━━━━━ 120/167 0:00:03 loss 0.4226 AUC 0.7503 13,556 samples/s
    step 120/167, 0.94 s for 20 steps, loss 0.4226, lr 0.001, auc 0.7503

Both fit 80 columns. Steps count the whole run. Loss and running metrics are computed on rank 0's
rows alone, because no step waits for the numbers of another rank. The loss is the mean since the
last write of the loggers; a running metric, such as the AUC of clicks, covers the epoch up to this
step. Both print the metrics of each validation. The task chooses the metrics that are shown, and
their titles.
"""

import math
import sys
import time

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from recapp.console import note
from recapp.optim.schedule import Plateau
from recapp.trainer.batch_callback import BatchCallback
from recapp.trainer.callbacks import StepClock
from recapp.trainer.data_protocols import KeepsPosition, datamodule_of
from recapp.trainer.module import TaskModule, measures_of

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

    def on_batch(self, trainer: Trainer, done: int) -> None:
        """Advance the second bar by a batch."""
        if self._validation is not None:
            self._bar.advance(self._validation)

    def _show_numbers(self, trainer: Trainer) -> None:
        if self._training is not None:
            rate = self._clock.recent_rate() if self._clock else 0.0
            numbers = _loss_and_running(trainer)
            texts = [*(f"{title} {value:.4f}" for title, value in numbers.items())]
            self._bar.update(self._training, numbers=" ".join([*texts, f"{rate:,.0f} samples/s"]))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show a second bar during validation."""
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

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show a bar for the test rows."""
        self._begin(trainer, "test", trainer.num_test_batches)

    on_test_end = on_validation_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the last numbers, and stop the bar."""
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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._since = time.perf_counter()
        self._first = trainer.global_step

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Print a line every `every` steps."""
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
