"""A log file, and the protocol of file formats.

    Format.facts     its columns, and the rows of each row group           when it is opened
    Format.chunks    the rows of a row group, from the first row on        when they are read
    Format.marks     bytes that change when its contents change            when training resumes

A row group is a range of rows that can be read without the rows before it. Parquet has row groups;
in a format without them, each file is one. The order of an epoch is computed before a value is
read, so a format whose files do not store their numbers of rows counts them in `facts`.
`recapp/dataset/formats.py` chooses the format of a path.
"""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from recapp.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

KEPT_FACTS = 64  # files whose facts are cached: a rank reads its files in order


class Stamp(NamedTuple):
    """The size and modification time of a file, which reveal a later write.

    Args:
        size: The size in bytes.
        changed: The time of its last change, in nanoseconds.
    """

    size: int
    changed: int


class Facts(NamedTuple):
    """The columns and numbers of rows of a file, known before its values are read.

    Args:
        columns: The names and types of its columns.
        rows: The number of rows of each row group.
    """

    columns: "pa.Schema"
    rows: Sequence[int]


class UnreadableFileError(Exception):
    """A file is not whole, or not in its format; the text is the reason, as part of a line."""


class Format(Protocol):
    """Read the files of one format. A format is hashable, and can be pickled."""

    @property
    def name(self) -> str:
        """The name of the format, for people."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of its files, in lower case, with the dot."""

    def __hash__(self) -> int: ...

    def knows(self, begin: bytes) -> bool:
        """Return whether a file is in this format, by its first bytes; they are decompressed where
        that is possible.
        """

    def facts(self, path: str, stamp: Stamp) -> Facts:
        """Return the columns of a file and the number of rows of each row group.

        Args:
            path: The file.
            stamp: The stamp of the file.

        Raises:
            UnreadableFileError: The file is not whole, or in another format.
            DataError: Its numbers of rows are impossible.
        """

    def chunks(self, file: "DataFile", row_group: int) -> "Iterator[pa.RecordBatch]":
        """Yield the rows of a row group, in order, some thousand rows at a time.

        A chunk has the columns `file.read` under the file's own names, with the types of `facts` or
        dictionary-encoded. The generator may be closed before its end.

        Args:
            file: The file.
            row_group: The number of the row group.

        Raises:
            DataError: The rows cannot be read.
        """

    def marks(self, path: str) -> bytes:
        """Return bytes of the file that change with its contents, as far as they are cheap to read.

        Raises:
            OSError: The file cannot be read.
        """


class DataFile(NamedTuple):
    """A file, with its state at the time of opening.

    Args:
        path: The file.
        format: The format of the file.
        stamp: The stamp at that time.
        columns: Canonical name -> the file's own name.
        starts: The first row of each row group, and at the end the number of rows.
        kept: Further columns to read, by the file's own names.
    """

    path: str
    format: Format
    stamp: Stamp
    columns: dict[str, str]
    starts: tuple[int, ...]
    kept: tuple[str, ...] = ()

    @property
    def read(self) -> list[str]:
        """The file's own names of the columns to read, each once."""
        return list(dict.fromkeys([*self.columns.values(), *self.kept]))

    @property
    def types(self) -> "pa.Schema":
        """The names and types of all columns of the file."""
        return facts_of(self.format, self.path, self.stamp).columns


def stamp_of(path: str) -> Stamp:
    """Return the current stamp of a file.

    Raises:
        OSError: The file does not exist or cannot be read.
    """
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns)


@lru_cache(KEPT_FACTS)
def facts_of(format: Format, path: str, stamp: Stamp) -> Facts:
    """Return the facts of the file with this stamp.

    Raises:
        UnreadableFileError, DataError: As for `Format.facts`.
    """
    return format.facts(path, stamp)


def chunks(file: DataFile, row_group: int, rows: int) -> "Iterator[tuple[int, pa.RecordBatch]]":
    """Yield the first rows of a row group as Arrow record batches.

    The file is closed at the end.

    Args:
        file: The file.
        row_group: The number of the row group.
        rows: The number of wanted rows; the last chunk may have more.

    Yields:
        The number of a chunk's first row within the row group, and the chunk.

    Raises:
        DataError: The rows cannot be read.
    """
    if stamp_of(file.path) != file.stamp:
        raise DataError(
            f"{file.path}: has changed since it was opened; start again when its writer is done"
        )
    begin = 0
    for chunk in file.format.chunks(file, row_group):
        yield begin, chunk
        begin += chunk.num_rows
        if begin >= rows:
            return
    raise DataError(
        f"{file.path}: row group {row_group} has fewer rows than were counted when the file was "
        "opened; write it again or leave it out"
    )
