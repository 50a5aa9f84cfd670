"""What TorchRec's pipelines ask of a batch. Here any batch with `to` will do, so these classes are
only a form that a program's own batches may follow.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch


class Multistreamable(ABC):
    """A batch whose memory another stream may use."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work that `stream` has queued by now is done."""


class Pipelineable(Multistreamable):
    """A batch that can be moved to a device ahead of its turn."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """Return the batch on a device."""
