"""TorchRec's functions of jagged tensors, and the data of its examples: the random data set and its
batch, names of Criteo's columns, and the reader of MovieLens.

    for row in movielens_25m("ml-25m"):
        row["userId"], row["movieId"], row["rating"], row["timestamp"]

`recapp.ClickData` reads real logs of Criteo. To train on MovieLens with recapp's data sets, convert
the files once: `docs/logs.md`.

TorchRec's pipelines require `Pipelineable` batches. recapp's accept any batch with a method `to`;
the two base classes are here for programs that derive their batches from them.
"""

import csv
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from typing_extensions import override

from recapp.errors import ConfigError, DataError
from recapp.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor


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

    @override
    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
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

    @override
    def record_stream(self, stream: torch.Stream) -> None:
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)


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


RATINGS_FILENAME = "ratings.csv"
MOVIES_FILENAME = "movies.csv"
DEFAULT_RATINGS_COLUMN_NAMES = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES = ["movieId", "title", "genres"]
MOVIELENS_COLUMN_NAMES = DEFAULT_RATINGS_COLUMN_NAMES + DEFAULT_MOVIES_COLUMN_NAMES[1:]
TYPES: tuple[Callable[[str], Any], ...] = (int, int, float, int, str, str)

RowMapper = Callable[[list[str]], Any]


def named_values(row: list[str]) -> dict[str, Any]:
    """Return the values of a row by the names of their columns, as `int`, `float` and `str`.

    Args:
        row: The texts of a rating, with or without those of the movie.
    """
    columns = zip(MOVIELENS_COLUMN_NAMES, TYPES, row, strict=False)
    return {name: kind(text) for name, kind, text in columns}


class MovieLens(IterableDataset[Any]):
    """The rows of MovieLens 20M or 25M, one after the other: those of `ratings.csv`.

    Args:
        root: The directory of the files.
        include_movies_data: Whether to append title and genres of `movies.csv` to each rating.
        row_mapper: A function that takes the texts of a row; None yields the texts.

    Raises:
        DataError: A file is missing.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        include_movies_data: bool = False,
        row_mapper: RowMapper | None = named_values,
    ) -> None:
        super().__init__()
        self.ratings = Path(root) / RATINGS_FILENAME
        self.movies = Path(root) / MOVIES_FILENAME if include_movies_data else None
        self.row_mapper = row_mapper
        for path in (self.ratings, self.movies):
            if path is not None and not path.is_file():
                raise DataError(f"movielens: root={root}: the directory has no {path.name}")

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows.

        Raises:
            DataError: A row has the wrong number of columns, a text is no number, or `movies.csv`
                lacks a rated movie; the error names the file and the line.
        """
        movies: Mapping[str, list[str]] | None = None
        if self.movies is not None:
            movies = {row[0]: row[1:] for _, row in _rows(self.movies, 3)}
        for line, row in _rows(self.ratings, len(DEFAULT_RATINGS_COLUMN_NAMES)):
            if movies is not None:
                if row[1] not in movies:
                    raise DataError(
                        f"{self.ratings}:{line}: movieId {row[1]} is not in {MOVIES_FILENAME}"
                    )
                row = row + movies[row[1]]
            try:
                yield row if self.row_mapper is None else self.row_mapper(row)
            except ValueError as error:
                raise DataError(f"{self.ratings}:{line}: {error}") from error


def _rows(path: Path, columns: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows after the header, each with the number of its last line."""
    with path.open(newline="", encoding="utf-8") as text:
        reader = csv.reader(text)
        next(reader, None)
        for row in reader:
            if len(row) != columns:
                raise DataError(
                    f"{path}:{reader.line_num}: {len(row)} columns, must have {columns}"
                )
            yield reader.line_num, row


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
