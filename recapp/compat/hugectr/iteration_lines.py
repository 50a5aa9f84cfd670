"""Progress lines in HugeCTR's format, for programs and scripts that read HugeCTR's log:

    [HCTR][14:35:10.123][INFO][RK0][main]: Iter: 100 Time(100 iters): 8.120000s Loss: 0.140830 lr:..
    [HCTR][14:35:12.456][INFO][RK0][main]: Evaluation, AverageLoss: 0.138196
    [HCTR][14:35:12.457][INFO][RK0][main]: Eval Time for 70 iters: 2.333000s

The loss is the mean over the global batch of the printed iteration. The learning rate is the rate
of the next iteration. The time of iterations excludes evaluations and checkpoints.
"""

import time
from datetime import datetime
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.trainer.data_protocols import datamodule_of
from recapp.trainer.lightnings_parts import ends_step
from recapp.trainer.module import measures_of
from recapp.trainer.strategy import strategy_of

NAMES = {"log loss": "AverageLoss"}
"""HugeCTR's names of metrics by recapp's title, for metrics with another name there."""


class IterationLines(ProgressBar):
    """Prints a line every few iterations, and the metrics of each evaluation, on standard output.

    Args:
        every: The number of iterations between two lines; 0 prints no lines of iterations.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every
        self._began = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        self._first = 0
        self._evaluation = 0.0

    def enable(self) -> None:
        """Do nothing: lines are always printed."""

    def disable(self) -> None:
        """Do nothing: Lightning disables the bars of ranks other than 0, and they print no lines
        anyway.
        """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()
        self._first = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        done = batch_idx + 1
        if not self.every or trainer.global_step % self.every or not ends_step(trainer, done):
            return
        # every rank gives its losses
        losses = strategy_of(trainer).comm.all_gather(
            (float(outputs["loss"]) * batch.rows, batch.rows)
        )
        loss = sum(part for part, _ in losses) / max(sum(rows for _, rows in losses), 1)
        seconds = self._stopped()
        self._since = time.perf_counter()
        self._seconds = 0.0
        iterations = trainer.global_step - self._first
        self._first = trainer.global_step
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        _line(
            trainer,
            f"Iter: {trainer.global_step} Time({iterations} iters): {seconds:.6f}s "
            f"Loss: {loss:.6f} lr:{rate:.6f}",
        )

    def _stopped(self) -> float:
        """Return the seconds of iterations since the last line."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._seconds + running

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seconds = self._stopped()
        self._since = None
        self._evaluation = time.perf_counter()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = time.perf_counter() - self._evaluation
        for measure in measures_of(pl_module):
            if measure.shown and measure.of_validation in trainer.callback_metrics:
                value = float(trainer.callback_metrics[measure.of_validation])
                title = NAMES.get(measure.title, measure.title)
                _line(trainer, f"Evaluation, {title}: {value:.6f}")
        if trainer.state.fn == TrainerFn.FITTING:
            batches = int(sum(trainer.num_val_batches))
            _line(trainer, f"Eval Time for {batches} iters: {seconds:.6f}s")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = time.perf_counter() - self._began
        _line(
            trainer,
            f"Finish {trainer.global_step} iterations with batchsize: "
            f"{datamodule_of(trainer).batch_size} in {seconds:.2f}s.",
        )


def _line(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        now = datetime.now().strftime("%H:%M:%S.%f")[:-3]
        print(f"[HCTR][{now}][INFO][RK0][main]: {text}", flush=True)
