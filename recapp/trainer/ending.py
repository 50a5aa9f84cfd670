"""Ends a run before its time, on all ranks at the same step: after a signal, or when a loss is not
finite.

A rank tells what it knows in the header of the counts message of its next batch, so all ranks hear
it with the counts, and no message is added. With look-ahead that is one step later on the CPU; on a
GPU, where a loss is read a step late, two.

    a signal, on any rank     checkpoint, then `Stopped` on all ranks; no validation, which may take
                              longer than whoever stops us waits
    a loss that is nan        `TrainingError` on all ranks, with the rank and the step; nothing is
                              saved
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from recapp.errors import TrainingError
from recapp.processes import stopping
from recapp.processes.stopping import Stopped
from recapp.trainer.finite import LossWatch
from recapp.trainer.strategy import EmbeddingShardingStrategy

# of what a rank tells: the signal it got; above them the step whose loss was not finite
SIGNAL_BITS = 8


class EndTogether(Callback):
    """Agrees with the other ranks to end, and ends. It stands before callbacks that save.

    Args:
        save: writes a checkpoint of the state as it is; called on all ranks.
        grace: seconds that a checkpoint under way has after a signal.

    `said` is when and why a signal has ended training; None where it has not.
    """

    def __init__(
        self, save: Callable[[Trainer], None], grace: float = stopping.GRACE_SECONDS
    ) -> None:
        self.save = save
        self.grace = grace
        self.said: str | None = None
        self._losses = LossWatch()
        self._told = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on a signal asks. An earlier one ends this rank, as there is nothing to
        save.
        """
        self._losses = LossWatch()
        self._told = 0
        self.said = None
        self._tell(trainer, 0)
        stopping.listen(lambda number: self._tell(trainer, number), self.grace)

    def _tell(self, trainer: Trainer, what: int) -> None:
        """At once: the next counts to leave are those of a batch that is looked ahead to."""
        self._told |= what
        for collection in _strategy(trainer).collections():
            collection.header.wanted = self._told

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the loss, hear the others, end."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._losses.see(trainer.global_step, loss if isinstance(loss, Tensor) else None)
        self._tell(trainer, self._losses.step << SIGNAL_BITS)
        told_W = self._heard(trainer)
        self._refuse(trainer, told_W)
        self._stop(trainer, told_W)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A model whose loss was not finite is not validated."""
        self._settle(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Validation in between is not finished where a signal asks to stop."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._stop(trainer, self._heard(trainer))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Nothing is saved after a loss that was not finite."""
        self._settle(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Where this process was no rank before, signals mean what they did."""
        stopping.stop_listening()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """As after a run that has ended."""
        stopping.stop_listening()

    def _heard(self, trainer: Trainer) -> list[int]:
        """What each rank has told. Models without tables exchange no counts, so they ask."""
        strategy = _strategy(trainer)
        told_CW = [c.header.wanted_W for c in strategy.collections() if c.header.wanted_W]
        if not strategy.collections():
            return strategy.comm.all_gather(self._told)
        return [reduce(or_, told_C) for told_C in zip(*told_CW, strict=True)]

    def _settle(self, trainer: Trainer) -> None:
        """Before what takes all ranks a while anyway: hear of the last steps, whose counts nobody
        has.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._losses.settle()
        self._told |= self._losses.step << SIGNAL_BITS
        self._refuse(trainer, _strategy(trainer).comm.all_gather(self._told))

    def _refuse(self, trainer: Trainer, told_W: Sequence[int]) -> None:
        found = [
            (told >> SIGNAL_BITS, rank) for rank, told in enumerate(told_W) if told >> SIGNAL_BITS
        ]
        if found:
            step, rank = min(found)
            raise TrainingError(
                f"the loss of step {step} is not a finite number on rank {rank}: {_advice(trainer)}"
            )

    def _stop(self, trainer: Trainer, told_W: Sequence[int]) -> None:
        found = [(rank, told & (1 << SIGNAL_BITS) - 1) for rank, told in enumerate(told_W)]
        signals = [(rank, number) for rank, number in found if number]
        if not signals:
            return
        strategy = _strategy(trainer)
        strategy.on_train_end()
        for name in [name for name in trainer.callback_metrics if name.startswith("val_")]:
            del trainer.callback_metrics[name]  # of an earlier state: this one was not validated
        self.save(trainer)
        stopped = Stopped(signals[0][1])
        ranks = [str(rank) for rank, _ in signals]
        whose = "" if len(ranks) == strategy.comm.world else f" to rank {', '.join(ranks)}"
        self.said = f"step {trainer.global_step}: {stopped}{whose}"
        raise stopped


def _strategy(trainer: Trainer) -> EmbeddingShardingStrategy:
    assert isinstance(trainer.strategy, EmbeddingShardingStrategy)
    return trainer.strategy


def _advice(trainer: Trainer) -> str:
    """What to try: the rates, the highest first, and the data."""
    groups = sorted(trainer.optimizers[0].param_groups, key=lambda group: -group["lr"])
    rates = dict.fromkeys(
        f"optimizer.{str(group.get('name', 'dense')).partition('/')[0]}.lr (now {group['lr']:g})"
        for group in groups
    )
    return (
        f"lower the learning rates, {', '.join(rates)}, or look at the numbers of that batch (a "
        "dense column that is huge: "
        "dataset.dense_transform=log1p); nothing was saved since"
    )
