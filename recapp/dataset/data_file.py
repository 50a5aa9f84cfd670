"""A file of logs, and the protocol of formats of files.

    Format.facts     its columns, and how many rows each row group has     when it is opened
    Format.chunks    the rows of a row group, from the first one on        when they are read
    Format.marks     bytes that differ where its contents differ           when training resumes

A row group is a stretch of rows that can be read without those before it. Parquet has its own; a
format without any has one for each file. The order of an epoch is counted out before a value is
read, so a format that does not keep numbers of rows counts them in `facts`. Which format a path is
in is decided in `recapp/dataset/formats.py`.
"""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from recapp.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

KEPT_FACTS = 64  # files whose facts are kept: a rank reads its files in order


class Stamp(NamedTuple):
    """The size and time of change of a file, by which later writing is noticed.

    Args:
        size: Its bytes.
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
    """A file is not whole, or not in its format; the message says why, as part of a line."""


class Format(Protocol):
    """Reads the files of one format. It is hashable, and can be sent to other processes."""

    @property
    def name(self) -> str:
        """The format as people call it."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The ends of the names of its files, in lower case, with the dot."""

    def __hash__(self) -> int: ...

    def facts(self, path: str, stamp: Stamp) -> Facts:
        """Return the columns of a file and the number of rows of each row group.

        Args:
            path: The file.
            stamp: Its size and time of change.

        Raises:
            UnreadableFileError: It is not whole, or in another format.
            DataError: Its numbers of rows cannot be right.
        """

    def chunks(self, file: "DataFile", row_group: int) -> "Iterator[pa.RecordBatch]":
        """Yield the rows of a row group, in order and some thousand at a time.

        A chunk has the columns `file.read` under their own names, in the types of `facts` or as
        dictionaries of them. The generator may be closed before its end.

        Args:
            file: The file.
            row_group: The number of the row group.

        Raises:
            DataError: What cannot be read.
        """

    def marks(self, path: str) -> bytes:
        """Return bytes of the file that change when its contents do, as far as that is cheap.

        Raises:
            OSError: It cannot be read.
        """


class DataFile(NamedTuple):
    """One file as it was when it was opened.

    Args:
        path: The file.
        format: How it is read.
        stamp: Its size and time of change at that moment.
        columns: Canonical name -> the file's own column name.
        starts: The first row of each row group, and the number of rows.
        kept: Columns that are read beside those, by their own names.
    """

    path: str
    format: Format
    stamp: Stamp
    columns: dict[str, str]
    starts: tuple[int, ...]
    kept: tuple[str, ...] = ()

    @property
    def read(self) -> list[str]:
        """The file's own names of the columns that are read, each once."""
        return list(dict.fromkeys([*self.columns.values(), *self.kept]))

    @property
    def types(self) -> "pa.Schema":
        """The names and types of all its columns."""
        return facts_of(self.format, self.path, self.stamp).columns


def stamp_of(path: str) -> Stamp:
    """Return the stamp of the file as it is now.

    Raises:
        OSError: The file is not there or cannot be read.
    """
    found = os.stat(path)
    return Stamp(found.st_size, found.st_mtime_ns)


@lru_cache(KEPT_FACTS)
def facts_of(format: Format, path: str, stamp: Stamp) -> Facts:
    """Return the facts of the file that had this stamp.

    Raises:
        UnreadableFileError, DataError: As of `Format.facts`.
    """
    return format.facts(path, stamp)


def chunks(file: DataFile, row_group: int, rows: int) -> "Iterator[tuple[int, pa.RecordBatch]]":
    """Yield the first rows of a row group as Arrow has them.

    The file is closed at the end.

    Args:
        file: The file.
        row_group: The number of the row group.
        rows: How many rows are wanted; the last chunk may end later.

    Yields:
        The number of a chunk's first row within the row group, and the chunk.

    Raises:
        DataError: What cannot be read.
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
