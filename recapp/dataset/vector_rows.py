"""Vectors of ids in data files: the start values of a table.

    id        vector
    "DE"      [0.1, -0.4, 0.2]        list or fixed_size_list of floats
    "FR"      [0.3, 0.0, -0.1]

Shapes: N rows of a chunk, D columns of a vector.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from recapp.dataset.arrow_types import is_id, is_list, value_type, without_views
from recapp.dataset.data_file import DataFile, UnreadableFileError, chunks, facts_of, stamp_of
from recapp.dataset.decode import Int64Array, decode_ids
from recapp.dataset.files import file_names
from recapp.dataset.formats import format_of
from recapp.dataset.schema import TextIds
from recapp.dataset.text import BadValue, refuse
from recapp.errors import DataError

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
        return VectorRows(tuple(_opened(name, names, dim, setting) for name in paths), dim, setting)

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
        column = without_views(column)
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


def _opened(name: str, names: Sequence[str], dim: int, setting: str) -> DataFile:
    reader = format_of(name)
    try:
        stamp = stamp_of(name)
        types, rows = facts_of(reader, name, stamp)
    except (OSError, UnreadableFileError) as error:
        raise DataError(
            f"{setting}: {name} is not a whole {reader.name} file ({error}): name a file of "
            f"tensors (.safetensors), {reader.name} with ids and vectors, or a checkpoint"
        ) from error
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
