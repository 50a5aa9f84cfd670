"""TorchRec's random data set and its batch, and the names of Criteo's columns: what examples of
TorchRec train on. Real logs are read by `recapp.ClickData`.

TorchRec's pipelines ask for batches that are `Pipelineable`. Here any batch with `to` will do, so
these classes are only a form that a program's own batches may follow.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor


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


INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES = [f"int_{number}" for number in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES = [f"cat_{number}" for number in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]
DAYS = 24  # files of the terabyte data set
TOTAL_TRAINING_SAMPLES = 4_195_197_692  # in all of them but the last
FREQUENCY_THRESHOLD = 3  # rarer values share one id


@dataclass
class Batch(Pipelineable):
    """Samples of one rank, with TorchRec's names of the parts.

    Args:
        dense_features: Numbers, [B, I].
        sparse_features: Ids, of stride B.
        labels: Labels, [B].
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return the samples on a device."""
        return Batch(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "Batch":
        """Return the samples in page-locked memory."""
        return Batch(
            self.dense_features.pin_memory(),
            self.sparse_features.pin_memory(),
            self.labels.pin_memory(),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work that `stream` has queued by now is done."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)


class RandomRecDataset(IterableDataset[Batch]):
    """Batches of random numbers, ids and labels; the same seed gives the batches of TorchRec.

    Args:
        keys: Names of the features.
        batch_size: Samples B of a batch.
        hash_size: Ids of every feature are below it; None takes 100.
        hash_sizes: The same for each feature, instead.
        ids_per_feature: Most ids of a bag; None takes 2.
        ids_per_features: The same for each feature, instead.
        num_dense: Numbers I of a sample.
        manual_seed: The seed; None takes torch's global generator.
        num_batches: After how many the data set ends; None goes on for ever.
        num_generated_batches: How many differ, after which they repeat; a negative number makes
            every batch anew.
        min_ids_per_feature: Least ids of a bag; None takes `ids_per_feature`, or 0 without it.
        min_ids_per_features: The same for each feature, instead.

    Raises:
        ConfigError: Lists that are not as long as `keys`.
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
        self._made = [self._make() for _ in range(num_generated_batches)]

    def _each(self, name: str, given: Sequence[int] | None, one: int) -> list[int]:
        """Return a number for each feature."""
        numbers = [one] * len(self.keys) if given is None else list(given)
        if len(numbers) != len(self.keys):
            raise ConfigError(
                f"{name} has {len(numbers)} numbers for {len(self.keys)} keys: give one for each"
            )
        return numbers

    def _make(self) -> Batch:
        """Draw a batch, in the order in which TorchRec draws."""
        B = self.batch_size
        lengths = []
        values = []
        for size, most, least in zip(self.hash_sizes, self.most, self.least, strict=True):
            lengths_B = torch.randint(
                least, most + 1, (B,), dtype=torch.int32, generator=self.generator
            )
            count = int(lengths_B.sum())
            lengths.append(lengths_B)
            values.append(torch.randint(0, size, (count,), generator=self.generator))
        sparse = KeyedJaggedTensor.from_lengths_sync(
            self.keys, torch.cat(values), torch.cat(lengths)
        )
        dense_BI = torch.randn(B, self.num_dense, generator=self.generator)
        return Batch(dense_BI, sparse, torch.randint(0, 2, (B,), generator=self.generator))

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from the first on."""
        return islice(self._endless(), self.num_batches)

    def _endless(self) -> Iterator[Batch]:
        number = 0
        while True:
            yield self._made[number % len(self._made)] if self.repeats else self._make()
            number += 1

    def __len__(self) -> int:
        """Return the number of batches; a very large one where the data set does not end."""
        return sys.maxsize if self.num_batches is None else self.num_batches
