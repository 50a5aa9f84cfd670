"""Read Parquet files, which are opened with a footer that was parsed and checked before.

    footer   the columns and the offsets of row groups; parsed once per process and file
    pages    the values, compressed and encoded, with a checksum if the writer added one

Parsing a footer takes milliseconds, growing with the number of row groups; opening a file with a
parsed footer takes a tenth of a millisecond. A file that changed in between is refused, because its
old footer has wrong offsets. Numbers of rows are checked here, because the order of rows is
computed before a value is read; Arrow compares the other claims of a footer with the file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from recapp.dataset.arrow_types import is_text
from recapp.dataset.data_file import DataFile, Facts, Format, UnreadableFileError
from recapp.dataset.file_bytes import UNREADABLE
from recapp.dataset.nested_columns import leaves_of
from recapp.dataset.storage import Stamp, open_file
from recapp.errors import DataError, first_line
from recapp.settings.uris import is_uri

CHUNK_ROWS = 8192  # measured: fewer are slower (Arrow's cost per column and call), more no faster
KEPT_FOOTERS = 64  # enough: a rank opens at most one file per lane, and reads its files in order
# The most rows of a row group: writers stay far below, and claimed rows cost time before the read.
MOST_ROWS = 2**28
_TAIL_BYTES = 8  # the end of a file: the size of its footer, then a magic word


class Footer(NamedTuple):
    """A parsed footer.

    Args:
        metadata: The footer, parsed by Arrow.
        columns: The names and types of the columns.
        texts: The columns to decode as dictionaries.
    """

    metadata: pq.FileMetaData
    columns: pa.Schema
    texts: frozenset[str]


@lru_cache(KEPT_FOOTERS)
def read_footer(path: str, stamp: Stamp) -> Footer:
    """Return the footer of the file with this stamp.

    An unreadable footer raises one of `UNREADABLE`.
    """
    with open_file(path) as file, pq.ParquetFile(file) as parquet:
        metadata = parquet.metadata
    columns = metadata.schema.to_arrow_schema()
    texts = frozenset(field.name for field in columns if is_text(field.type))
    return Footer(metadata, columns, texts)


@dataclass(frozen=True)
class Parquet(Format):
    """Read Parquet files."""

    name: str = "Parquet"
    suffixes: tuple[str, ...] = (".parquet", ".parq", ".pq")

    @override
    def knows(self, begin: bytes) -> bool:
        return begin.startswith(b"PAR1")

    @override
    def facts(self, path: str, stamp: Stamp) -> Facts:
        try:
            footer = read_footer(path, stamp)
        except UNREADABLE as error:
            raise UnreadableFileError(first_line(error)) from error
        metadata = footer.metadata
        groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        for index, rows in enumerate(groups):
            if not 0 <= rows <= MOST_ROWS:
                raise DataError(
                    f"{path}: row group {index} claims {rows} rows; from 0 to {MOST_ROWS:,} are "
                    "read: write smaller ones"
                )
        if sum(groups) != metadata.num_rows:
            raise DataError(
                f"{path}: its footer counts {metadata.num_rows} rows, its row groups "
                f"{sum(groups)}; write the file again"
            )
        return Facts(footer.columns, groups)

    def chunks(self, file: DataFile, row_group: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a row group.

        Text columns are dictionary-encoded if Arrow can do so. Checksums of pages are verified if
        the writer added them.

        Raises:
            DataError: A page cannot be read, or there are fewer rows than the footer claims.
        """
        footer = read_footer(file.path, file.stamp)
        texts = [name for name in file.columns.values() if name in footer.texts]
        rows = 0
        try:
            for dictionaries in (texts, []):
                try:
                    for chunk in _batches(file, row_group, dictionaries, rows):
                        rows += chunk.num_rows
                        yield chunk
                    break
                except UNREADABLE as error:
                    # Arrow cannot read delta-encoded text as dictionaries, and raises OSError.
                    if not dictionaries or "Not yet implemented" not in str(error):
                        raise
        except UNREADABLE as error:
            raise DataError(
                f"{file.path}: row group {row_group} cannot be read ({first_line(error)}); "
                "write the file again or leave it out"
            ) from error
        if rows < file.starts[row_group + 1] - file.starts[row_group]:
            raise DataError(
                f"{file.path}: row group {row_group} has fewer rows than its footer says; "
                "write it again or leave it out"
            )

    @override
    def marks(self, path: str) -> bytes:
        # the footer has the sizes of all pages and usually the least and the largest value of
        # each column, but not the values
        with open_file(path) as file:
            size = file.size()
            file.seek(max(size - _TAIL_BYTES, 0))
            length = int.from_bytes(file.read(4), "little")
            file.seek(max(size - _TAIL_BYTES - length, 0))
            footer: bytes = file.read(length + _TAIL_BYTES)
        return footer


def of_row_group(file: DataFile, name: str, row_group: int) -> Any:
    """Return what the footer says of a column in a row group, also of a column of lists or a part
    of a nested one; None for files of other formats.

    Args:
        file: The file.
        name: The file's own name of the column.
        row_group: The number of the row group.
    """
    if not isinstance(file.format, Parquet):
        return None
    number = _column_numbers(file.path, file.stamp).get(name)
    metadata = read_footer(file.path, file.stamp).metadata
    return None if number is None else metadata.row_group(row_group).column(number)


@lru_cache(KEPT_FOOTERS)
def _column_numbers(path: str, stamp: Stamp) -> Mapping[str, int]:
    leaves = [(leaf != own, leaf, n) for n, (own, leaf) in enumerate(_leaves(path, stamp))]
    # a column whose own name has dots comes before a part of another one
    return {leaf: n for _, leaf, n in sorted(leaves, reverse=True)}


def _leaves(path: str, stamp: Stamp) -> list[tuple[str, str]]:
    """Return the column of each leaf and the name of the leaf; none if they are not known."""
    _, columns, _ = footer = read_footer(path, stamp)
    leaves = [(one.name, leaf) for one in columns for leaf in leaves_of(one.name, one.type)]
    return leaves if len(leaves) == len(footer.metadata.schema) else []


def _paths(file: DataFile) -> list[str]:
    """Return what is read from a file: columns, and of nested ones only the wanted leaves."""
    are_own = file.above.keys() <= set(file.read)
    leaves = [] if are_own else _leaves(file.path, file.stamp)
    if not leaves:
        return file.read
    schema = read_footer(file.path, file.stamp).metadata.schema
    return [
        schema.column(n).path
        for n, (_, leaf) in enumerate(leaves)
        if any(f"{leaf}.".startswith(f"{x}.") or f"{x}.".startswith(f"{leaf}.") for x in file.asked)
    ]


def _batches(
    file: DataFile, row_group: int, texts: Sequence[str], skip: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a row group after the first `skip`, with columns in `texts` as
    dictionaries.
    """
    footer = read_footer(file.path, file.stamp)
    with (
        open_file(file.path, mapped=True) as source,
        pq.ParquetFile(
            source,
            metadata=footer.metadata,
            read_dictionary=texts,
            pre_buffer=is_uri(file.path),
            page_checksum_verification=True,
        ) as parquet,
    ):
        for chunk in parquet.iter_batches(
            CHUNK_ROWS, row_groups=[row_group], columns=_paths(file), use_threads=False
        ):
            part = chunk.slice(min(skip, chunk.num_rows))
            skip -= chunk.num_rows - part.num_rows
            if part.num_rows:
                yield part
