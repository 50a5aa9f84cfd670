"""The data of TorchRec's examples: the random data set and its batch, names of Criteo's columns,
and the reader of MovieLens.

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
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from recapp.errors import ConfigError, DataError
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
        """Keep the memory until the work that is queued on `stream` now is done."""
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
        self._made = [self._make() for _ in range(num_generated_batches)]

    def _each(self, name: str, given: Sequence[int] | None, one: int) -> list[int]:
        """Return one number for each feature."""
        numbers = [one] * len(self.keys) if given is None else list(given)
        if len(numbers) != len(self.keys):
            raise ConfigError(
                f"{name} has {len(numbers)} numbers for {len(self.keys)} keys: give one for each"
            )
        return numbers

    def _make(self) -> Batch:
        """Draw a batch in TorchRec's order of draws."""
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
        """Yield the batches, beginning with the first."""
        return islice(self._endless(), self.num_batches)

    def _endless(self) -> Iterator[Batch]:
        number = 0
        while True:
            yield self._made[number % len(self._made)] if self.repeats else self._make()
            number += 1

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


class MovieLens(IterableDataset[Any]):
    """The rows of `ratings.csv`, one after the other.

    Args:
        root: The directory of the files.
        include_movies_data: Whether to append title and genres of `movies.csv` to each rating.
        row_mapper: A function that takes the texts of a row; None yields the texts.

    Raises:
        DataError: A file is missing.
    """

    def __init__(
        self, root: str | Path, include_movies_data: bool, row_mapper: RowMapper | None
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


def named_values(row: list[str]) -> dict[str, Any]:
    """Return the values of a row by the names of their columns, as `int`, `float` and `str`.

    Args:
        row: The texts of a rating, with or without those of the movie.
    """
    columns = zip(MOVIELENS_COLUMN_NAMES, TYPES, row, strict=False)
    return {name: kind(text) for name, kind, text in columns}


def movielens(
    root: str | Path,
    *,
    include_movies_data: bool = False,
    row_mapper: RowMapper | None = named_values,
) -> MovieLens:
    """Return the rows of MovieLens 20M or 25M; the arguments are those of `MovieLens`."""
    return MovieLens(root, include_movies_data, row_mapper)


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
