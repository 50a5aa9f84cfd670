"""A source of rows: files, their row groups, and the number of rows of each, before any row is
read.

    Source  =  segments in file order
               file 0: row group 0 [0, 1718)    file 1: row group 0 [0, 1655)    ..

A segment is a row group, or the part of a row group after a cut. This file reads no values. A
source can be cut at any row (`slice`, `split`), so that "the first 6/7" of a log is exact without
rewriting its files.

`VectorRows` reads other files, the start values of a table:

    id        vector
    "DE"      [0.1, -0.4, 0.2]        list or fixed_size_list of floats
    "FR"      [0.3, 0.0, -0.1]

Shapes: N rows of a chunk, D columns of a vector.
"""

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from recapp.dataset.arrow_types import is_id, is_list, value_type
from recapp.dataset.data_file import (
    DataFile,
    Facts,
    Format,
    UnreadableFileError,
    chunks,
    facts_of,
    refuse_bad_rows,
    with_partitions,
)
from recapp.dataset.data_settings import FileRules
from recapp.dataset.decode import BadValue, Int64Array, decode_ids, refuse
from recapp.dataset.files import file_names, given_paths
from recapp.dataset.formats import FORMATS, SUFFIXES, Formats, formats_of
from recapp.dataset.nested_columns import leaves_of, with_parts
from recapp.dataset.schema import Schema, TextIds
from recapp.dataset.storage import Stamp, stamp_of
from recapp.errors import ConfigError, DataError
from recapp.settings.uris import is_uri

OPENED_AT_ONCE = 16  # files of other places


class Segment(NamedTuple):
    """Consecutive rows of one row group.

    Args:
        file: The number of the file.
        row_group: The number of the row group in it.
        first: The first row within the row group.
        rows: The number of rows.
    """

    file: int
    row_group: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of some files, in file order.

    Args:
        files: The files.
        segments: The parts of their row groups that belong to the source.
        bags: The sparse features with many ids per row, as `Schema.bags` tells.
    """

    files: tuple[DataFile, ...]
    segments: tuple[Segment, ...]
    bags: frozenset[str]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(segment.rows for segment in self.segments)

    @property
    def types(self) -> pa.Schema:
        """The names and types of the columns that are read from the first file."""
        file = self.files[0]
        types = with_parts(with_partitions(file.types, file.path), file.asked)
        return pa.schema([types.field(name) for name in file.asked])

    def slice(self, first: int, last: int) -> "Source":
        """Return the rows [first, last) of this source.

        A cut row group becomes a shorter segment.
        """
        segments = []
        offset = 0
        for file, row_group, start, rows in self.segments:
            left = max(first - offset, 0)
            right = min(last - offset, rows)
            if left < right:
                segments.append(Segment(file, row_group, start + left, right - left))
            offset += rows
        return Source(self.files, tuple(segments), self.bags)

    def only(self, features: Collection[str]) -> "Source":
        """Return the same rows with only the columns of some features.

        Args:
            features: Canonical names.
        """
        narrowed = (
            file._replace(
                columns={name: column for name, column in file.columns.items() if name in features}
            )
            for file in self.files
        )
        return Source(tuple(narrowed), self.segments, self.bags & frozenset(features))


def open_source(
    paths: str | Sequence[str], schema: Schema, *, setting: str = "dataset.path"
) -> Source:
    """Open the files that `paths` names.

    Args:
        paths: A path or a list of them, as in `recapp.dataset.files`; a list keeps its order.
        schema: The required columns of every file.
        setting: The setting's name, for error messages.

    Raises:
        DataError: A path does not exist or has no data, or a file is not whole or lacks a column of
            `schema`.
    """
    names = file_names(paths, setting=setting, formats=formats_of(schema.files))
    source = open_files(names, schema, setting=setting)
    if not source.segments:
        raise DataError(
            f"{setting}={given_paths(paths)[0]}: {len(names)} file(s) without a single row"
        )
    return source


def open_files(names: Sequence[str], schema: Schema, *, setting: str = "dataset.path") -> Source:
    """Open files by name; they may have no rows.

    Args:
        names: The files.
        schema: The required columns of every file.
        setting: The setting's name, for error messages.

    Raises:
        DataError: A file is not whole, or lacks a column of `schema`.
    """
    files: list[DataFile] = []
    segments: list[Segment] = []
    bags = frozenset[str]()
    bad: list[str] = []
    for file, own_bags, groups in _open_each(names, schema, setting):
        bad += [f"{file.path}: {row}" for row in file.bad]
        if bad:
            refuse_bad_rows(bad[-1], len(bad), schema.files.bad_rows)
        if not file.columns:
            continue
        if files and own_bags != bags:
            one = min(own_bags ^ bags)
            here, there = ("a list", "one id") if one in own_bags else ("one id", "a list")
            raise DataError(
                f"{file.path}: column {file.columns[one]} ({one}) holds {here} a row, "
                f"in {names[0]} {there}; convert one of them"
            )
        bags = own_bags
        segments += [
            Segment(len(files), group, 0, rows) for group, rows in enumerate(groups) if rows
        ]
        files.append(file)
    return Source(tuple(files), tuple(segments), bags)


def open_raw(
    paths: str | Sequence[str],
    rules: FileRules | None = None,
    *,
    setting: str = "dataset.path",
    names: Sequence[str] = (),
) -> Source:
    """Open files with all of their columns, under the files' own names; no schema is needed.
    Nested columns are those of their fields.

    Args:
        paths: A path or a list of them, as for `open_source`.
        rules: How the files are read.
        setting: The setting's name, for error messages.
        names: Further columns, where nested ones have them: values of maps.

    Raises:
        DataError: A path does not exist or has no data, a file is not whole, or the files have
            different columns.
    """
    files: list[DataFile] = []
    segments: list[Segment] = []
    rules = rules or FileRules()
    formats = formats_of(rules)
    bad: list[str] = []
    for number, name in enumerate(file_names(paths, setting=setting, formats=formats)):
        fix = "write it again or leave it out"
        format, stamp, (types, rows, odd) = _opened(name, setting, fix, formats)
        types = with_partitions(types, name)
        if len(own := dict.fromkeys(types.names)) < len(types.names):
            twice = next(one for one in own if types.names.count(one) > 1)
            raise DataError(f"{name}: several columns are called {twice}; rename all but one")
        bad += [f"{name}: {row}" for row in odd]
        if bad:
            refuse_bad_rows(bad[-1], len(bad), rules.bad_rows)
        leaves = [leaf for field in types for leaf in leaves_of(field.name, field.type)]
        known = with_parts(types, names).names
        columns = {one: one for one in (*leaves, *names) if one in known}
        if files and columns != files[0].columns:
            odd = min(columns.keys() ^ files[0].columns.keys())
            here, there = (name, files[0].path)[:: 1 if odd in columns else -1]
            raise DataError(
                f"{setting}: {here} has a column {odd}, {there} has none; name files of one kind"
            )
        files.append(DataFile(name, format, stamp, columns, tuple(accumulate(rows, initial=0))))
        segments += [Segment(number, group, 0, count) for group, count in enumerate(rows) if count]
    if not segments:
        raise DataError(f"{setting}={given_paths(paths)[0]}: has no rows")
    return Source(tuple(files), tuple(segments), frozenset())


def split(source: Source, val_share: Fraction, written: object = None) -> tuple[Source, Source]:
    """Split a source, in file order, into training rows and validation rows.

    Training gets the first floor(rows * (1 - val_share)) rows.

    Args:
        source: The rows.
        val_share: The share of validation rows, from 0 to less than 1.
        written: The user's text of the share, for errors.

    Raises:
        ConfigError: The share leaves no training rows.
    """
    rows_train = int(source.rows * (1 - val_share))
    if rows_train == 0:
        raise ConfigError(
            f"dataset.val_share={written or val_share}: leaves none of {source.rows} rows to train "
            "on; choose a smaller share"
        )
    return source.slice(0, rows_train), source.slice(rows_train, source.rows)


def _opened(
    name: str, setting: str, fix: str, formats: Formats = FORMATS
) -> tuple[Format, Stamp, Facts]:
    """Return the format of a file, its stamp and its facts."""
    format = formats.of(name)
    try:
        stamp = stamp_of(name)
        return format, stamp, facts_of(format, name, stamp)
    except (OSError, UnreadableFileError) as error:
        unknown = "" if formats.is_data(name) else f"in no known format ({SUFFIXES}), and "
        raise DataError(
            f"{setting}: {name} is {unknown}not a whole {format.name} file ({error}); {fix}"
        ) from error


def _open_each(
    names: Sequence[str], schema: Schema, setting: str
) -> Iterator[tuple[DataFile, frozenset[str], Sequence[int]]]:
    """Open files in their order; several at once where each takes some trips to a server."""
    formats = formats_of(schema.files)
    if not any(map(is_uri, names)):
        yield from (_open_file(name, schema, formats, setting) for name in names)
        return
    with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
        yield from pool.map(lambda name: _open_file(name, schema, formats, setting), names)


def _open_file(
    name: str, schema: Schema, formats: Formats, setting: str
) -> tuple[DataFile, frozenset[str], Sequence[int]]:
    """Open a file; return it, its features with lists, and the rows of each row group. A file
    without rows in which nothing names columns has none.
    """
    fix = "write it again or leave it out"
    format, stamp, (types, rows, _) = _opened(name, setting, fix, formats)
    if not types.names and not any(rows):
        return DataFile(name, format, stamp, {}, (0,)), frozenset(), ()
    own_names = types.names
    asked = (*schema.targets, *schema.inputs)
    types = with_parts(with_partitions(types, name), asked)
    columns = schema.resolve(types, name, types.names[len(own_names) :])
    lists = (feature for feature in schema.sparse if is_list(types.field(columns[feature]).type))
    starts = tuple(accumulate(rows, initial=0))
    return DataFile(name, format, stamp, columns, starts), schema.bags(frozenset(lists)), rows


def arrow_chunks(source: Source) -> Iterator[tuple[DataFile, int, pa.RecordBatch]]:
    """Yield the rows of a source as Arrow record batches, decompressed but not converted.

    Yields:
        The file, the number of a chunk's first row in it, and the chunk.
    """
    for number, row_group, first, rows in source.segments:
        file = source.files[number]
        for begin, chunk in chunks(file, row_group, first + rows):
            skipped = max(first - begin, 0)
            if skipped < chunk.num_rows:
                yield (
                    file,
                    file.starts[row_group] + begin + skipped,
                    chunk.slice(skipped, first + rows - begin - skipped),
                )


# ---- vectors of ids: the start values of a table

ID = "id"
VECTOR = "vector"
Vectors = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class VectorRows:
    """Ids and their vectors in one file or several.

    Args:
        files: The files, opened.
        dim: The number of columns of each vector.
        setting: The setting that names the files, for errors.
    """

    files: tuple[DataFile, ...]
    dim: int
    setting: str

    @staticmethod
    def of(path: str, names: Sequence[str], dim: int, setting: str) -> "VectorRows":
        """Open files, and find their columns.

        Args:
            path: A file, a directory or a glob.
            names: Names that the column of ids may have, beside `id`.
            dim: The number of columns of each vector.
            setting: The setting that names the path, for errors.

        Raises:
            DataError: There are no such files, or a file is not readable or lacks a column.
        """
        paths = file_names(path, setting=setting)
        files = tuple(_vector_file(name, names, dim, setting) for name in paths)
        return VectorRows(files, dim, setting)

    def chunks(self, text: TextIds) -> Iterator[tuple[Int64Array, Vectors]]:
        """Yield ids, [N], and their vectors, [N, D], some thousand rows at a time.

        Args:
            text: The rule for ids of text.

        Raises:
            DataError: A value is no id, or no vector of `dim` numbers.
        """
        for file in self.files:
            for group in range(len(file.starts) - 1):
                first, end = file.starts[group : group + 2]
                for begin, chunk in chunks(file, group, end - first) if end > first else ():
                    try:
                        column = chunk.column(file.columns[ID])
                        ids_N = decode_ids(column, text)
                        yield ids_N, self._vectors(chunk.column(file.columns[VECTOR]))
                    except BadValue as error:
                        raise DataError(
                            f"{self.setting}: {file.path}: row {first + begin + error.index} "
                            f"{error.problem}"
                        ) from None

    def _vectors(self, column: pa.Array) -> Vectors:
        if pt.is_fixed_size_list(column.type):
            column = column.cast(pa.list_(column.type.value_type))
        lengths_N = np.diff(column.offsets.to_numpy())
        lengths_N[column.is_null().to_numpy(zero_copy_only=False)] = 0
        refuse(
            lengths_N != self.dim,
            lambda n: f"has a vector of {lengths_N[n]} numbers, the table has {self.dim} columns",
        )
        flat = column.flatten()
        nulls_ND = flat.is_null().to_numpy(zero_copy_only=False).reshape(-1, self.dim)
        refuse(nulls_ND.any(axis=1), lambda _: "has a vector with a null: write a number")
        vectors_ND: Vectors = flat.to_numpy().reshape(-1, self.dim)
        return vectors_ND


def _vector_file(name: str, names: Sequence[str], dim: int, setting: str) -> DataFile:
    reader, stamp, (types, rows, _) = _opened(
        name,
        setting,
        f"name {FORMATS.of(name).name} with ids and vectors, or a checkpoint",
    )
    floats = [f.name for f in types if is_list(f.type) and pt.is_floating(f.type.value_type)]
    ids = [f.name for f in types if is_id(value_type(f.type))]
    vector = _only_column(floats, [VECTOR])
    if vector is None:
        raise DataError(
            f"{setting}: {name} must have one column of vectors, a list of floats in each row, or "
            f"one of them called {VECTOR}; it has {', '.join(floats) or 'none'}"
        )
    id_column = _only_column(ids, [ID, *names])
    if id_column is None:
        raise DataError(
            f"{setting}: {name} must have one column of ids, or one of them called {ID} or "
            f"{names[0]}; it has {', '.join(ids) or 'none'}"
        )
    width = types.field(vector).type
    if pt.is_fixed_size_list(width) and width.list_size != dim:
        raise DataError(
            f"{setting}: {name}: vectors have {width.list_size} numbers, the table has {dim} "
            "columns"
        )
    columns = {ID: id_column, VECTOR: vector}
    return DataFile(name, reader, stamp, columns, tuple(accumulate(rows, initial=0)))


def _only_column(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the column with the first of some names, else the only one; None if there are
    several, or none.
    """
    matches = [name for name in names if name in columns]
    return matches[0] if matches else columns[0] if len(columns) == 1 else None
