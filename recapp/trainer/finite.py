"""Checks whether the losses of training are finite, without making a GPU wait.

On the CPU a loss is read when its step ends. On a GPU a loss is copied to the host while queued
work runs, and is read after the next step has been queued. The host waits for the copy only if the
host is more than one step ahead, and then the GPU still has one step to run.
"""

import math
from typing import Any

import torch
from torch import Tensor


class LossWatch:
    """A check of the loss of every step of this rank.

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
