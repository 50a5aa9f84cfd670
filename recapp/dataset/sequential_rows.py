"""Read the rows of a source in file order, chunk by chunk: files to Arrow, Arrow to arrays.

    all rows      benchmarks, which time these two steps separately
                  fits of derived columns: counts of each value -> edges, ids of vocabularies
    first rows    sizes of tables; checks of values, and remarks on odd ones, before training
    undecoded     the example of a stored model: file -> Arrow table -> plain values -> Arrow table

Training reads shuffled batches (`BatchStream`). A fit reads all training rows once for edges of
quantiles and ends of pieces, and once more for vocabularies, because the ids of buckets may have
one. Memory holds the distinct values and their counts, not the rows.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from recapp.dataset.arrow_types import (
    id_type,
    is_list,
    is_text,
    spelled_ids,
    value_type,
    with_values,
)
from recapp.dataset.collate import Collate, RawTable
from recapp.dataset.data_settings import LOG, Derivation, DerivedColumn
from recapp.dataset.decode import (
    TICKS,
    BadValue,
    as_text,
    decode_ids,
    decode_times,
    shown,
)
from recapp.dataset.rows import IdArray, Rows, log_edges, places
from recapp.dataset.schema import Schema, TextIds
from recapp.dataset.source import Source, arrow_chunks
from recapp.errors import DataError
from recapp.sparse.missing_ids import MISSING

FIRST_ROWS = 1024  # whose values are looked at before training
# beyond these a time is likely to have another unit: seconds of the years 1980 and 2200
SOONEST = 315_532_800
LATEST = 7_258_118_400
COUNTED_ROWS = 65_536
COUNTED_VALUES = 2**20  # different values whose frequencies are in memory
ROWS_PER_ID = 4  # rows of a table for each distinct id: few ids share a row, even later ones
_WHOLE = r"\A-?(0|[1-9][0-9]*)\.0+\z"
_ABSENT = r"\A(nan|NaN|None|null|NULL|<NA>|\\N)\z"
_LIST = r"\A(\[.*\]|\(.*,.*\)|\{.*,.*\})\z"
_NUMBERS = r"\A[0-9]+([|;,][0-9]+)+\z"
# What is odd about texts that a pattern matches.
_ADVICE = {
    _WHOLE: "which is another id than the number: write whole numbers "
    '(pandas: astype("Int64") before to_csv)',
    _ABSENT: "which is an id like other text: write null or empty text where an id is missing",
    _LIST: "which is no list, as its brackets are part of an id: write a column of lists, or texts "
    "such as 3|17 and dataset.separator",
    _NUMBERS: "which is one id: if it is a list, name the sign between its ids in "
    "dataset.separator",
}
# A row by column name: numbers, text, None, and lists of these.
PlainRow = Mapping[str, Any]


def decoded_chunks(source: Source, schema: Schema, transform: str = "log1p") -> Iterator[Rows]:
    """Yield the rows of a source as arrays of ids, numbers and labels, checked and transformed."""
    collate = Collate(schema, source.bags, transform)
    for file, first, chunk in arrow_chunks(source):
        yield collate.rows(chunk, file.columns, file.path, first + np.arange(chunk.num_rows))


def ids_by_feature(rows: Rows, schema: Schema, bags: Set[str]) -> dict[str, IdArray]:
    """Return the ids of each feature; those of a list feature one bag after the other.

    Args:
        rows: Some rows.
        schema: Their columns.
        bags: The features whose columns are lists.
    """
    single = iter(rows.ids_SN)
    lists = iter(rows.bags)
    return {
        name: next(lists).values_L if name in bags else next(single) for name in schema.features
    }


def example_rows(source: Source, schema: Schema, rows: int) -> RawTable:
    """Return the first rows undecoded, under canonical names and without labels.

    They end before the first row of a file whose columns have other types. Hexadecimal ids that
    were stored as int32 are without their sign, as in a batch: JSON would not say that they had 32
    bits.
    """
    parts: list[pa.Table] = []
    for file, _, chunk in arrow_chunks(source.slice(0, rows)):
        columns = {name: chunk.column(file.columns[name]) for name in schema.inputs}
        columns = {name: one.cast(value_type(one.type)) for name, one in columns.items()}
        for name, unit in schema.times.items():
            if pa.types.is_temporal(columns[name].type):
                seconds = decode_times(columns[name], unit)  # whole numbers, which JSON has
                columns[name] = pa.array(seconds * TICKS[unit], mask=seconds == MISSING)
        for name in schema.dense:
            if pa.types.is_decimal(columns[name].type):
                columns[name] = columns[name].cast(pa.float64())
        for name in schema.sparse:
            columns[name] = with_values(columns[name], spelled_ids)
        for name in schema.hex:
            if pa.types.is_int32(columns[name].type):
                columns[name] = columns[name].view(pa.uint32())
        table = pa.table(columns)
        if parts and table.schema != parts[0].schema:
            break
        parts.append(table)
    return pa.concat_tables(parts).combine_chunks()


def plain_rows(table: RawTable) -> list[dict[str, Any]]:
    """Return rows as values for JSON: bytes as text, NaN and infinities as None."""
    in_bytes = table.cast(pa.schema([one.with_type(_bytes_type(one.type)) for one in table.schema]))
    return [
        {name: plain_value(value) for name, value in row.items()} for row in in_bytes.to_pylist()
    ]


def table_of(rows: Sequence[PlainRow], schema: Schema) -> RawTable:
    """Return the table of plain rows, with the columns of a schema.

    Raises:
        ValueError: A row lacks a column, or the values of a column do not share an Arrow type.
        KeyError: As for ValueError.
    """
    columns = {}
    for name in schema.inputs:
        column = _array([row[name] for row in rows])
        if pa.types.is_null(column.type):  # all values are missing, so the type is unknown
            numbers = (*schema.dense, *schema.id_weight_columns)
            kind = pa.float32() if name in numbers else pa.int64()
            kind = pa.list_(pa.float32()) if name in schema.vectors else kind
            column = pa.nulls(len(rows), kind)
        columns[name] = column
    return pa.table(columns)


def _array(values: list[Any]) -> pa.Array:
    """Return values as an array. Arrow takes all whole numbers for int64 unless told otherwise."""
    lists = any(isinstance(value, list) for value in values)
    each = chain.from_iterable(value or () for value in values) if lists else values
    if not any(type(one) is int and one >= 2**63 for one in each):
        return pa.array(values)
    return pa.array(values, pa.list_(pa.uint64()) if lists else pa.uint64())


def plain_value(value: Any) -> Any:
    """Return a value of Arrow as JSON has it: no bytes, and no number that is not finite."""
    if isinstance(value, list):
        return [plain_value(one) for one in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _bytes_type(arrow_type: pa.DataType) -> pa.DataType:
    """Return the type of a column with bytes in place of text, which may be other than UTF-8."""
    plain = value_type(arrow_type)
    if is_list(plain):
        return pa.large_list(_bytes_type(plain.value_type))
    return pa.large_binary() if is_text(plain) else plain


def table_rows(source: Source, schema: Schema, most: int | None) -> list[int]:
    """Return the number of rows of each feature's table, in schema order.

    A table of buckets or of a vocabulary has a row for each id. Others are sized by their ids.

    Count the distinct ids of the first 65,536 rows (or of all rows, if there are fewer), and of the
    first half of those. Distinct ids grow with a power of the number of rows (Heaps' law), which
    the two counts tell; so they tell the number of ids in all rows. The size is the next power of
    two of 4 times that, at least 2 and at most `most`.

    Args:
        source: The rows.
        schema: The columns of the rows.
        most: The largest allowed number of rows of a hashed table; None for tables that grow.
    """
    derived = {name: schema.id_column(name) for name in schema.features}
    exact = {name: one.rows for name, one in derived.items() if one and one.rows is not None}
    sample_rows = min(source.rows, COUNTED_ROWS)
    distinct_ids = {
        name: np.zeros(0, dtype=np.int64) for name in schema.features if name not in exact
    }
    few = _add(distinct_ids, source.slice(0, sample_rows // 2), schema)
    many = _add(distinct_ids, source.slice(sample_rows // 2, sample_rows), schema)
    for name, before, now in zip(distinct_ids, few, many, strict=True):
        power = min(math.log2(now / before), 1) if before else 1
        ids = int(now * (source.rows / max(sample_rows, 1)) ** power)
        exact[name] = rows_for(ids) if most is None else min(most, rows_for(ids))
    return [exact[name] for name in schema.features]


def rows_for(ids: int) -> int:
    """Return the rows of a table for a number of distinct ids: the next power of two of 4 times
    that.

    Without ids there are 2 rows, one of them for missing ids.
    """
    return 1 << max(ROWS_PER_ID * ids - 1, 1).bit_length()


def check_first_rows(source: Source, schema: Schema) -> None:
    """Decode labels, numbers, and ids that must be integers, of the first rows.

    Args:
        source: The rows.
        schema: The columns of the rows.

    Raises:
        DataError: A value is not an id, not a number, or no value of the label.
    """
    ids = [name for name in schema.sparse if schema.text_ids(name) is TextIds.INTEGERS]
    some = schema.only_raw(schema.dense, ids or schema.sparse[:1])  # a schema has at least one
    first = source.slice(0, FIRST_ROWS).only([*some.targets, *some.inputs])
    for _ in decoded_chunks(first, some):
        pass


def remarks(source: Source, schema: Schema) -> Iterator[str]:
    """Yield what is odd about the values of the first rows, one line for each oddity of a column.

    Args:
        source: The rows.
        schema: The columns of the rows.
    """
    some = source.slice(0, FIRST_ROWS).only([*schema.times, *schema.sparse])
    try:
        file, _, rows = next(arrow_chunks(some))
    except (StopIteration, DataError):  # whoever reads the rows names what is damaged
        return
    kinds = {
        name: value_type(rows.column(own_name).type) for name, own_name in file.columns.items()
    }
    for name in schema.times:
        of_day = [
            column.name
            for column in schema.derived
            if column.reads == (name,)
            and (column.kind is Derivation.HOUR or str(column.setting).startswith("day"))
        ]
        seconds = np.zeros(0, np.int64)
        with suppress(BadValue):
            seconds = decode_times(rows.column(file.columns[name]), schema.times[name])
        odd = seconds[(seconds != MISSING) & ((seconds < SOONEST) | (seconds > LATEST))]
        if len(odd) and not pa.types.is_temporal(kinds[name]):
            yield (
                f"column {name} holds times such as {np.datetime64(int(odd[0]), 's')}: is "
                f"dataset.times={{{name}: {schema.times[name]}}} the unit of its numbers?"
            )
        if pa.types.is_date(kinds[name]) and of_day:
            yield (
                f"column {name} holds dates, which have no time of day: {', '.join(of_day)} say "
                "nothing; leave them out, dataset.time_features=[weekday,week]"
            )
    for name, sign in schema.separator.items():
        if not is_text(kinds[name]):
            yield (
                f"dataset.separator={{{name}: '{sign}'}} has no effect, because column {name} "
                f"holds {kinds[name]} and no text: leave it out"
            )
    for name in schema.sparse:
        if name not in schema.separator and schema.text_ids(name) is TextIds.HASHED:
            yield from _of_texts(file.columns[name], rows.column(file.columns[name]))


def _of_texts(name: str, column: pa.Array) -> Iterator[str]:
    """Yield a remark for each kind of text in the first rows that looks like another id."""
    if not is_text(id_type(column.type)):
        return
    column = column.flatten() if is_list(column.type) else column
    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    texts = as_text(column)
    for pattern, advice in _ADVICE.items():
        at = pc.index(pc.match_substring_regex(texts, pattern), True).as_py()
        if at >= 0:
            yield f"column {name} holds the text {shown(texts[at])}, {advice}"


def frequent_values(
    source: Source, schema: Schema, column: str, most: int
) -> list[tuple[str, int]]:
    """Return text and id of the most frequent values of a sparse feature of single ids, the most
    frequent first.

    Rare values are forgotten where there are more than `COUNTED_VALUES` of them. The id is that of
    a batch: a value of a vocabulary has its place, and a value without a place is left out.

    Args:
        source: The rows.
        schema: The columns of the rows.
        column: The feature.
        most: The largest number of values.

    Raises:
        DataError: The column has lists of ids.
    """
    counts: Counter[int] = Counter()
    texts: dict[int, str] = {}
    for file, _, chunk in arrow_chunks(source.only([column])):
        values = chunk.column(file.columns[column])
        values = values.cast(value_type(values.type))
        if is_list(values.type):
            raise DataError(
                f"metrics.by={column}: has lists of ids, and a slice is one id: name another column"
            )
        ids_N = decode_ids(values, schema.text_ids(column))  # of the column, as types decide
        id_counts = np.unique(ids_N, return_index=True, return_counts=True)
        for one, first, count in zip(*(part.tolist() for part in id_counts), strict=True):
            counts[one] += count
            if one not in texts:
                texts[one] = str(plain_value(values[first].cast(_bytes_type(values.type)).as_py()))
        if len(counts) > COUNTED_VALUES:
            counts = Counter(dict(counts.most_common(COUNTED_VALUES // 2)))
            texts = {one: texts[one] for one in counts}
    known = schema.vocabularies.get(column)
    numbers: dict[int, str] = {}
    for one, _ in counts.most_common(most):
        place = one if known is None else int(places(np.array([one]), known)[0])
        if known is None or place != MISSING:
            numbers.setdefault(place, "missing" if one == MISSING else texts[one])
    return [(text, number) for number, text in numbers.items()]


def _add(distinct_ids: dict[str, np.ndarray], source: Source, schema: Schema) -> list[int]:
    """Add the ids of some rows to the ids seen so far.

    Returns:
        The number of distinct ids of each feature so far, without missing ids.
    """
    ids_only = replace(schema.unlabelled(), vectors={})
    ids_only = ids_only if schema.derived else replace(ids_only, dense=())
    for rows in decoded_chunks(source.only(ids_only.inputs), ids_only) if distinct_ids else ():
        for name, ids in ids_by_feature(rows, schema, source.bags).items():
            if name in distinct_ids:
                distinct_ids[name] = np.union1d(distinct_ids[name], ids)
    return [int((known != MISSING).sum()) for known in distinct_ids.values()]


# ---- fits of derived columns, on the training rows

AT_ONCE = 1 << 20  # values that wait until they are added to the counts
Values = npt.NDArray[np.generic]


class ValueCounts:
    """The number of occurrences of each value of a column."""

    def __init__(self) -> None:
        self._parts: list[tuple[Values, npt.NDArray[np.int64]]] = []
        self._waiting = 0

    def add(self, values: Values) -> None:
        """Count some values."""
        distinct_values, counts = np.unique(values, return_counts=True)
        self._parts.append((distinct_values, counts.astype(np.int64)))
        self._waiting += len(distinct_values)
        if self._waiting > max(AT_ONCE, 2 * len(self._parts[0][0])):
            self.result()

    def result(self) -> tuple[Values, npt.NDArray[np.int64]]:
        """Return the values so far, ascending, and the number of each."""
        if not self._parts:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if len(self._parts) > 1:
            values, place = np.unique(
                np.concatenate([part_values for part_values, _ in self._parts]), return_inverse=True
            )
            counts = np.zeros(len(values), dtype=np.int64)
            np.add.at(
                counts, place, np.concatenate([part_counts for _, part_counts in self._parts])
            )
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
    of_numbers = (Derivation.BUCKETS, Derivation.PIECEWISE)
    for kinds, fit in ((of_numbers, _fit_edges), ((Derivation.VOCABULARY,), _fit_vocabularies)):
        some = [c for c in columns if c.kind in kinds and c.values is None]
        before = [c for c in columns if c.values is not None]
        fitted_columns = {
            c.key: c for c in fit(some, replace(schema, derived=tuple(before)), source)
        }
        columns = [fitted_columns.get(c.key, c) for c in columns]
        if fit is _fit_edges:
            columns = [_without_rows(c) for c in columns]
    return replace(schema, derived=tuple(columns))


def _without_rows(column: DerivedColumn) -> DerivedColumn:
    """Return a column whose values do not depend on rows as fitted."""
    if column.values is not None:
        return column
    if column.kind in (Derivation.SINE, Derivation.COSINE):
        return replace(column, values=np.array([column.period], dtype=np.float32))
    if column.kind in (Derivation.MISSING, Derivation.CROSS, Derivation.HOUR, Derivation.WEEKDAY):
        return replace(column, values=np.zeros(0, dtype=np.int64))
    return column


def _fit_edges(
    columns: Sequence[DerivedColumn], schema: Schema, source: Source
) -> list[DerivedColumn]:
    dense = tuple(dict.fromkeys(c.reads[0] for c in columns if c.setting != LOG))
    counts = {name: ValueCounts() for name in dense}
    if dense:
        collate = Collate(schema.unlabelled().only_raw(dense, schema.sparse), source.bags, "none")
        for file, first, chunk in arrow_chunks(source.only(dense)):
            rows_N = first + np.arange(chunk.num_rows)
            numbers_IN = collate.numbers(chunk, file.columns, file.path, rows_N)
            for name, values_N in zip(dense, numbers_IN, strict=True):
                counts[name].add(values_N[~np.isnan(values_N)])
    return [replace(c, values=_edges_of(c, counts.get(c.reads[0]))) for c in columns]


def _edges_of(column: DerivedColumn, counts: ValueCounts | None) -> npt.NDArray[np.float32]:
    if column.setting == LOG:
        return log_edges()
    assert counts is not None
    values, number = counts.result()
    if column.kind is Derivation.BUCKETS:
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
    counts = {c.reads: ValueCounts() for c in columns}
    if columns:
        for rows in decoded_chunks(source, schema.unlabelled()):
            ids = ids_by_feature(rows, schema, source.bags)
            for reads, counter in counts.items():
                for name in reads:
                    counter.add(ids[name])
    vocabularies = []
    for column in columns:
        values, number = counts[column.reads].result()
        vocabularies.append(replace(column, values=values[number >= int(column.setting)]))
    return vocabularies
