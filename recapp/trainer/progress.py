"""How far a run is, told while it runs: on a terminal one line that moves, elsewhere a line every
so many steps.

    epoch 1 ━━━━━━━━━━━━━━ 120/167 0:00:03 loss 0.4226 AUC 0.7503 13,556 samples/s
    step 120/167, 0.94 s for 20 steps, loss 0.4226, lr 0.001, auc 0.7503

Both fit 80 columns. Steps are those of the whole run; loss and AUC are rank 0's own, because no
step is to wait for another rank to tell them. Loss is the mean since loggers last wrote. AUC is the
epoch's so far, up to this step. Both say what each validation found.
"""

import math
import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
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
from recapp.trainer.callbacks import StepClock
from recapp.trainer.module import ClickModule

FALL = 0.005  # of AUC: seeds of one setting differ by up to .004
# a loss is read off its device, which waits for it, and an AUC takes 3 ms
SECONDS_BETWEEN_READINGS = 0.5


class MovingLine(Callback):
    """A progress bar for terminals, on standard error.

    Args:
        clock: measures the steps; None where nothing trains.
    """

    def __init__(self, clock: StepClock | None = None) -> None:
        self._clock = clock
        self._next_reading = 0.0
        said = TextColumn("{task.fields[said]}", markup=False)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            said,
            console=Console(stderr=True),
            expand=True,
        )
        self._training: TaskID | None = None
        self._validation: TaskID | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The line appears; after a resume it starts where training does."""
        if trainer.is_global_zero:
            self._training = self._bar.add_task(
                "epoch 1", total=steps_planned(trainer), completed=trainer.global_step, said=""
            )
            self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """One step more; the numbers from time to time."""
        if self._training is None:
            return
        self._bar.update(
            self._training,
            completed=trainer.global_step,
            description=f"epoch {trainer.current_epoch + 1}",
        )
        if (now := time.monotonic()) >= self._next_reading:
            self._next_reading = now + SECONDS_BETWEEN_READINGS
            self._say(trainer, pl_module)

    def _say(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._training is not None:
            numbers = _loss_and_auc(trainer, pl_module)
            rate = self._clock.recent_rate() if self._clock else 0.0
            said = " ".join(
                [
                    *(f"{title} {value:.4f}" for title, value in numbers.items()),
                    f"{rate:,.0f} samples/s",
                ]
            )
            self._bar.update(self._training, said=said)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A second line while validation lasts."""
        if trainer.is_global_zero:
            self._validation = self._bar.add_task(
                "validation", total=_batches(trainer.num_val_batches), said=""
            )
            self._bar.start()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """One batch more."""
        if self._validation is not None:
            self._bar.advance(self._validation)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where training goes on, only what was found stays."""
        if self._validation is not None and trainer.state.fn == TrainerFn.FITTING:
            self._bar.remove_task(self._validation)
            self._bar.console.print(validated(trainer), highlight=False)
        elif self._validation is not None:
            self._bar.stop()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        if trainer.is_global_zero:
            self._validation = self._bar.add_task(
                "test", total=_batches(trainer.num_test_batches), said=""
            )
            self._bar.start()

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """As validation."""
        self.on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As validation."""
        self.on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The line stays as it ended."""
        self._say(trainer, pl_module)
        self._bar.stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The error is told below the line."""
        self._bar.stop()


class PlainLines(Callback):
    """Lines on standard error where it is no terminal: step, seconds of the last n steps, loss, lr.

    Args:
        every: steps between two lines.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._since = 0.0
        self._first = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Time begins."""
        self._since = time.perf_counter()
        self._first = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A line every so many steps."""
        if trainer.global_step % self.every == 0 and trainer.is_global_zero:
            now = time.perf_counter()
            loss, *auc = (
                f"{title.lower()} {value:.4f}"
                for title, value in _loss_and_auc(trainer, pl_module).items()
            )
            parts = [
                _step(trainer),
                f"{now - self._since:.2f} s for {trainer.global_step - self._first} steps",
                loss,
                f"lr {trainer.optimizers[0].param_groups[0]['lr']:.3g}",
                *auc,
            ]
            print(", ".join(parts), file=sys.stderr, flush=True)
            self._since = now
            self._first = trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What was found; the time it took is no part of the next steps'."""
        if trainer.state.fn == TrainerFn.FITTING and trainer.is_global_zero:
            print(validated(trainer), file=sys.stderr, flush=True)
            self._since = time.perf_counter()
            self._first = trainer.global_step


class TellFall(Callback):
    """Says so when validation gets worse while training goes on: a second epoch costs about .02 AUC
    on Criteo's logs.

    The best so far is in the checkpoint, so a fall after going on is told as well.
    """

    def __init__(self) -> None:
        self._best = -math.inf

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare with the best so far."""
        auc = float(trainer.callback_metrics.get("val_auc", math.nan))
        if (
            trainer.state.fn == TrainerFn.FITTING
            and trainer.is_global_zero
            and auc < self._best - FALL
        ):
            advice = (
                ""
                if trainer.early_stopping_callbacks
                else ", and callbacks=early_stopping stops in time"
            )
            note(
                f"validation AUC fell from {self._best:.4f} to {auc:.4f}: training longer on the "
                "same rows overfits; the best "
                f"checkpoint is kept{advice}"
            )
        self._best = max(self._best, auc) if auc == auc else self._best

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"best": self._best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the checkpoint."""
        self._best = float(state_dict["best"])


class TellStop(Callback):
    """Says why and when early stopping has ended a run; `said` is the same for the summary, None
    where it has not.
    """

    def __init__(self) -> None:
        self.said: str | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What a checkpoint tells of an earlier stop is over."""
        for stopping in _early_stopping(trainer):
            stopping.stopping_reason_message = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that would have ended here anyway was not stopped."""
        reasons = [
            stopping.stopping_reason_message
            for stopping in _early_stopping(trainer)
            if stopping.stopping_reason_message
        ]
        if reasons and trainer.global_step != steps_planned(trainer):
            self.said = (
                f"{_step(trainer)}: {reasons[0].removesuffix(' Signaling Trainer to stop.')}"
            )
            if trainer.is_global_zero:
                note(f"stopped early at {self.said}")


def _early_stopping(trainer: Trainer) -> list[EarlyStopping]:
    return [
        callback
        for callback in trainer.early_stopping_callbacks
        if isinstance(callback, EarlyStopping)
    ]


def _loss_and_auc(trainer: Trainer, module: LightningModule) -> dict[str, float]:
    """Of the step that has just ended."""
    auc = module.train_auc() if isinstance(module, ClickModule) else None
    return {"loss": float(trainer.callback_metrics["train_loss"])} | (
        {} if auc is None else {"AUC": auc}
    )


def validated(trainer: Trainer) -> str:
    """What a validation found, in one line."""
    titles = {"val_auc": "AUC", "val_log_loss": "log loss"}
    found = [
        f"{title} {float(trainer.callback_metrics[name]):.4f}"
        for name, title in titles.items()
        if name in trainer.callback_metrics
    ]
    return f"{_step(trainer)}, validation: {', '.join(found)}"


def _step(trainer: Trainer) -> str:
    total = steps_planned(trainer)
    return f"step {trainer.global_step}" + (f"/{total}" if total else "")


def steps_planned(trainer: Trainer) -> int | None:
    """After how many steps training ends, unless something stops it; None where nothing says so."""
    total = trainer.estimated_stepping_batches
    return int(total) if math.isfinite(total) else None


def _batches(counts: int | float | list[int | float]) -> int | None:
    total = sum(counts) if isinstance(counts, list) else counts
    return int(total) if math.isfinite(total) else None
