"""A batch of logs as it leaves the data set, on its way to a model.

    dense_BI   float32 [B, I]          transformed numbers, no gaps
    sparse     KeyedJaggedTensor       raw ids as the logs have them; B bags per feature
    labels     name -> float32 [B]     what the model learns; none where rows are only scored
    weights    name -> float32 [B]     how much a row counts in the loss of that label

It moves as one: to a device, into page-locked memory, along with a stream. B may be 0: ranks pad
evaluation with empty batches.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from recapp.errors import DataError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.transfer import copy_to_device

MISSING = -(2**63)
"""The id of a sample that has none for a single-valued feature.

A table gives it row 0. A multi-valued feature has an empty bag instead.
"""
LABEL = "label"
"""The name of a label that nobody names."""


@dataclass(slots=True, init=False)
class Batch:
    """Samples of one rank.

    Args:
        dense_BI: Transformed numbers, float32 [B, I].
        sparse: Raw ids, of stride B.
        labels_B: The labels by name, each float32 [B]; a tensor alone is the only one, called
            `label`.
        weights: Weights of the samples by the name of the label whose loss they weigh, each
            float32 [B]; samples of a label without weights count 1 each.

    Raises:
        DataError: The parts have different B, or there are weights of no label.
    """

    dense_BI: Tensor
    sparse: KeyedJaggedTensor
    labels: dict[str, Tensor]
    weights: dict[str, Tensor]

    def __init__(
        self,
        dense_BI: Tensor,
        sparse: KeyedJaggedTensor,
        labels_B: Tensor | Mapping[str, Tensor],
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.dense_BI = dense_BI
        self.sparse = sparse
        self.labels = {LABEL: labels_B} if isinstance(labels_B, Tensor) else dict(labels_B)
        self.weights = dict(weights or {})
        if unknown := [name for name in self.weights if name not in self.labels]:
            raise DataError(
                f"a batch with weights of {unknown[0]}, which is none of its labels "
                f"({', '.join(self.labels)})"
            )
        counts = {"dense rows": [self.rows], "bags per feature": [sparse.stride()]}
        counts["labels"] = [len(label_B) for label_B in self.labels.values()]
        counts["weights"] = [len(weight_B) for weight_B in self.weights.values()]
        if any(count != self.rows for numbers in counts.values() for count in numbers):
            *most, last = (
                f"{count} {what}" for what, numbers in counts.items() for count in set(numbers)
            )
            raise DataError(
                f"a batch of {', '.join(most)} and {last}: all of them are counted in samples"
            )

    @property
    def rows(self) -> int:
        """The number of samples, B."""
        return len(self.dense_BI)

    @property
    def labels_B(self) -> Tensor:
        """The only label, [B]; NaN where the samples have none.

        Raises:
            DataError: There are several.
        """
        if len(self.labels) > 1:
            raise DataError(
                f"a batch has the labels {', '.join(self.labels)}, so labels_B could be any of "
                "them: name one, batch.labels[NAME]"
            )
        for label_B in self.labels.values():
            return label_B
        return self.dense_BI.new_full((self.rows,), torch.nan, dtype=torch.float32)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the samples on a device.

        As with tensors, that is the batch itself where they are there already.

        Args:
            device: The device.
            non_blocking: Whether to copy through page-locked memory on the way to a GPU, so that
                the host does not wait.
        """
        device = torch.device(device)
        moved = self._with(
            self.sparse.to(device, non_blocking),
            lambda t: copy_to_device(t, device) if non_blocking else t.to(device),
        )
        ours = (self.sparse, self.dense_BI, *self._targets())
        theirs = (moved.sparse, moved.dense_BI, *moved._targets())
        same = all(there is here for there, here in zip(theirs, ours, strict=True))
        return self if same else moved

    def pin_memory(self) -> Self:
        """Return the samples in page-locked memory, from which copies to a GPU need not wait."""
        return self._with(self.sparse.pin_memory(), Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work that `stream` has queued by now is done."""
        self.dense_BI.record_stream(stream)
        self.sparse.record_stream(stream)
        for target_B in self._targets():
            target_B.record_stream(stream)

    def _targets(self) -> Iterator[Tensor]:
        """Yield labels and weights."""
        yield from self.labels.values()
        yield from self.weights.values()

    def _with(self, sparse: KeyedJaggedTensor, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a batch of other ids whose other tensors `change` makes of this one's."""
        made = copy(self)
        made.sparse = sparse
        made.dense_BI = change(self.dense_BI)
        made.labels = {name: change(label_B) for name, label_B in self.labels.items()}
        made.weights = {name: change(weight_B) for name, weight_B in self.weights.items()}
        return made
