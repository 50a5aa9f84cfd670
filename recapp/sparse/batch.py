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
from recapp.sparse.transfer import shipped

MISSING = -(2**63)
"""The id of a sample that has none for a single-valued feature. A table gives it row 0; a
multi-valued feature has an empty bag.
"""


@dataclass(slots=True)
class Batch:
    """Samples of one rank.

    Args:
        dense_BI: float32 [B, I].
        sparse: raw ids, stride B.
        labels_B: float32 [B].

    Raises:
        DataError: parts of different B.
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
        """Samples, B."""
        return len(self.labels_B)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same samples on a device; as with tensors the batch itself where they are there.

        `non_blocking` goes through page-locked memory on the way to a GPU: from any other the host
        would wait all the same.
        """
        device = torch.device(device)
        dense_BI, labels_B = (
            shipped(t, device) if non_blocking else t.to(device)
            for t in (self.dense_BI, self.labels_B)
        )
        sparse = self.sparse.to(device, non_blocking)
        same = dense_BI is self.dense_BI and labels_B is self.labels_B and sparse is self.sparse
        return self if same else Batch(dense_BI, sparse, labels_B)

    def pin_memory(self) -> "Batch":
        """The same samples in page-locked memory, from where copies to a GPU can be
        asynchronous.
        """
        return Batch(
            self.dense_BI.pin_memory(), self.sparse.pin_memory(), self.labels_B.pin_memory()
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work that `stream` has queued by now is done."""
        self.dense_BI.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels_B.record_stream(stream)
