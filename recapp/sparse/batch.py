"""A batch of logs between data set and model.

    dense_BI   float32 [B, I]          transformed numbers, no gaps
    sparse     KeyedJaggedTensor       raw ids as the logs have them; B bags per feature
    labels     name -> float32 [B]     what the model learns; none where rows are only scored
    weights    name -> float32 [B]     how much a row counts in the loss of that label
    row_numbers_B      int64 [B]       which row of the data set a sample is, where this is wanted

A batch moves as one: to a device, into page-locked memory, along with a stream. B may be 0: ranks
pad evaluation with empty batches.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from recapp.errors import DataError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.transfer import copy_to_device

MISSING = -(2**63)
"""The id of a single-valued feature for a sample that has none.

Tables give this id row 0. A multi-valued feature has an empty bag instead.
"""
LABEL = "label"
"""The name of a label that has no other name."""


@dataclass(slots=True, init=False)
class Batch:
    """Samples of one rank.

    Args:
        dense_BI: Transformed numbers, float32 [B, I].
        sparse: Raw ids, of stride B.
        labels_B: The labels by name, each float32 [B]. A single tensor is the only label, named
            `label`.
        weights: Weights of the samples in the loss of each label, by label name, each float32 [B].
            Without weights, samples weigh 1 in the loss of a label.
        row_numbers_B: The place of each sample in the data set: files in their order, rows in
            theirs, counted from 0, int64 [B]; None where nobody asked the reader for it.

    Raises:
        DataError: The parts have different B, or weights have no label.
    """

    dense_BI: Tensor
    sparse: KeyedJaggedTensor
    labels: dict[str, Tensor]
    weights: dict[str, Tensor]
    row_numbers_B: Tensor | None

    def __init__(
        self,
        dense_BI: Tensor,
        sparse: KeyedJaggedTensor,
        labels_B: Tensor | Mapping[str, Tensor],
        weights: Mapping[str, Tensor] | None = None,
        row_numbers_B: Tensor | None = None,
    ) -> None:
        self.dense_BI = dense_BI
        self.sparse = sparse
        self.labels = {LABEL: labels_B} if isinstance(labels_B, Tensor) else dict(labels_B)
        self.weights = dict(weights or {})
        self.row_numbers_B = row_numbers_B
        if strange := self.weights.keys() - self.labels.keys():
            raise DataError(
                f"a batch with weights of {min(strange)}, which is not one of its labels "
                f"({', '.join(self.labels)})"
            )
        counted = [("dense rows", self.rows), ("bags per feature", sparse.stride())]
        counted += [("labels", len(label_B)) for label_B in self.labels.values()]
        counted += [("weights", len(weight_B)) for weight_B in self.weights.values()]
        if row_numbers_B is not None:
            counted.append(("row numbers", len(row_numbers_B)))
        if len({count for _, count in counted}) > 1:
            *most, last = dict.fromkeys(f"{count} {what}" for what, count in counted)
            raise DataError(
                f"a batch of {', '.join(most)} and {last}: give all parts the same number of "
                "samples"
            )

    @property
    def rows(self) -> int:
        """The number of samples, B."""
        return len(self.dense_BI)

    @property
    def labels_B(self) -> Tensor:
        """The only label, [B]; NaN if the samples have none.

        Raises:
            DataError: There are several labels.
        """
        if len(self.labels) > 1:
            raise DataError(
                f"a batch has the labels {', '.join(self.labels)}, so labels_B could be any of "
                "them: name one, batch.labels[NAME]"
            )
        if not self.labels:
            return self.dense_BI.new_full((self.rows,), torch.nan, dtype=torch.float32)
        return next(iter(self.labels.values()))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the samples on a device.

        Like a tensor's `to`, this returns the batch itself if it is there already.

        Args:
            device: The device.
            non_blocking: Whether to copy through page-locked memory on the way to a GPU, so that
                the host does not wait.
        """
        device = torch.device(device)

        def moved(part: Any) -> Any:
            if non_blocking and isinstance(part, Tensor):
                return copy_to_device(part, device)
            return part.to(device, non_blocking=non_blocking)

        there = self._changed(moved)
        same = all(one is other for one, other in zip(there._parts(), self._parts(), strict=True))
        return self if same else there

    def pin_memory(self) -> Self:
        """Return the samples in page-locked memory. The host does not wait for copies from it to a
        GPU.
        """
        return self._changed(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until `stream` has done the work that is queued on it now."""
        for part in self._parts():
            part.record_stream(stream)

    def _parts(self) -> list[Tensor | KeyedJaggedTensor]:
        """Return all parts; the ids are one part."""
        numbers = () if self.row_numbers_B is None else (self.row_numbers_B,)
        return [
            self.dense_BI,
            self.sparse,
            *self.labels.values(),
            *self.weights.values(),
            *numbers,
        ]

    def _changed(self, change: Callable[[Any], Any]) -> Self:
        """Return a batch with `change` applied to each part."""
        batch = copy(self)
        batch.dense_BI = change(self.dense_BI)
        batch.sparse = change(self.sparse)
        batch.labels = {name: change(label_B) for name, label_B in self.labels.items()}
        batch.weights = {name: change(weight_B) for name, weight_B in self.weights.items()}
        if self.row_numbers_B is not None:
            batch.row_numbers_B = change(self.row_numbers_B)
        return batch
