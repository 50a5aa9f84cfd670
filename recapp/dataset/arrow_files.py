"""Read Arrow's own files: IPC files, which Feather's are (of version 2), and IPC streams.

    file     each record batch is a row group; one that is not compressed is read from memory
             that is mapped, without a copy
    stream   record batches without an index of them: one row group, which is read from the start

A record batch that its writer compressed is decompressed as a whole, so that writers of large files
make batches of some ten thousand rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from typing_extensions import override

from recapp.dataset.data_file import DataFile, Facts, Format, UnreadableFileError
from recapp.dataset.file_bytes import UNREADABLE, begin_of, ends_of, open_stream
from recapp.dataset.parquet import CHUNK_ROWS
from recapp.dataset.storage import Stamp, open_file
from recapp.errors import DataError, first_line

_FILE = b"ARROW1"
_STREAM = b"\xff\xff\xff\xff"
_FEATHER_1 = b"FEA1"


@dataclass(frozen=True)
class Arrow(Format):
    """Read Arrow's files and streams."""

    name: str = "Arrow"
    suffixes: tuple[str, ...] = (".arrow", ".feather", ".ipc", ".arrows")

    @override
    def knows(self, begin: bytes) -> bool:
        return begin.startswith((_FILE, _STREAM, _FEATHER_1))

    @override
    def facts(self, path: str, stamp: Stamp) -> Facts:
        try:
            with _opened(path) as reader:
                columns = reader.schema
            if not columns.names:
                raise UnreadableFileError("it has no columns")
            with _opened(path, [0]) as reader:  # the rows of one column are those of all
                rows = [batch.num_rows for batch in _batches(reader)]
                groups = rows if _has_index(reader) else [sum(rows)]
        except UNREADABLE as error:
            raise UnreadableFileError(first_line(error)) from error
        return Facts(columns, groups)

    @override
    def chunks(self, file: DataFile, row_group: int) -> Iterator[pa.RecordBatch]:
        names = file.types.names
        fields = sorted(names.index(name) for name in file.read or names[:1])
        try:
            with _opened(file.path, fields) as reader:
                for batch in _batches(reader, row_group):
                    batch.validate(full=True)  # Arrow believes offsets that it has not checked
                    for first in range(0, batch.num_rows, CHUNK_ROWS):
                        yield batch.slice(first, CHUNK_ROWS)
        except UNREADABLE as error:
            raise DataError(
                f"{file.path}: record batch {row_group} cannot be read ({first_line(error)}); "
                "write the file again or leave it out"
            ) from error

    @override
    def marks(self, path: str) -> bytes:
        return ends_of(path)


@contextmanager
def _opened(path: str, fields: Sequence[int] | None = None) -> Iterator[Any]:
    """Open a file as a reader of record batches.

    Args:
        path: The file.
        fields: The columns to read, by number; None reads all.
    """
    options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    begin, codec = begin_of(path)
    if begin.startswith(_FEATHER_1):
        raise pa.ArrowInvalid("it is Feather of version 1, which is read no more")
    if begin.startswith(_STREAM):
        with open_stream(path, codec) as stream:
            yield pa.ipc.open_stream(stream, options=options)
    else:
        with open_file(path, mapped=True) as file:
            yield pa.ipc.open_file(file, options=options)


def _has_index(reader: Any) -> bool:
    return isinstance(reader, pa.RecordBatchFileReader)


def _batches(reader: Any, number: int | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a reader, or the one with a number if they have numbers."""
    if not _has_index(reader):
        yield from reader
    else:
        for index in range(reader.num_record_batches) if number is None else [number]:
            yield reader.get_batch(index)
