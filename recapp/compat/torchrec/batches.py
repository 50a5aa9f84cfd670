"""TorchRec's batches: its functions of jagged tensors, the random data set of its examples and its
batch, names of Criteo's columns, and the train pipelines that take batches.

While one batch computes, a pipeline copies the next batch to the device and exchanges its ids:

    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    while True:
        try:
            output = pipeline.progress(batches)
        except StopIteration:
            break

With `graph=True` one rank on a GPU trains a batch as one CUDA graph (`StepGraph`), which waits for
no exchange and so needs no look-ahead; several ranks exchange ids ahead, and the graph is what is
between lookup and update. No GPU has run that yet.

TorchRec's pipelines require `Pipelineable` batches. recapp's accept any batch with a method `to`;
the two base classes are here for programs that derive their batches from them. Under Lightning
`engine.look_ahead` does the same as a pipeline. recapp does not trace the model: it exchanges the
ids of the next batch for every collection. A collection that the model calls with other ids gets no
look-ahead (`recapp/trainer/lookahead.py`).
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset
from typing_extensions import override

from recapp.console import note_once
from recapp.engine.sharded_collection import sharded_tables
from recapp.errors import ConfigError, DataError
from recapp.graphs.recorded_batch import Samples
from recapp.graphs.step_graph import StepGraph
from recapp.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.trainer.lookahead import LookAhead


class Multistreamable(ABC):
    """A batch whose memory another stream uses."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work that is queued on `stream` now is done."""


class Pipelineable(Multistreamable):
    """A batch that can be moved to a device ahead of its turn."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """Return the batch on a device."""


INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES = [f"int_{number}" for number in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES = [f"cat_{number}" for number in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]


@dataclass
class Batch(Pipelineable):
    """Samples of one rank, with TorchRec's names of the parts.

    Args:
        dense_features: The dense features, [B, I].
        sparse_features: The ids, with stride B.
        labels: The labels, [B].
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    @property
    def sparse(self) -> KeyedJaggedTensor:
        """The ids, by the name that recapp's batches have for them."""
        return self.sparse_features

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the samples with `change` applied to each tensor."""
        sparse = self.sparse_features._each(change)
        return Batch(change(self.dense_features), sparse, change(self.labels))

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the samples."""
        return [self.dense_features, *self.sparse_features._tensors(), self.labels]

    @override
    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "Batch":
        """Return the samples in page-locked memory."""
        return self.each(lambda tensor: tensor.pin_memory())

    @override
    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in self.tensors():
            tensor.record_stream(stream)


class RandomRecDataset(IterableDataset[Batch]):
    """Batches of random numbers, ids and labels; a seed gives the same batches as in TorchRec.

    Args:
        keys: The names of the features.
        batch_size: The number of samples B in a batch.
        hash_size: The bound that ids of every feature are below; None takes 100.
        hash_sizes: The bound for each feature, instead of one for all.
        ids_per_feature: The largest number of ids in a bag; None takes 2.
        ids_per_features: The largest number for each feature, instead of one for all.
        num_dense: The number of dense features I.
        manual_seed: The seed; None takes torch's global generator.
        num_batches: The number of batches; None makes the data set endless.
        num_generated_batches: The number of different batches, which then repeat; a negative number
            draws every batch anew.
        min_ids_per_feature: The smallest number of ids in a bag; None takes `ids_per_feature`, or 0
            without it.
        min_ids_per_features: The smallest number for each feature, instead of one for all.

    Raises:
        ConfigError: A list does not have the length of `keys`.
    """

    def __init__(
        self,
        keys: Sequence[str],
        batch_size: int,
        hash_size: int | None = None,
        hash_sizes: Sequence[int] | None = None,
        ids_per_feature: int | None = None,
        ids_per_features: Sequence[int] | None = None,
        num_dense: int = 50,
        manual_seed: int | None = None,
        num_batches: int | None = None,
        num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None,
        min_ids_per_features: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.keys = list(keys)
        self.batch_size = batch_size
        least = ids_per_feature if min_ids_per_feature is None else min_ids_per_feature
        self.hash_sizes = self._each("hash_sizes", hash_sizes, hash_size or 100)
        self.most = self._each("ids_per_features", ids_per_features, ids_per_feature or 2)
        self.least = self._each("min_ids_per_features", min_ids_per_features, least or 0)
        self.num_dense = num_dense
        self.num_batches = num_batches
        self.generator = None
        if manual_seed is not None:
            self.generator = torch.Generator().manual_seed(manual_seed)
        self.repeats = num_generated_batches >= 0
        self._batches = [self._make() for _ in range(num_generated_batches)]

    def _each(self, name: str, values: Sequence[int] | None, one: int) -> list[int]:
        numbers = [one] * len(self.keys) if values is None else list(values)
        if len(numbers) != len(self.keys):
            raise ConfigError(
                f"{name} has {len(numbers)} numbers for {len(self.keys)} keys: give one for each"
            )
        return numbers

    def _make(self) -> Batch:
        B = self.batch_size
        lengths = []
        values = []
        for size, most, least in zip(self.hash_sizes, self.most, self.least, strict=True):
            lengths_B = torch.randint(
                least, most + 1, (B,), dtype=torch.int32, generator=self.generator
            )
            total = int(lengths_B.sum())
            lengths.append(lengths_B)
            values.append(torch.randint(0, size, (total,), generator=self.generator))
        sparse = KeyedJaggedTensor.from_lengths_sync(
            self.keys, torch.cat(values), torch.cat(lengths)
        )
        dense_BI = torch.randn(B, self.num_dense, generator=self.generator)
        return Batch(dense_BI, sparse, torch.randint(0, 2, (B,), generator=self.generator))

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches, beginning with the first."""
        for number in islice(count(), self.num_batches):
            yield self._batches[number % len(self._batches)] if self.repeats else self._make()

    def __len__(self) -> int:
        """Return the number of batches; `sys.maxsize` for an endless data set."""
        return sys.maxsize if self.num_batches is None else self.num_batches


class ComputeKJTToJTDict(nn.Module):
    """A module that splits a KeyedJaggedTensor by key."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return a jagged tensor for each key, as a view."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """A module that joins jagged tensors into a KeyedJaggedTensor."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Return the entries as keys of one tensor, in order.

        Raises:
            DataError: Some entries have weights and others have none.
        """
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


def regroup_kts(
    keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]
) -> list[Tensor]:
    """Concatenate the vectors of keys in groups, as `KeyedTensor.regroup` does."""
    return KeyedTensor.regroup(keyed_tensors, groups)


def jt_is_equal(jt_1: object, jt_2: object) -> bool:
    """Return whether two jagged tensors hold the same bags. As in TorchRec, values and weights are
    compared by `torch.allclose` and lengths exactly. An object of another class is never equal.
    """
    if not isinstance(jt_1, JaggedTensor) or not isinstance(jt_2, JaggedTensor):
        return False
    return _same_parts(jt_1, jt_2)


def kjt_is_equal(kjt_1: object, kjt_2: object) -> bool:
    """Return whether two keyed jagged tensors hold the same keys in the same order with the same
    bags, by the comparison of `jt_is_equal`.
    """
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    if kjt_1.keys() != kjt_2.keys() or kjt_1.stride() != kjt_2.stride():
        return False
    return kjt_1.stride_per_key() == kjt_2.stride_per_key() and _same_parts(kjt_1, kjt_2)


def validate_keyed_jagged_tensor(kjt: KeyedJaggedTensor) -> None:
    """Check a keyed jagged tensor as its constructor does, and that all its values and weights
    belong to a bag. For a tensor on an accelerator this waits for the device.

    Raises:
        DataError: A check fails; the error is a ValueError, as in TorchRec.
    """
    if not isinstance(kjt, KeyedJaggedTensor):
        raise DataError(f"kjt is a {type(kjt).__name__}: give a KeyedJaggedTensor")
    weights = kjt.weights_or_none()
    KeyedJaggedTensor(
        kjt.keys(),
        kjt.values().cpu(),
        None if weights is None else weights.cpu(),
        kjt.lengths().cpu(),
        None if (offsets := kjt.offsets_or_none()) is None else offsets.cpu(),
        stride_per_key_per_rank=(
            kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
        ),
    )
    bags = kjt.without_slack()
    for name, tensor in (("values", kjt.values()), ("weights", weights)):
        if tensor is not None and len(tensor) != len(bags.values()):
            raise DataError(
                f"there are {len(tensor)} {name}, but lengths sum to {len(bags.values())}: the "
                "last values belong to no bag: give one entry for each value of a bag"
            )


def _same_parts(
    one: JaggedTensor | KeyedJaggedTensor, other: JaggedTensor | KeyedJaggedTensor
) -> bool:
    if not torch.equal(one.lengths().long(), other.lengths().long()):
        return False
    return _close(one.values(), other.values()) and _close(
        one.weights_or_none(), other.weights_or_none()
    )


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other)


In = TypeVar("In")
Out = TypeVar("Out")


class TrainPipelineBase(Generic[In, Out]):
    """Trains a model batch by batch. Type parameters may name the types of batch and output:
    `TrainPipelineBase[Batch, Tensor]`.

    Args:
        model: A model that returns (losses, output) for a batch.
        optimizer: The optimiser of the dense parameters; backward updates the tables.
        device: The device of the batches.
        custom_model_fwd: A function of a batch that the pipeline calls instead of the model.
        graph: Whether to train as `StepGraph` does, which records the model's Python once for each
            form of batches. Where that cannot be, a note says why, and nothing changes.
    """

    depth = 0
    """The number of batches to look ahead."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        *,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
        graph: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = torch.device(device)
        self._forward = custom_model_fwd or model
        self._source: Iterator[In] | None = None
        self._batches: Iterator[In] = iter(())
        step = StepGraph(model, self._loss, optimizer, setting="graph=True") if graph else None
        self._graph = step if step and not step.why_not else None

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on the next batch and return the model's output; in eval mode only run the forward.

        Args:
            dataloader_iter: Batches with a method `to(device, non_blocking)`; the same number of
                batches on every rank.

        Raises:
            StopIteration: The iterator has no further batch.
            IdError: With a graph also an id of one of the last batches, as in `StepGraph`.
            TrainingError: With a graph, the loss of one of the last batches was not finite.
        """
        if self._source is not dataloader_iter:
            self._source = dataloader_iter
            self._batches = self._read(dataloader_iter)
        output: Out
        try:
            batch = next(self._batches)
        except StopIteration:
            if self._graph is not None:
                self._graph.finish()
            raise
        if not self.model.training:
            _, output = self._forward(batch)
            return output
        if self._graph is not None and isinstance(batch, Samples):
            _, output = self._graph(batch)
            return output
        if self._graph is not None:
            kind = type(batch).__name__
            note_once(f"graph=True: steps of a {kind} without sparse, each, tensors are launched")
        self.optimizer.zero_grad()
        loss, output = self._loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return output

    def _loss(self, model: nn.Module, batch: In) -> tuple[Tensor, Out]:
        losses, output = self._forward(batch)
        return torch.sum(losses, dim=0), output

    def _read(self, batches: Iterator[In]) -> Iterator[In]:
        if not self.depth or (self._graph is not None and not self._graph.cuts):
            return map(self._moved, batches)
        tables = sharded_tables(self.model)
        side = tables[0].comm.side if tables else None
        ahead = LookAhead(batches, self.depth, lambda: tables, self._moved, side)
        return iter(ahead)

    def _moved(self, batch: Any) -> Any:
        return batch.to(self.device, non_blocking=True)


class TrainPipelineSparseDist(TrainPipelineBase[In, Out]):
    """A pipeline that exchanges the ids of the next batch while a batch computes. The arguments are
    those of `TrainPipelineBase`.
    """

    depth = 1
