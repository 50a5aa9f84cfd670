"""Lines of progress as HugeCTR prints them, for programs and scripts that read its log:

    [HCTR][14:35:10.123][INFO][RK0][main]: Iter: 100 Time(100 iters): 8.120000s Loss: 0.140830 lr:..
    [HCTR][14:35:12.456][INFO][RK0][main]: Evaluation, AverageLoss: 0.138196
    [HCTR][14:35:12.457][INFO][RK0][main]: Eval Time for 70 iters: 2.333000s

The loss is the mean over the whole batch of that iteration, the rate that of the next one. The
time of evaluations and checkpoints is no part of that of iterations.
"""

import time
from datetime import datetime
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from recapp.sparse.batch import Batch
from recapp.trainer.data_protocols import KeepsPosition, datamodule_of
from recapp.trainer.module import measures_of
from recapp.trainer.strategy import EmbeddingShardingStrategy

NAMES = {"log loss": "AverageLoss"}
"""HugeCTR's name of a metric, by its title, where it has another one."""


class IterationLines(ProgressBar):
    """Prints a line every few iterations, and the metrics of each evaluation, on standard output.

    Args:
        every: The iterations between two lines; 0 prints none.
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
        """Print lines, as at the start."""

    def disable(self) -> None:
        """Do nothing: Lightning silences bars of other ranks, whose lines are not printed."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began = time.perf_counter()
        self._first = trainer.global_step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock again after an evaluation."""
        if self._since is None:
            self._since = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Print a line every `every` iterations; all ranks send their losses then."""
        if not self.every or trainer.global_step % self.every:
            return
        strategy = trainer.strategy
        assert isinstance(strategy, EmbeddingShardingStrategy)
        losses = strategy.comm.all_gather((float(outputs["loss"]) * batch.rows, batch.rows))
        loss = sum(part for part, _ in losses) / max(sum(rows for _, rows in losses), 1)
        seconds = self._stopped()
        self._since = time.perf_counter()
        self._seconds = 0.0
        done = trainer.global_step - self._first
        self._first = trainer.global_step
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        _line(
            trainer,
            f"Iter: {trainer.global_step} Time({done} iters): {seconds:.6f}s Loss: {loss:.6f} "
            f"lr:{rate:.6f}",
        )

    def _stopped(self) -> float:
        """Return the seconds of iterations since the last line."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._seconds + running

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock of iterations, and start that of the evaluation."""
        self._seconds = self._stopped()
        self._since = None
        self._evaluation = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what the evaluation measured."""
        seconds = time.perf_counter() - self._evaluation
        for measure in measures_of(pl_module):
            if measure.shown and measure.of_validation in trainer.callback_metrics:
                value = float(trainer.callback_metrics[measure.of_validation])
                title = NAMES.get(measure.title, measure.title)
                _line(trainer, f"Evaluation, {title}: {value:.6f}")
        if trainer.state.fn == TrainerFn.FITTING:
            batches = int(sum(trainer.num_val_batches))
            _line(trainer, f"Eval Time for {batches} iters: {seconds:.6f}s")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print how long all of it took."""
        data = datamodule_of(trainer)
        assert isinstance(data, KeepsPosition)
        seconds = time.perf_counter() - self._began
        _line(
            trainer,
            f"Finish {trainer.global_step} iterations with batchsize: {data.batch_size} in "
            f"{seconds:.2f}s.",
        )


def _line(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        now = datetime.now().strftime("%H:%M:%S.%f")[:-3]
        print(f"[HCTR][{now}][INFO][RK0][main]: {text}", flush=True)
