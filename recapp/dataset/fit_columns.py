"""Fit derived columns on the training rows, before training.

    training rows --counts of each value--> edges of quantiles, ends of pieces, ids of vocabularies

All training rows are read once for edges, and once more for vocabularies, because the ids of
buckets may have one. Memory holds the distinct values and their counts, not the rows.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from recapp.dataset.collate import Collate
from recapp.dataset.derive import log_edges
from recapp.dataset.derived_columns import LOG, DerivedColumn, Kind
from recapp.dataset.schema import Schema
from recapp.dataset.sequential_rows import arrow_chunks, decoded_chunks, ids_by_feature
from recapp.dataset.source import Source

AT_ONCE = 1 << 20  # values that wait until they are added to the counts
Values = npt.NDArray[np.generic]


class Counts:
    """The number of occurrences of each value of a column."""

    def __init__(self) -> None:
        self._parts: list[tuple[Values, npt.NDArray[np.int64]]] = []
        self._waiting = 0

    def add(self, values: Values) -> None:
        """Count some values."""
        found, counts = np.unique(values, return_counts=True)
        self._parts.append((found, counts.astype(np.int64)))
        self._waiting += len(found)
        if self._waiting > max(AT_ONCE, 2 * len(self._parts[0][0])):
            self.result()

    def result(self) -> tuple[Values, npt.NDArray[np.int64]]:
        """Return the values so far, ascending, and the number of each."""
        if not self._parts:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if len(self._parts) > 1:
            values, place = np.unique(
                np.concatenate([found for found, _ in self._parts]), return_inverse=True
            )
            counts = np.zeros(len(values), dtype=np.int64)
            np.add.at(counts, place, np.concatenate([own for _, own in self._parts]))
            self._parts = [(values, counts)]
        self._waiting = 0
        return self._parts[0]


def fitted(schema: Schema, source: Source) -> Schema:
    """Return a schema whose derived columns are fitted on rows.

    Args:
        schema: The columns. Columns that are fitted already stay as they are.
        source: The training rows, in the order of the files.
    """
    columns = list(schema.derived)
    of_numbers = (Kind.BUCKETS, Kind.PIECEWISE)
    for kinds, fit in ((of_numbers, _fit_edges), ((Kind.VOCABULARY,), _fit_vocabularies)):
        some = [c for c in columns if c.kind in kinds and c.values is None]
        before = [c for c in columns if c.values is not None]
        made = {c.key: c for c in fit(some, replace(schema, derived=tuple(before)), source)}
        columns = [made.get(c.key, c) for c in columns]
        if fit is _fit_edges:
            columns = [_without_rows(c) for c in columns]
    return replace(schema, derived=tuple(columns))


def _without_rows(column: DerivedColumn) -> DerivedColumn:
    """Return a column whose values do not depend on rows as fitted."""
    if column.values is not None:
        return column
    if column.kind in (Kind.SINE, Kind.COSINE):
        return replace(column, values=np.array([column.period], dtype=np.float32))
    if column.kind in (Kind.MISSING, Kind.CROSS, Kind.HOUR, Kind.WEEKDAY):
        return replace(column, values=np.zeros(0, dtype=np.int64))
    return column


def _fit_edges(
    columns: Sequence[DerivedColumn], schema: Schema, source: Source
) -> list[DerivedColumn]:
    """Fit the edges of buckets and the ends of pieces."""
    dense = tuple(dict.fromkeys(c.reads[0] for c in columns if c.setting != LOG))
    counts = {name: Counts() for name in dense}
    if dense:
        collate = Collate(schema.unlabelled().only_raw(dense, schema.sparse), source.bags, "none")
        for file, first, chunk in arrow_chunks(source.only(dense)):
            rows_N = first + np.arange(chunk.num_rows)
            numbers_NI = collate.numbers(chunk, file.columns, file.path, rows_N)
            for name, values_N in zip(dense, numbers_NI.T, strict=True):
                counts[name].add(values_N[~np.isnan(values_N)])
    return [replace(c, values=_edges_of(c, counts.get(c.reads[0]))) for c in columns]


def _edges_of(column: DerivedColumn, counts: Counts | None) -> npt.NDArray[np.float32]:
    """Return the fitted values of a column of buckets or of a piece."""
    if column.setting == LOG:
        return log_edges()
    assert counts is not None
    values, number = counts.result()
    if column.kind is Kind.BUCKETS:
        return quantile_edges(values, number, int(column.setting))
    piece, _, pieces = str(column.setting).partition(" of ")
    ends = ends_of_pieces(values, number, int(pieces))[int(piece) - 1 :][:2]
    return ends if len(ends) == 2 else ends[:0]


def ends_of_pieces(
    values: Values, counts: npt.NDArray[np.int64], pieces: int
) -> npt.NDArray[np.float32]:
    """Return the ends of pieces between the extremes of some numbers, at their quantiles; fewer if
    one value fills several pieces.

    Args:
        values: The distinct numbers, ascending.
        counts: The number of each.
        pieces: The number of pieces.
    """
    if not len(values):
        return np.zeros(0, dtype=np.float32)
    ranks = np.arange(pieces + 1, dtype=np.int64) * (int(counts.sum()) - 1) // pieces
    places = np.searchsorted(np.cumsum(counts), ranks, side="right")
    return np.unique(values[places]).astype(np.float32)


def quantile_edges(
    values: Values, counts: npt.NDArray[np.int64], buckets: int
) -> npt.NDArray[np.float32]:
    """Return the edges of buckets that hold equal shares of some numbers. Edges are values that
    occur; there are fewer than `buckets`, because one value may fill several buckets.

    Args:
        values: The distinct numbers, ascending.
        counts: The number of each.
        buckets: The number of buckets.
    """
    if not len(values):
        return np.zeros(0, dtype=np.float32)
    ends = np.cumsum(counts)
    ranks = np.arange(1, buckets, dtype=np.int64) * int(ends[-1]) // buckets
    if len(values) <= buckets:
        return values[1:].astype(np.float32)
    places, times = np.unique(np.searchsorted(ends, ranks, side="right"), return_counts=True)
    # a value that fills a bucket ends there, so that larger ones do not share its id
    behind = places[(times > 1) | (places == 0)] + 1
    places = np.union1d(places, behind[behind < len(values)])
    return values[places[places > 0]].astype(np.float32)


def _fit_vocabularies(
    columns: Sequence[DerivedColumn], schema: Schema, source: Source
) -> list[DerivedColumn]:
    """Fit vocabularies: the ids that occur often enough, ascending."""
    counts = {c.reads: Counts() for c in columns}
    if columns:
        for rows in decoded_chunks(source, schema.unlabelled()):
            ids = ids_by_feature(rows, schema, source.bags)
            for reads, own in counts.items():
                for name in reads:
                    own.add(ids[name])
    made = []
    for column in columns:
        values, number = counts[column.reads].result()
        made.append(replace(column, values=values[number >= int(column.setting)]))
    return made
