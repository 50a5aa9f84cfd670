"""Ends a run early, on all ranks at the same step: after a signal, or when a loss is not finite.

A rank puts its report (its signal, the step of a loss that is not finite) into the header of the
counts message of its next batch. All ranks get the report with the counts, without an additional
message. With look-ahead they get it one step later on the CPU, and two steps later on a GPU,
because a GPU's loss is read one step late.

    a signal, on any rank     checkpoint, then `Stopped` on all ranks; no validation, because a
                              validation may take longer than the scheduler waits for the run's end
    a loss that is nan        `TrainingError` on all ranks, with the rank and the step; nothing is
                              saved
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from recapp.errors import TrainingError
from recapp.processes import stopping
from recapp.processes.stopping import Stopped
from recapp.trainer.lightnings_parts import BatchCallback, ends_step
from recapp.trainer.strategy import strategy_of

# low bits of a rank's report: the signal; higher bits: the first step whose loss was not finite
SIGNAL_BITS = 8


class LossWatch:
    """A check of the loss of every step of this rank, which makes no GPU wait.

    On the CPU a loss is read when its step ends. On a GPU a loss is copied to the host while queued
    work runs, and is read after the next step has been queued. The host waits for the copy only if
    the host is more than one step ahead, and then the GPU still has one step to run.

    `step` is the first step whose loss is not finite; 0 while all losses are finite.
    """

    def __init__(self) -> None:
        self.step = 0
        # the step, its loss, the event at the end of the copy
        self._under_way: tuple[int, Tensor, Any] | None = None

    def check(self, step: int, loss: Tensor | None) -> None:
        """Check the loss of a step that has just been queued; on a GPU check the loss of the step
        before.

        Args:
            step: The number of the step, from 1 on.
            loss: The scalar loss; None if the step has no loss.
        """
        self.check_pending()  # the step before this one
        if loss is None:
            return
        if loss.device.type != "cuda":
            self._judge(step, float(loss))
            return
        copy = torch.empty((), dtype=loss.dtype, pin_memory=True)
        copy.copy_(loss.detach(), non_blocking=True)
        arrived = torch.cuda.current_stream(loss.device).record_event()
        self._under_way = step, copy, arrived

    def check_pending(self) -> None:
        """Check the loss that is still being copied to the host, if there is one."""
        if self._under_way is not None:
            step, copy, arrived = self._under_way
            self._under_way = None
            arrived.synchronize()
            self._judge(step, float(copy))

    def _judge(self, step: int, loss: float) -> None:
        if not self.step and not math.isfinite(loss):
            self.step = step


class EndTogether(BatchCallback):
    """Ends training on all ranks at the same step. It must come before callbacks that save.

    `reason` is a text with the step and the signal that ended training; None if no signal did.

    Args:
        save: Writes a checkpoint of the current state, which has no validation; called on all
            ranks.
        grace: The seconds after a signal in which a checkpoint under way may finish.
    """

    def __init__(
        self, save: Callable[[Trainer], None], grace: float = stopping.GRACE_SECONDS
    ) -> None:
        self.save = save
        self.grace = grace
        self.reason: str | None = None
        self._losses = LossWatch()
        self._report = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report signals to the other ranks from now on.

        An earlier signal ends this rank alone, because there is nothing to save yet.
        """
        self._losses = LossWatch()
        self._report = 0
        self.reason = None
        self._add_to_report(trainer, 0)
        stopping.listen(lambda number: self._add_to_report(trainer, number), self.grace)

    def _add_to_report(self, trainer: Trainer, bits: int) -> None:
        """Set bits of this rank's report in the headers at once, because look-ahead sends the next
        counts before the next step.
        """
        self._report |= bits
        for shared in strategy_of(trainer).sharded_tables():
            shared.header.wanted = self._report

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check the loss, read the reports of all ranks, and end training after the step if one of
        them asks for the end.
        """
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        step = trainer.global_step + (not ends_step(trainer, batch_idx + 1))
        self._losses.check(step, loss if isinstance(loss, Tensor) else None)
        self._add_to_report(trainer, self._losses.step << SIGNAL_BITS)
        reports_W = self._reports_of_ranks(trainer)
        self._raise_if_not_finite(trainer, reports_W)
        if ends_step(trainer, batch_idx + 1):
            self._stop_after_signal(trainer, reports_W)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the model before a validation, so that whatever goes wrong there, on whichever rank,
        loses no trained step. The save refuses a loss, weights and states that are not finite.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            self.save(trainer)

    @override
    def on_batch(self, trainer: Trainer, done: int) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._stop_after_signal(trainer, self._reports_of_ranks(trainer))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to save a model whose loss was not finite: check on all ranks the losses of the
        last steps, whose reports no counts message has carried yet.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            self._losses.check_pending()
            self._report |= self._losses.step << SIGNAL_BITS
            self._raise_if_not_finite(trainer, strategy_of(trainer).comm.all_gather(self._report))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        stopping.stop_listening()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        stopping.stop_listening()

    def _reports_of_ranks(self, trainer: Trainer) -> list[int]:
        """Return the report of each rank.

        The reports came with the counts. A model without tables exchanges no counts, so its ranks
        gather the reports.
        """
        strategy = strategy_of(trainer)
        reports_CW = [c.header.wanted_W for c in strategy.sharded_tables() if c.header.wanted_W]
        if not strategy.sharded_tables():
            return strategy.comm.all_gather(self._report)
        return [reduce(or_, reports_C) for reports_C in zip(*reports_CW, strict=True)]

    def _raise_if_not_finite(self, trainer: Trainer, reports_W: Sequence[int]) -> None:
        steps = [
            (report >> SIGNAL_BITS, rank)
            for rank, report in enumerate(reports_W)
            if report >> SIGNAL_BITS
        ]
        if steps:
            step, rank = min(steps)
            groups = sorted(trainer.optimizers[0].param_groups, key=lambda group: -group["lr"])
            rates = dict.fromkeys(
                f"optimizer.{str(group.get('name', 'dense')).partition('/')[0]}.lr (now "
                f"{group['lr']:g})"
                for group in groups
            )
            raise TrainingError(
                f"the loss of step {step} is not a finite number on rank {rank}: lower the "
                f"learning rates, {', '.join(rates)}, or look at the numbers of that batch (a "
                "dense column that is huge: dataset.dense_transform=log1p); nothing was saved since"
            )

    def _stop_after_signal(self, trainer: Trainer, reports_W: Sequence[int]) -> None:
        numbers = [(rank, report & (1 << SIGNAL_BITS) - 1) for rank, report in enumerate(reports_W)]
        signals = [(rank, number) for rank, number in numbers if number]
        if not signals:
            return
        strategy = strategy_of(trainer)
        strategy.on_train_end()
        self.save(trainer)
        stopped = Stopped(signals[0][1])
        ranks = [str(rank) for rank, _ in signals]
        whose = "" if len(ranks) == strategy.comm.world else f" to rank {', '.join(ranks)}"
        self.reason = f"step {trainer.global_step}: {stopped}{whose}"
        raise stopped
