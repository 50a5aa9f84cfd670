"""Parquet files, opened with a footer that was parsed and checked before.

    footer   the columns, the row groups and where their parts lie; parsed once per process and file
    pages    the values, compressed and encoded, with a checksum where the writer left one

Parsing a footer costs milliseconds and grows with the number of row groups, opening a file with a
parsed one a tenth of one. A file that changed since is refused: its old footer would point
anywhere. Numbers of rows are not trusted, because the order of rows is counted out before a value
is read; whatever else a footer claims Arrow compares with the file.
"""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recapp.dataset.arrow_types import without_views
from recapp.errors import DataError

FIRST_ROWS = 1024  # in which text that spells no numbers is sought before ranks are started

CHUNK_ROWS = 8192  # measured: fewer are slower (Arrow's cost per column and call), more not faster
KEPT_FOOTERS = 64  # enough: a rank has at most one file open per lane, and reads its files in order
# Allowed in a row group: writers stay far below, and claimed rows cost before they are read.
MOST_ROWS = 2**28
# UnicodeDecodeError comes from names in a damaged footer.
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)


class Stamp(NamedTuple):
    """What shows whether a file was written since.

    Args:
        size: Its bytes.
        changed: The time of its last change, in nanoseconds.
    """

    size: int
    changed: int


class DataFile(NamedTuple):
    """One Parquet file as it was when its footer was read.

    Args:
        path: The file.
        stamp: Its size and time of change at that moment.
        columns: Canonical name -> the file's own column name.
        texts: The columns to decode as dictionaries.
        starts: The first row of each row group, and the number of rows.
        views: The columns of Arrow's view types.
        kept: Columns that are read beside those, by their own names.
    """

    path: str
    stamp: Stamp
    columns: dict[str, str]
    texts: tuple[str, ...]
    starts: tuple[int, ...]
    views: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def stamp_of(path: str) -> Stamp:
    """Return the stamp of the file as it is now.

    Raises:
        OSError: The file is not there or cannot be read.
    """
    found = os.stat(path)
    return Stamp(found.st_size, found.st_mtime_ns)


@lru_cache(KEPT_FOOTERS)
def read_footer(path: str, stamp: Stamp) -> pq.FileMetaData:
    """Return the footer of the file that had this stamp.

    Raises what `UNREADABLE` lists where there is no footer to be read.
    """
    with pq.ParquetFile(path) as file:
        return file.metadata


def chunks(file: DataFile, row_group: int, rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the first `rows` rows of a row group as Arrow has them.

    Text columns are dictionaries where they can be; checksums of pages are verified where the
    writer left some. The file is closed at the end.

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
            f"{file.path}: has changed since its footer was read; "
            "start again when its writer is done"
        )
    begin = 0
    try:
        for texts in (file.texts, ()):
            try:
                for chunk in _batches(file, row_group, texts, begin):
                    yield begin, chunk
                    begin += chunk.num_rows
                    if begin >= rows:
                        return
                break
            except UNREADABLE as error:
                # Arrow reads no text in delta encodings as dictionaries, and raises OSError.
                if not texts or "Not yet implemented" not in str(error):
                    raise
    except UNREADABLE as error:
        why = reason(error)
        raise DataError(
            f"{file.path}: row group {row_group} cannot be read ({why}); "
            "write the file again or leave it out"
        ) from error
    raise DataError(
        f"{file.path}: row group {row_group} has fewer rows than its footer says; "
        "write it again or leave it out"
    )


def _batches(
    file: DataFile, row_group: int, texts: Sequence[str], skip: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a row group behind the first `skip`, columns in `texts` as dictionaries."""
    footer = read_footer(file.path, file.stamp)
    columns = list(dict.fromkeys([*file.columns.values(), *file.kept]))
    with pq.ParquetFile(
        file.path,
        metadata=footer,
        read_dictionary=texts,
        memory_map=True,
        page_checksum_verification=True,
    ) as parquet:
        for chunk in parquet.iter_batches(
            CHUNK_ROWS, row_groups=[row_group], columns=columns, use_threads=False
        ):
            left = chunk.slice(min(skip, chunk.num_rows))
            skip -= chunk.num_rows - left.num_rows
            if left.num_rows:
                for name in file.views:
                    plain = without_views(left.column(name))
                    left = left.set_column(left.schema.get_field_index(name), name, plain)
                yield left


def row_counts(footer: pq.FileMetaData, path: str) -> list[int]:
    """Return the number of rows of each row group.

    Raises:
        DataError: Numbers that cannot be right.
    """
    groups = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
    for index, rows in enumerate(groups):
        if not 0 <= rows <= MOST_ROWS:
            raise DataError(
                f"{path}: row group {index} claims {rows} rows; from 0 to {MOST_ROWS:,} are read: "
                "write smaller ones"
            )
    if sum(groups) != footer.num_rows:
        raise DataError(
            f"{path}: its footer counts {footer.num_rows} rows, its row groups {sum(groups)}; "
            "write the file again"
        )
    return groups


def reason(error: Exception) -> str:
    """Return what a library says of a file that it cannot read, as part of a line."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def spells_no_number(path: str, columns: Sequence[str]) -> list[str]:
    """List the columns of text of which one of the first rows may spell no number; empty text and
    nulls are missing numbers.

    Args:
        path: A file that has a row.
        columns: Columns of text.
    """
    with pq.ParquetFile(path) as file:
        rows = next(file.iter_batches(FIRST_ROWS, columns=list(columns)))
    return [name for name in columns if not _spells_numbers(rows.column(name))]


def _spells_numbers(text: pa.Array) -> bool:
    try:
        plain = text.cast(pa.string())
        pc.if_else(pc.equal(plain, ""), pa.scalar(None, pa.string()), plain).cast(pa.float64())
    except pa.ArrowException:  # text that is none, or of a type that is no text
        return False
    return True
