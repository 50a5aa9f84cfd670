"""A second format beside Parquet, as small as it can be: CSV with a header; all values are text."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from recapp.dataset.data_file import DataFile, Facts, Stamp, UnreadableFileError

CHUNK_ROWS = 7


@dataclass(frozen=True)
class Csv:
    """Reads CSV; a file is one row group, whose rows are counted when it is opened."""

    name: str = "CSV"
    suffixes: tuple[str, ...] = (".csv",)
    magic: bytes = b""

    def facts(self, path: str, stamp: Stamp) -> Facts:
        names, *rows = read_csv(path)
        if any(len(row) != len(names) for row in rows):
            raise UnreadableFileError(f"not all of its rows have {len(names)} values")
        return Facts(pa.schema([(name, pa.string()) for name in names]), [len(rows)])

    def chunks(self, file: DataFile, row_group: int) -> Iterator[pa.RecordBatch]:
        names, *rows = read_csv(file.path)
        for first in range(0, len(rows), CHUNK_ROWS):
            columns = zip(*rows[first : first + CHUNK_ROWS], strict=True)
            values = dict(zip(names, columns, strict=True))
            yield pa.record_batch({name: pa.array(values[name]) for name in file.read})

    def marks(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()


def read_csv(path: str) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))
