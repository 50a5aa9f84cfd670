"""Decode record batches to rows, and collate rows to a `Batch`.

Raw rows of a caller, such as a request to a server, are read like training rows: with the same
schema, the same decoder of ids and numbers, and the same transform.

The ids of a batch are keys-major, because each table needs its ids together:

    rows   r0: a0 b0   r1: a1 b1      ->      values_L  a0 a1 b0 b1      lengths_FB  1 1 1 1

Single-valued features always have length 1. A missing id has the value MISSING, for which the
table's id rule has an own row. Errors name file, column and row.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from recapp.dataset.arrow_types import has_views, is_list
from recapp.dataset.decode import (
    BadValue,
    ColumnPlaces,
    Float32Array,
    Int64Array,
    decode_finite,
    decode_ids,
    decode_labels,
    decode_numbers,
    decode_times,
    decode_vectors,
)
from recapp.dataset.decode_bags import decode_bags, decode_id_weights, padding_id
from recapp.dataset.nested_columns import own_column, part_of, with_parts
from recapp.dataset.rows import DecodedColumns, FeatureBags, IdArray, Rows, join
from recapp.dataset.schema import Schema
from recapp.errors import ConfigError, DataError, first_line, suggest
from recapp.sparse.keyed_jagged_tensor import (
    Batch,
    KeyedJaggedTensor,
)
from recapp.sparse.missing_ids import MISSING


# The functions of dense columns.
#
# numpy's float32 logarithm depends on the instructions of the CPU, by up to two units in the last
# place. Its float64 logarithm depends on them as well, but rounds to the same float32: this was
# tested for every float32, with AVX-512 and with the C library. So machines agree, and other
# programs can compute the same bits (`recapp/inference/cpp`).
#
# A missing number is 0 before the transform, so log3 maps it to log 3, like the scripts that use
# this rule.
def _in_64_bits(function: np.ufunc, values: Float32Array) -> Float32Array:
    """Replace values by those of a function that is computed in float64, block by block."""
    result: Float32Array = function(values, out=values, dtype=np.float64, casting="same_kind")
    return result


DENSE_TRANSFORMS: dict[str, Callable[[Float32Array], Float32Array]] = {
    "log1p": lambda values: _in_64_bits(np.log1p, np.maximum(values, 0)),
    "log3": lambda values: _in_64_bits(np.log, np.maximum(values, -2) + np.float32(3)),
    "none": lambda values: values,
}


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A record batch while it is decoded.

    Args:
        batch: The columns, under the file's own names.
        columns: Canonical name -> the file's own name.
        path: The file of the rows.
        rows_N: The number of each row in the file, [N].
        places: Where the columns lie.
    """

    batch: pa.RecordBatch
    columns: Mapping[str, str]
    path: str
    rows_N: Int64Array
    places: ColumnPlaces

    def read(
        self,
        names: Sequence[str],
        dtype: npt.DTypeLike,
        decode: Callable[..., npt.NDArray[Any]] | None,
        text_of: Callable[[str], Any],
        absent: float = MISSING,
    ) -> Any:
        """Return a value for each column and row, [len(names), N]; None if a column needs `decode`
        but there is none.

        Args:
            names: The columns.
            dtype: The type of the values.
            decode: Decodes a column that is none of the usual; its argument `text` is the reading
                of text.
            text_of: Returns the reading of text for a column.
            absent: The value where one is missing.

        Raises:
            DataError: As for `decoded`.
        """
        matrix = np.empty((len(names), self.batch.num_rows), dtype=dtype)
        texts = [text_of(name) for name in names]
        own_names = [self.columns[name] for name in names]
        for number in self.places.write(own_names, texts, absent, matrix):
            if decode is None:
                return None
            matrix[number] = self.decoded(names[number], partial(decode, text=texts[number]))
        return matrix

    def decoded(self, name: str, decode: Callable[[pa.Array], Any]) -> Any:
        """Decode a column.

        Raises:
            DataError: A value cannot be read; the error names file, column and row.
        """
        own = self.columns[name]
        try:
            return decode(self.batch.column(own))
        except BadValue as error:
            raise DataError(
                f"{self.path}: column {own}, row {int(self.rows_N[error.index])} {error.problem}"
            ) from None


class BatchColumns(NamedTuple):
    """The columns of a batch, as its memory has them.

    Args:
        dense_BI: Transformed numbers, [B, I].
        ids_L: The ids of all features, key after key, [L].
        weights_L: The weights of the ids, [L], 1 in features without; None if all are.
        lengths: The number of ids of each feature and row, [F B]; one number if all are 1.
        per_F: The number of ids of each feature.
        targets_TB: Labels and weights, [T, B].
        row_numbers_B: The place of each row in the data set, [B]; None where nobody wants it.
    """

    dense_BI: Tensor
    ids_L: Tensor
    weights_L: Tensor | None
    lengths: Tensor
    per_F: list[int]
    targets_TB: Tensor
    row_numbers_B: Tensor | None


@dataclass(frozen=True, slots=True)
class Collate:
    """Decode record batches to `Rows`, and join `Rows` to a `Batch`, by one schema.

    Args:
        schema: The columns and their uses.
        bags: The sparse features with bags of ids, as `Schema.bags` tells.
        transform: A key of DENSE_TRANSFORMS.
        numbered: Whether batches have the numbers of their rows.

    Raises:
        DataError: A cross reads a column of lists, or a column of single ids has padding.
        ConfigError: No transform has this name.
    """

    schema: Schema
    bags: frozenset[str]
    transform: str
    numbered: bool = False

    def __post_init__(self) -> None:
        self.schema.check_bags(self.bags)
        if self.transform not in DENSE_TRANSFORMS:
            raise ConfigError(
                f"dataset.dense_transform={self.transform}: unknown; "
                f"{suggest(self.transform, DENSE_TRANSFORMS)}"
            )

    @property
    def singles(self) -> tuple[str, ...]:
        """The single-valued sparse features, in schema order."""
        return tuple(name for name in self.schema.sparse if name not in self.bags)

    @property
    def single_features(self) -> tuple[str, ...]:
        """The single-valued features, derived ones behind those of the schema."""
        return tuple(name for name in self.schema.features if name not in self.bags)

    def rows(
        self,
        record_batch: pa.RecordBatch,
        columns: dict[str, str],
        path: str,
        rows_N: Int64Array,
        in_32_bits: bool = False,
    ) -> Rows:
        """Decode a record batch.

        Args:
            record_batch: The columns, under the file's own names.
            columns: Canonical name -> the file's own name.
            path: The file of the rows, for error messages.
            rows_N: The number of each row in the file, [N], for error messages.
            in_32_bits: Whether arrays of ids, all of whose ids fit, have 32 bits.

        Raises:
            DataError: A value cannot be read; the text names file, column and row.
        """
        schema = self.schema
        chunk = _Chunk(record_batch, columns, path, rows_N, ColumnPlaces.of(record_batch))
        derives = bool(schema.derived)
        dense_IN = chunk.read(
            schema.dense,
            np.float32,
            _numbers_or_nan if derives else lambda column, text: decode_numbers(column)[0],
            lambda name: None,
            math.nan if derives else 0.0,
        )
        ids_SN: Any = None
        if in_32_bits and not derives:
            absent = np.iinfo(np.int32).min
            ids_SN = chunk.read(self.singles, np.int32, None, schema.text_ids, absent)
        if ids_SN is None:
            ids_SN = chunk.read(self.singles, np.int64, decode_ids, schema.text_ids)
        bags = tuple(self._bags_of(chunk, name) for name in schema.sparse if name in self.bags)
        targets_TN = np.empty((len(schema.targets), record_batch.num_rows), dtype=np.float32)
        for number, name in enumerate(schema.targets):
            decode: Callable[[pa.Array], Float32Array]
            decode = partial(decode_labels, least=schema.label_from)
            if name in schema.weight_columns:
                decode = partial(decode_finite, use="weight", least=0)
            elif name in schema.soft_labels:
                decode = partial(decode_finite, use="label", least=0, most=1)
            elif name in schema.real_labels:
                decode = partial(decode_finite, use="label")
            targets_TN[number] = chunk.decoded(name, decode)
        vectors = [
            np.ascontiguousarray(chunk.decoded(name, partial(decode_vectors, width=width)).T)
            for name, width in schema.vectors.items()
        ]
        if derives:
            times = {
                name: chunk.decoded(name, partial(decode_times, unit=unit))
                for name, unit in schema.times.items()
            }
            return self._derived(dense_IN, targets_TN, ids_SN, bags, times, vectors)
        numbers_IN = DENSE_TRANSFORMS[self.transform](dense_IN)
        if vectors:
            numbers_IN = np.concatenate([numbers_IN, *vectors])
        return Rows(numbers_IN, targets_TN, ids_SN, bags)

    def _bags_of(self, chunk: _Chunk, name: str) -> FeatureBags:
        schema = self.schema
        separator = schema.separator.get(name)
        weights = None
        if column := schema.id_weights.get(name):
            own = chunk.columns[column]
            decode = partial(decode_id_weights, name=own, separator=separator)
            weights = chunk.decoded(column, decode)
        ids = partial(
            decode_bags,
            text=schema.text_ids(name),
            null_is_id=schema.null_is_id(name),
            padding=padding_id(schema, name),
            separator=separator,
            weights=weights,
        )
        id_L, length_N, weight_L = chunk.decoded(name, ids)
        if weight_L is None and schema.id_weights:
            weight_L = np.ones(len(id_L), np.float32)
        return FeatureBags.of(id_L, length_N, weight_L)

    def numbers(
        self, record_batch: pa.RecordBatch, columns: dict[str, str], path: str, rows_N: Int64Array
    ) -> Float32Array:
        """Decode the dense columns alone, [I, N]: not transformed, NaN where missing.

        Arguments and errors are those of `rows`.
        """
        chunk = _Chunk(record_batch, columns, path, rows_N, ColumnPlaces.of(record_batch))
        numbers_IN: Float32Array = chunk.read(
            self.schema.dense, np.float32, _numbers_or_nan, lambda name: None, math.nan
        )
        return numbers_IN

    def _derived(
        self,
        numbers_IN: Float32Array,
        targets_TN: Float32Array,
        ids_SN: Int64Array,
        bags: tuple[FeatureBags, ...],
        times: dict[str, Int64Array],
        vectors: Sequence[Float32Array],
    ) -> Rows:
        schema = self.schema
        columns = DecodedColumns(
            dict(zip(schema.dense, numbers_IN, strict=True)),
            dict(zip(self.singles, ids_SN, strict=True)),
            dict(zip((name for name in schema.sparse if name in self.bags), bags, strict=True)),
            times,
        )
        columns.derive(schema.derived)
        known_IN = np.nan_to_num(numbers_IN, copy=True, nan=0.0)
        more = [columns.numbers[c.name] for c in schema.derived if c.is_new_number]
        return Rows(
            np.vstack([DENSE_TRANSFORMS[self.transform](known_IN), *more, *vectors]),
            targets_TN,
            np.stack([columns.ids[name] for name in self.single_features])
            if self.single_features
            else ids_SN,
            tuple(columns.bags.values()),
        )

    def no_rows(self) -> Rows:
        """Return zero rows, for the empty batches that pad an evaluation."""
        empty = np.zeros(0, dtype=np.int64)
        return Rows(
            np.zeros((len(self.schema.numbers), 0), dtype=np.float32),
            np.zeros((len(self.schema.targets), 0), dtype=np.float32),
            np.zeros((len(self.single_features), 0), dtype=np.int64),
            tuple(FeatureBags.of(empty, empty, empty.astype(np.float32)) for _ in self.bags),
            empty if self.numbered else None,
        )

    def batch(self, parts: list[Rows]) -> Batch:
        """Join the rows of `parts`, in order, to one `Batch`; without parts the batch is empty."""
        return self.batch_of(join(parts) if parts else self.no_rows())

    def batch_of(self, rows: Rows) -> Batch:
        """Return rows as a batch, which takes over their memory where it can."""
        count = len(rows)
        single = iter(rows.ids_SN)
        bags = iter(rows.bags)
        parts: list[IdArray] = []
        weights: list[Any] = []
        length_FB = np.ones((len(self.schema.features), count if rows.bags else 0), np.int64)
        for length_B, name in zip(length_FB, self.schema.features, strict=True):
            if name in self.bags:
                bag = next(bags)
                length_B[:] = np.diff(bag.offsets_N1)
                parts.append(bag.values_L)
                weights.append(bag.weight_L)
            else:
                parts.append(next(single))
                weights.append(np.ones(count, np.float32))
        ids_L = np.concatenate(parts) if rows.bags else rows.ids_SN.reshape(-1)
        # one number, expanded: who reads lengths sees that they are equal
        lengths = torch.from_numpy(length_FB.reshape(-1) if rows.bags else np.ones(1, np.int64))
        numbers_N = rows.row_numbers_N
        return self.made(
            BatchColumns(
                torch.from_numpy(np.ascontiguousarray(rows.numbers_IN.T)),
                torch.from_numpy(ids_L),
                torch.from_numpy(np.concatenate(weights)) if self.schema.id_weights else None,
                lengths,
                [len(part) for part in parts],
                torch.from_numpy(rows.targets_TN),
                None if numbers_N is None else torch.from_numpy(numbers_N),
            )
        )

    def made(self, columns: BatchColumns) -> Batch:
        """Return the columns of a batch as one, which takes over their memory."""
        schema = self.schema
        rows = len(columns.dense_BI)
        targets = dict(zip(schema.targets, columns.targets_TB, strict=True))
        lengths = columns.lengths
        return Batch(
            columns.dense_BI,
            KeyedJaggedTensor.unchecked(
                list(schema.features),
                columns.ids_L,
                columns.weights_L,
                lengths.expand(len(columns.per_F) * rows) if len(lengths) == 1 else lengths,
                rows,
                columns.per_F,
            ),
            {name: targets[name] for name in schema.labels},
            {name: targets[column] for name, column in schema.weights.items()},
            columns.row_numbers_B,
        )


def _numbers_or_nan(column: pa.Array, text: object) -> Float32Array:
    """Return the numbers of a column, [N]; NaN where they are missing."""
    numbers, missing = decode_numbers(column)
    return numbers if missing is None else np.where(missing, np.float32(np.nan), numbers)


def join_batches(parts: list[Batch]) -> Batch:
    """Return one batch with the rows of several batches of the same features, in their order."""
    if len(parts) == 1:
        return parts[0]
    keys = parts[0].sparse.keys()

    def joined(flat: list[Tensor]) -> Tensor:
        of_keys = [
            torch.split(x, p.sparse.length_per_key()) for x, p in zip(flat, parts, strict=True)
        ]
        return torch.cat([*chain.from_iterable(zip(*of_keys, strict=True))])

    lengths_FB = torch.cat([part.sparse.lengths().view(len(keys), -1) for part in parts], 1)
    values = [part.sparse.values() for part in parts]
    of_ids = [x for part in parts if (x := part.sparse.weights_or_none()) is not None]
    sparse = KeyedJaggedTensor(
        list(keys), joined(values), joined(of_ids) if of_ids else None, lengths=lengths_FB.view(-1)
    )
    labels, weights = (
        {name: torch.cat([target_of(part)[name] for part in parts]) for name in target_of(parts[0])}
        for target_of in (attrgetter("labels"), attrgetter("weights"))
    )
    numbers = [part.row_numbers_B for part in parts if part.row_numbers_B is not None]
    return Batch(
        torch.cat([part.dense_BI for part in parts]),
        sparse,
        labels,
        weights,
        torch.cat(numbers) if numbers else None,
    )


# ---- rows of a caller

# Raw columns, under names that a schema knows; other columns are skipped.
RawTable: TypeAlias = pa.Table

SOURCE = "the rows"  # the name in errors in place of a file


def as_table(rows: Any) -> RawTable:
    """Return raw rows as an Arrow table.

    Args:
        rows: A table, a record batch, a data frame (of pandas, polars or another library with
            `__arrow_c_stream__`), or a mapping of names to columns. NaN in lists and arrays of a
            mapping is a missing value, as in data frames.

    Raises:
        DataError: The rows have another type, or their columns have different lengths.
    """
    if isinstance(rows, pa.Table):
        return rows
    try:
        if isinstance(rows, Mapping):
            rows = {
                name: values
                if isinstance(values, pa.Array | pa.ChunkedArray)
                else pa.array(values, from_pandas=True)
                for name, values in rows.items()
            }
        return pa.table(rows)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"rows of type {type(rows).__name__} are no table ({first_line(error)}): pass an Arrow "
            "table, a data frame, or a mapping of names to columns"
        ) from None


class RawRows:
    """Decode raw rows by the schema of a model.

    Args:
        schema: The columns of the model; its labels are not read.
        transform: The transform of dense numbers, a key of
            DENSE_TRANSFORMS.
    """

    def __init__(self, schema: Schema, transform: str) -> None:
        self.schema = schema.unlabelled()
        self.transform = transform
        self._last: tuple[pa.Schema, dict[str, tuple[str, str]], list[str], Collate] | None = None

    def batch(self, rows: Any) -> Batch:
        """Return rows as a batch on the CPU, without labels.

        A sparse feature with a column of lists is a bag; any other column has one id, or none, for
        each row. A null is an empty bag in features that had bags in training, and one missing id
        in the others.

        Args:
            rows: Raw columns, as for `as_table`; they may have no rows.

        Raises:
            DataError: `rows` is not a table, or a column is missing, has an unreadable type, or has
                an unreadable value; the error names the column, and the row counted from 0.
        """
        table = as_table(rows)
        columns, changed, collate = self._of(table.schema)
        named = {name: table[above] for name, (above, _) in columns.items()}
        for name in changed:
            above, own = columns[name]
            empty = pa.nulls(0, named[name].type)
            parts = [part_of(chunk, above, own) for chunk in (empty, *named[name].chunks)]
            named[name] = pa.chunked_array(parts)
        own_names = dict(zip(columns, columns, strict=True))
        decoded = []
        first = 0
        for batch in pa.table(named).combine_chunks().to_batches():
            numbers_N = np.arange(first, first + batch.num_rows, dtype=np.int64)
            decoded.append(collate.rows(batch, own_names, SOURCE, numbers_N))
            first += batch.num_rows
        return collate.batch(decoded)

    def no_rows(self) -> Batch:
        """Return a batch without rows."""
        return Collate(self.schema, frozenset(), self.transform).batch([])

    def _of(self, arrow_schema: pa.Schema) -> tuple[dict[str, tuple[str, str]], list[str], Collate]:
        """Return three facts about rows with these columns: where each is, as the name of a column
        and its own, the same or a part; the columns that are parts or have view types; and the
        decoder.

        The result for the last columns is cached, because callers send rows with the same columns
        again and again. The cache is read and replaced as a whole, because other threads may read
        other rows meanwhile.
        """
        last = self._last
        if last is None or not last[0].equals(arrow_schema):
            types = with_parts(arrow_schema, self.schema.inputs)
            columns = self.schema.resolve(types, SOURCE, types.names[len(arrow_schema) :])
            kinds = {name: types.field(own_name).type for name, own_name in columns.items()}
            lists = frozenset(name for name in self.schema.sparse if is_list(kinds[name]))
            bags = self.schema.bags(lists)
            where = {name: (own_column(arrow_schema, own), own) for name, own in columns.items()}
            changed = [
                name
                for name, (above, own) in where.items()
                if above != own or has_views(kinds[name])
            ]
            last = (arrow_schema, where, changed, Collate(self.schema, bags, self.transform))
            self._last = last
        return last[1:]
