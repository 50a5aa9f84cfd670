"""Whether the losses of training are finite numbers, without making a GPU wait.

On the CPU a loss is read when its step ends. On a GPU it is copied to the host beside the work that
is queued, and read when the next step has been queued behind it: the host waits for the copy only
where it is more than a step ahead, and the GPU still has a step to do.
"""

import math
from typing import Any

import torch
from torch import Tensor


class LossWatch:
    """A check of the loss of every step of this rank.

    `step` is the first step whose loss is not finite; 0 as long as there is none.
    """

    def __init__(self) -> None:
        self.step = 0
        # step, loss, the event of its arrival
        self._under_way: tuple[int, Tensor, Any] | None = None

    def check(self, step: int, loss: Tensor | None) -> None:
        """Check the loss of a step that has just been queued; on a GPU that of the step before.

        Args:
            step: The number of the step, from 1 on.
            loss: A scalar; None where the step has none.
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
