"""A batch of click logs as it leaves the data set, on its way to a model.

    dense_BI   float32 [B, I]          transformed numbers, no gaps
    sparse     KeyedJaggedTensor       raw ids as the logs have them; B bags per feature
    labels_B   float32 [B]             0 or 1

It moves as one: to a device, into page-locked memory, along with a stream. B may be 0: ranks pad
evaluation with empty batches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recapp.errors import DataError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.transfer import copy_to_device

MISSING = -(2**63)
"""The id of a sample that has none for a single-valued feature.

A table gives it row 0. A multi-valued feature has an empty bag instead.
"""


@dataclass(slots=True)
class Batch:
    """Samples of one rank.

    Args:
        dense_BI: Transformed numbers, float32 [B, I].
        sparse: Raw ids, of stride B.
        labels_B: Labels, float32 [B].

    Raises:
        DataError: The parts have different B.
    """

    dense_BI: Tensor
    sparse: KeyedJaggedTensor
    labels_B: Tensor

    def __post_init__(self) -> None:
        if not len(self.dense_BI) == self.sparse.stride() == len(self.labels_B):
            raise DataError(
                f"a batch of {len(self.dense_BI)} dense rows, {self.sparse.stride()} bags per "
                f"feature and {len(self.labels_B)} labels: all three are counted in samples"
            )

    @property
    def rows(self) -> int:
        """The number of samples, B."""
        return len(self.labels_B)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Return the samples on a device.

        As with tensors, that is the batch itself where they are there already.

        Args:
            device: The device.
            non_blocking: Whether to copy through page-locked memory on the way to a GPU, so that
                the host does not wait.
        """
        device = torch.device(device)
        dense_BI, labels_B = (
            copy_to_device(t, device) if non_blocking else t.to(device)
            for t in (self.dense_BI, self.labels_B)
        )
        sparse = self.sparse.to(device, non_blocking)
        same = dense_BI is self.dense_BI and labels_B is self.labels_B and sparse is self.sparse
        return self if same else Batch(dense_BI, sparse, labels_B)

    def pin_memory(self) -> "Batch":
        """Return the samples in page-locked memory, from which copies to a GPU need not wait."""
        return Batch(
            self.dense_BI.pin_memory(), self.sparse.pin_memory(), self.labels_B.pin_memory()
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work that `stream` has queued by now is done."""
        self.dense_BI.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels_B.record_stream(stream)
