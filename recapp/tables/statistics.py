"""Statistics of a table's ids: the number per sample, their repetition, and their distribution over
the rows.

    ids_per_sample   1.0                     mean ids of a sample, over all features that read the
                                             table
    distinct         (1, 1) (64, 41) ...     n ids of consecutive samples have U distinct rows: a
                                             curve, interpolated in log-log
    load             .12 .08 ... .01         share of a batch's distinct rows in each of up to 256
                                             equal ranges of rows
    hot              (1, .21) (8, .48) ...   the k most frequent rows take that share of the ids

Real ids repeat (11 to 27 % of the ids of a Criteo batch are distinct). So the cost of a batch
depends on a point of the curve, not on the number of ids. A table without measurement counts as
Zipf 1.05 with scattered popular rows (`recapp/benchmarks/workloads.py` draws such ids).

The user's cache keeps the statistics (`recapp/settings/user_cache.py`), because measuring takes
seconds, and the data set is usually the same.

    ~/.cache/recapp/statistics/<key>.json     {"samples": 8192, "tables": {name: statistics}}

The key has two parts: the names, sizes and modification times of the data files; and all that turns
ids into rows, which is the names, rows and id rules of tables and the features of their lookups.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recapp.errors import ConfigError, suggest
from recapp.settings.user_cache import cached_file, read_cached_file, write_cached_file
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingConfig, TableLookup, lookups_of
from recapp.tables.ids import IdRules
from recapp.tables.positions import RowOrderName

Points = tuple[tuple[float, float], ...]

RANGES = 256  # the largest number of ranges in `load`
REQUESTS_PER_RANGE = 32  # fewer show chance, not skew: with 32 a share is off by a sixth
WINDOWS = 16  # the number of windows whose mean is a point of the curve
EXPONENT = 1.05  # assumed exponent of Zipf's law; real click logs have 1.0 to 1.2
MOST_IDS = 2.0**30  # the number of ids at which an assumed curve ends
# Beyond the first ranks, popularity is summed in bins, each a twentieth longer than the last.
EXACT_RANKS = 64
RANKS_RATIO = 1.05


@dataclass(frozen=True)
class TableStatistics:
    """The statistics of the ids of one table.

    Args:
        rows: Rows of the table.
        ids_per_sample: Mean number of ids of a sample, over the table's features.
        bags_per_sample: Mean number of bags of a sample that have an id.
        distinct: Pairs (number of ids, number of distinct rows among them), both rising, from 1 id
            up to all measured ids.
        load: The share of a batch's distinct rows in each of equal ranges of rows; the sum is 1.
            One range means an even spread.
        hot: Pairs (number of rows, share of the ids on that many most frequent rows), both rising.

    Raises:
        ConfigError: No ids can have the numbers.
    """

    rows: int
    ids_per_sample: float
    bags_per_sample: float
    distinct: Points
    load: tuple[float, ...] = (1.0,)
    hot: Points = ()

    def __post_init__(self) -> None:
        if self.rows < 1 or self.ids_per_sample < 0 or self.bags_per_sample < 0:
            raise ConfigError(
                f"id statistics: rows={self.rows}, ids_per_sample={self.ids_per_sample}, "
                f"bags_per_sample={self.bags_per_sample}: must not be negative, and rows at least 1"
            )
        for name, points in (("distinct", self.distinct), ("hot", self.hot)):
            if any(x <= 0 or y <= 0 for x, y in points) or any(
                a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(points)
            ):
                raise ConfigError(
                    f"id statistics: {name}={[list(p) for p in points]}: pairs must be above 0 "
                    "and rise"
                )
        if not self.distinct:
            raise ConfigError(
                "id statistics: distinct is empty: give at least one pair [ids, distinct rows], "
                "[[1, 1]]"
            )
        if not self.load or min(self.load) < 0 or abs(sum(self.load) - 1) > 1e-3:
            raise ConfigError(
                f"id statistics: load sums to {sum(self.load):g}: shares must not be negative and "
                "sum to 1"
            )

    @cached_property
    def _curve(self) -> tuple[list[float], list[float]]:
        """The logarithms of the points of `distinct`, with the last slope continued."""
        x, y = (np.log([p[i] for p in self.distinct]).tolist() for i in (0, 1))
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 1.0
        far = x[-1] + 60.0
        return [*x, far], [*y, y[-1] + slope * 60.0]

    def distinct_rows(self, ids: float) -> float:
        """Return the number of distinct rows among a number of ids of consecutive samples."""
        if ids <= self.distinct[0][0]:
            return min(max(ids, 0.0), self.distinct[0][1])
        return min(
            float(ids), float(self.rows), math.exp(float(np.interp(math.log(ids), *self._curve)))
        )

    @cached_property
    def _load_up_to(self) -> NDArray[np.float64]:
        """The share of requests below the first row of each range, and 1 at the end."""
        return np.concatenate([[0.0], np.cumsum(self.load)]) / sum(self.load)

    @cached_property
    def _edges(self) -> NDArray[np.float64]:
        """The first rows of the ranges, and the number of rows at the end."""
        return np.linspace(0, self.rows, len(self.load) + 1)

    def share(self, rows: range) -> float:
        """Return the share of a batch's distinct rows within a range of rows."""
        return float(self.shares(np.array([[rows.start, max(rows.start, rows.stop)]]))[0])

    def shares(
        self, rows_M2: NDArray[np.int64], row_order: RowOrderName = "natural"
    ) -> NDArray[np.float64]:
        """Return the share of a batch's distinct rows within each of M ranges, [M].

        Args:
            rows_M2: The first row of each range and the row after its last one, [M, 2].
            row_order: The order of the rows; mixed rows have an even load.
        """
        if len(self.load) == 1 or row_order == "mixed":
            return (rows_M2[:, 1] - rows_M2[:, 0]) / self.rows
        up_to = np.interp(rows_M2, self._edges, self._load_up_to)
        return np.asarray(up_to[:, 1] - up_to[:, 0])

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as plain values for JSON and YAML."""
        return {
            "rows": self.rows,
            "ids_per_sample": self.ids_per_sample,
            "bags_per_sample": self.bags_per_sample,
            "distinct": [list(p) for p in self.distinct],
            "load": list(self.load),
            "hot": [list(p) for p in self.hot],
        }

    @staticmethod
    def from_dict(entries: Mapping[str, Any], where: str = "id statistics") -> "TableStatistics":
        """Return the statistics from the plain values of `to_dict`; `load` and `hot` may be absent.

        Args:
            entries: Plain values by name.
            where: The name of the entries in error messages.

        Raises:
            ConfigError: An entry is missing, unknown or invalid.
        """
        values = {}
        for key, value in entries.items():
            if key not in _READ:
                raise ConfigError(f"{where}: unknown entry {key}; {suggest(str(key), _READ)}")
            read, expected = _READ[key]
            try:
                values[key] = read(value)
            except (TypeError, ValueError):
                raise ConfigError(f"{where}: {key}={value}: must be {expected}") from None
        for key in ("rows", "ids_per_sample", "bags_per_sample", "distinct"):
            if key not in values:
                raise ConfigError(f"{where}: {key} is missing")
        try:
            return TableStatistics(**values)
        except ConfigError as error:
            raise ConfigError(f"{where}: {str(error).removeprefix('id statistics: ')}") from None


def _points(value: Any) -> Points:
    return tuple((float(x), float(y)) for x, y in value)


# The entries of plain statistics: how each is read, and what it must be.
_READ: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rows": (int, "a number"),
    "ids_per_sample": (float, "a number"),
    "bags_per_sample": (float, "a number"),
    "distinct": (_points, "pairs [ids, distinct rows]"),
    "load": (lambda value: tuple(map(float, value)), "a list of shares"),
    "hot": (_points, "pairs [rows, share of the ids]"),
}


# ---- assumed


def default_statistics(
    table: EmbeddingConfig, pooling_factor: float = 1.0, lookups: int | None = None
) -> TableStatistics:
    """Return the assumed statistics of a table that was not measured.

    Ids follow Zipf 1.05, popular rows are scattered, and all bags have the same length.

    Args:
        table: The table, for its rows and features.
        pooling_factor: The number of ids of a bag; below 1, the share of bags with one id.
        lookups: The number of lookups that read the table; None counts those that the table
            declares.
    """
    bags = len(lookups_of([table])) if lookups is None else lookups
    return TableStatistics(
        table.num_embeddings,
        pooling_factor * bags,
        min(pooling_factor, 1.0) * bags,
        *_zipf_curves(table.num_embeddings),
    )


@lru_cache(maxsize=4096)
def _zipf_curves(rows: int) -> tuple[Points, tuple[float, ...], Points]:
    """Return expected distinct rows, even load, and the share of the most popular rows.

    E[U] = sum over rows of 1 - (1 - p)^n; beyond the first ranks, all rows of a bin count as
    equally popular.
    """
    edge = np.arange(1, min(rows, EXACT_RANKS) + 1, dtype=np.float64)
    if rows > EXACT_RANKS:
        bins = math.ceil(math.log(rows / EXACT_RANKS) / math.log(RANKS_RATIO))
        edge = np.concatenate(
            [edge, np.unique(np.rint(np.geomspace(EXACT_RANKS, rows, bins + 1)))[1:]]
        )
    first = np.concatenate([[0.0], edge[:-1]])  # a bin is ranks first + 1 .. edge
    width = edge - first
    lower = np.maximum(first + 0.5, 0.5)
    mass = np.where(
        width == 1,
        edge**-EXPONENT,
        (lower ** (1 - EXPONENT) - (edge + 0.5) ** (1 - EXPONENT)) / (EXPONENT - 1),
    )
    mass /= mass.sum()
    n = np.minimum(2.0 ** np.arange(0, 31), MOST_IDS)
    with np.errstate(divide="ignore"):
        missed = np.exp(n[:, None] * np.log1p(-np.minimum(mass / width, 1.0)))
    distinct = np.maximum.accumulate(((1 - missed) * width).sum(1))
    keep = int(np.searchsorted(distinct, 0.999 * rows)) + 1  # after these points all rows occur
    points = tuple(
        (float(a), min(float(b), a, float(rows)))
        for a, b in zip(n[:keep], distinct[:keep], strict=True)
    )
    hot_at = sorted({*np.searchsorted(edge, 4.0 ** np.arange(16)).clip(max=len(edge) - 1).tolist()})
    hot = tuple((float(edge[i]), min(1.0, float(mass[: i + 1].sum()))) for i in hot_at)
    return points, (1.0,), hot


# ---- measured


def measured_statistics(
    tables: Sequence[EmbeddingConfig],
    batches: Iterable[KeyedJaggedTensor],
    lookups: Sequence[TableLookup] | None = None,
) -> dict[str, TableStatistics]:
    """Measure the rows that each table's id rule makes from the ids of some batches.

    A table without ids in these batches gets `default_statistics` with 0 ids.

    Args:
        tables: All tables of a model.
        batches: Consecutive batches of one rank, with raw ids like the input of a model.
        lookups: The lookups of the tables; None takes the lookups that the tables declare.

    Raises:
        IdError: An id is outside of its table.
    """
    read = lookups_of(tables) if lookups is None else lookups
    rules = IdRules(read)
    lookups_by_table: dict[str, list[int]] = {t.name: [] for t in tables}
    for number, lookup in enumerate(read):
        lookups_by_table[lookup.table.name].append(number)
    seen = {t.name: _MeasuredRows(t.num_embeddings) for t in tables}
    for features in batches:
        rows = rules(features)
        row_F = torch.split(rows.rows_L.long(), rows.per_F)
        for name, numbers in lookups_by_table.items():
            seen[name].add([row_F[i] for i in numbers], rows.lengths_FB[numbers])
    return {t.name: seen[t.name].statistics(t) for t in tables}


class _MeasuredRows:
    """The rows that batches have read of one table, in the order of samples."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.samples = 0
        self.bags = 0
        self.parts: list[NDArray[np.int64]] = []
        self.requested: list[NDArray[np.int64]] = []  # the distinct rows of each batch

    def add(self, row_F: Sequence[Tensor], lengths_FB: Tensor) -> None:
        """Add the rows of one batch.

        Args:
            row_F: The rows of each lookup.
            lengths_FB: The number of ids of each bag, [F, B].
        """
        B = lengths_FB.shape[1]
        self.samples = self.samples + B
        self.bags = self.bags + int((lengths_FB > 0).sum())
        row_N = torch.cat(list(row_F)).cpu().numpy()
        sample_N = np.repeat(
            np.tile(np.arange(B), len(row_F)), lengths_FB.cpu().numpy().reshape(-1)
        )
        self.parts.append(row_N[np.argsort(sample_N, kind="stable")])
        self.requested.append(np.unique(row_N))

    def statistics(self, table: EmbeddingConfig) -> TableStatistics:
        """Return the statistics of all batches."""
        row_N = np.concatenate([np.zeros(0, np.int64), *self.parts])
        if not len(row_N):
            return default_statistics(table, 0.0)
        requested = np.concatenate(self.requested)
        even = table.dynamic is not None  # positions are even
        return TableStatistics(
            max(self.rows, len(np.unique(row_N))) if even else self.rows,
            len(row_N) / self.samples,
            self.bags / self.samples,
            _distinct_curve(row_N),
            (1.0,) if even else _load(requested, self.rows),
            _hot(row_N),
        )


def _distinct_curve(row_N: NDArray[np.int64]) -> Points:
    """Return the mean number of distinct rows in windows of 1, 2, 4, ... consecutive ids, and in
    all ids.
    """
    N = len(row_N)
    order = np.argsort(row_N, kind="stable")
    before_N = np.full(N, -1)  # the index of the previous entry with the same row
    same = row_N[order[1:]] == row_N[order[:-1]]
    before_N[order[1:][same]] = order[:-1][same]
    points: list[tuple[float, float]] = []
    for n in [*(2**k for k in range(N.bit_length()) if 2**k < N), N]:
        starts = np.unique(np.linspace(0, N - n, min(WINDOWS, N // n)).astype(np.int64))
        distinct = float(np.mean([np.count_nonzero(before_N[s : s + n] < s) for s in starts]))
        points.append((float(n), max(distinct, points[-1][1] if points else 1.0)))
    return tuple(points)


def _load(row_N: NDArray[np.int64], rows: int) -> tuple[float, ...]:
    """Return the share of the requested rows in each of equal ranges."""
    ranges = max(1, min(RANGES, rows, len(row_N) // REQUESTS_PER_RANGE))
    shares = np.bincount(row_N * ranges // rows, minlength=ranges) / len(row_N)
    return tuple(float(x) for x in shares)


def _hot(row_N: NDArray[np.int64]) -> Points:
    """Return the shares of the most frequent 1, 4, 16, ... rows, and of all rows in the batches."""
    share = np.sort(np.unique(row_N, return_counts=True)[1])[::-1].cumsum() / len(row_N)
    return tuple(
        (float(k), min(1.0, float(share[k - 1])))
        for k in [*(4**i for i in range(16) if 4**i < len(share)), len(share)]
    )


def read_cached(
    files: Sequence[str | Path],
    tables: Sequence[EmbeddingConfig],
    samples: int = 1,
    lookups: Sequence[TableLookup] | None = None,
    rules: Mapping[str, Any] | None = None,
) -> dict[str, TableStatistics] | None:
    """Return the cached measurement for exactly these files and tables.

    Args:
        files: The files of the data set.
        tables: The tables of the model.
        samples: The least number of measured samples.
        lookups: The lookups of the tables; None takes the lookups that the tables declare.
        rules: The rules that make ids of values, as plain values.

    Returns:
        Statistics by table; None if there is no measurement, or one with too few samples.
    """
    entry = read_cached_file(_path(files, tables, lookups, rules))
    with suppress(ValueError, TypeError, KeyError, AttributeError, ConfigError):  # no longer valid
        if entry["samples"] >= samples:
            return {t.name: TableStatistics.from_dict(entry["tables"][t.name]) for t in tables}
    return None


def write_cached(
    files: Sequence[str | Path],
    tables: Sequence[EmbeddingConfig],
    statistics: Mapping[str, TableStatistics],
    samples: int,
    lookups: Sequence[TableLookup] | None = None,
    rules: Mapping[str, Any] | None = None,
) -> Path | None:
    """Write a measurement to the user's cache.

    Args:
        files: The files of the data set.
        tables: The tables of the model.
        statistics: The statistics of each table.
        samples: The number of measured samples.
        lookups: The lookups of the tables; None takes the lookups that the tables declare.
        rules: The rules that make ids of values, as plain values.

    Returns:
        The path of the file; None if the cache cannot be written.
    """
    entry = {
        "samples": samples,
        "tables": {t.name: statistics[t.name].to_dict() for t in tables},
    }
    return write_cached_file(_path(files, tables, lookups, rules), entry)


def _path(
    files: Sequence[str | Path],
    tables: Sequence[EmbeddingConfig],
    lookups: Sequence[TableLookup] | None,
    rules: Mapping[str, Any] | None,
) -> Path | None:
    """Return the path of a measurement; None if a data file is absent, or the user has no cache."""
    if not files:
        return None
    identity: list[Any] = []
    try:
        for file in files:
            status = os.stat(file)
            identity.append([str(Path(file).resolve()), status.st_size, status.st_mtime_ns])
    except OSError:
        return None
    features: dict[str, list[str]] = {t.name: [] for t in tables}
    for lookup in lookups_of(tables) if lookups is None else lookups:
        features[lookup.table.name].append(lookup.feature)
    identity.append(
        [
            [
                t.name,
                t.num_embeddings,
                *(["dynamic"] * (t.dynamic is not None)),
                features[t.name],
                t.id_rule.value,
                *([t.min_key] * (t.min_key != 0)),
            ]
            for t in tables
        ]
    )
    if rules:
        identity.append(dict(rules))
    return cached_file("statistics", identity)
