"""Choose the format of a file by its path, or by its first bytes. No other file chooses a reader.

Parquet files are opened with a footer that was parsed and checked before.

    footer   the columns and the offsets of row groups; parsed once per process and file
    pages    the values, compressed and encoded, with a checksum if the writer added one

Parsing a footer takes milliseconds, growing with the number of row groups; opening a file with a
parsed footer takes a tenth of a millisecond. A file that changed in between is refused, because its
old footer has wrong offsets. Numbers of rows are checked here, because the order of rows is
computed before a value is read; Arrow compares the other claims of a footer with the file.

The second format, beside Parquet, is text with a delimiter between columns: CSV, TSV and the like,
plain or compressed by gzip, bz2 or zstd.

All columns of such text are text, from which recapp reads ids, numbers and labels. Types that
pyarrow infers would change ids: "007" becomes 7, and hexadecimal words that have only decimal
digits become other numbers. The first line determines the delimiter and the header. A header has no
repeated name, no empty name (except the first, for an index from pandas) and no numbers, except the
0, 1, 2, .. of columns without names in pandas. Without a header pyarrow names the columns f0, f1,
.. A file of text is one row group, and its rows are counted when it is opened: each start of a run
reads the text once more than it would read Parquet.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv
from typing_extensions import override

from recapp.dataset.arrow_types import has_views, is_text, without_views
from recapp.dataset.data_file import DataFile, Facts, Format, Stamp, UnreadableFileError
from recapp.errors import DataError

CHUNK_ROWS = 8192  # measured: fewer are slower (Arrow's cost per column and call), more no faster
KEPT_FOOTERS = 64  # enough: a rank opens at most one file per lane, and reads its files in order
# The most rows of a row group: writers stay far below, and claimed rows cost time before the read.
MOST_ROWS = 2**28
_LISTS = re.compile(r"\.list\.(element|item)$")  # in the path of the values of lists
_TAIL_BYTES = 8  # the end of a file: the size of its footer, then a magic word
# UnicodeDecodeError comes from names in a damaged footer.
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)


class Footer(NamedTuple):
    """A parsed footer, with the columns that need a conversion.

    Args:
        metadata: The footer, parsed by Arrow.
        columns: The names and types of the columns.
        texts: The columns to decode as dictionaries.
        views: The columns of Arrow's view types.
    """

    metadata: pq.FileMetaData
    columns: pa.Schema
    texts: frozenset[str]
    views: frozenset[str]


@lru_cache(KEPT_FOOTERS)
def read_footer(path: str, stamp: Stamp) -> Footer:
    """Return the footer of the file with this stamp.

    An unreadable footer raises one of `UNREADABLE`.
    """
    with pq.ParquetFile(path) as file:
        metadata = file.metadata
    columns = metadata.schema.to_arrow_schema()
    texts = frozenset(field.name for field in columns if is_text(field.type))
    views = frozenset(field.name for field in columns if has_views(field.type))
    return Footer(metadata, columns, texts, views)


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
            raise UnreadableFileError(reason(error)) from error
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
                f"{file.path}: row group {row_group} cannot be read ({reason(error)}); "
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
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL_BYTES, 0))
            length = int.from_bytes(file.read(4), "little")
            file.seek(max(size - _TAIL_BYTES - length, 0))
            return file.read(length + _TAIL_BYTES)


def of_row_group(file: DataFile, name: str, row_group: int) -> Any:
    """Return what the footer says of a column in a row group, also of a column of lists; None for
    other nested columns, and for files of other formats.

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
    schema = read_footer(path, stamp).metadata.schema
    # a name may have dots of its own, so that only the part for lists is taken from its end
    return {_LISTS.sub("", schema.column(n).path): n for n in range(len(schema))}


def _batches(
    file: DataFile, row_group: int, texts: Sequence[str], skip: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a row group after the first `skip`, with columns in `texts` as
    dictionaries.
    """
    footer = read_footer(file.path, file.stamp)
    views = [name for name in file.read if name in footer.views]
    with pq.ParquetFile(
        file.path,
        metadata=footer.metadata,
        read_dictionary=texts,
        memory_map=True,
        page_checksum_verification=True,
    ) as parquet:
        for chunk in parquet.iter_batches(
            CHUNK_ROWS, row_groups=[row_group], columns=file.read, use_threads=False
        ):
            part = chunk.slice(min(skip, chunk.num_rows))
            skip -= chunk.num_rows - part.num_rows
            if part.num_rows:
                for name in views:
                    plain = without_views(part.column(name))
                    part = part.set_column(part.schema.get_field_index(name), name, plain)
                yield part


def reason(error: Exception) -> str:
    """Return the first line of a library's error, as part of a message."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


# ---- text with a delimiter between columns

FIRST_BYTES = 65_536  # at the beginning of a file, to search for its first lines
# The compressions by the first bytes of a file.
CODECS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
_DELIMITERS = "\t,;|"
# bytes of text in ASCII, UTF-8 or Latin-1
_PRINTED = b"\t\n\f\r" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))


@dataclass(frozen=True)
class DelimitedText(Format):
    """Read text with a delimiter."""

    name: str = "CSV"
    suffixes: tuple[str, ...] = (".csv", ".tsv")

    def knows(self, begin: bytes) -> bool:
        """Return whether a file begins with lines of text, the first two with equally many
        delimiters. Those of a page of prose have not.
        """
        first, second, *_ = [*begin.splitlines(), b"", b""]
        same = [m for m in _DELIMITERS.encode() if 0 < first.count(m) == second.count(m)]
        return is_prose(begin) and begin.lstrip()[:1] != b"[" and bool(same)

    @override
    def facts(self, path: str, stamp: Stamp) -> Facts:
        try:
            with _opened(path, None) as reader:
                columns = reader.schema.names
            with _opened(path, columns[:1]) as reader:
                rows = sum(chunk.num_rows for chunk in reader)
        except UNREADABLE as error:
            raise UnreadableFileError(reason(error)) from error
        return Facts(pa.schema([(name, pa.string()) for name in columns]), [rows])

    @override
    def chunks(self, file: DataFile, row_group: int) -> Iterator[pa.RecordBatch]:
        try:
            with _opened(file.path, file.read or file.types.names[:1]) as reader:
                yield from reader
        except UNREADABLE as error:
            raise DataError(
                f"{file.path}: cannot be read ({reason(error)}); write the file again or leave it "
                "out"
            ) from error

    @override
    def marks(self, path: str) -> bytes:
        with open(path, "rb") as file:
            begin = file.read(FIRST_BYTES)
            file.seek(max(file.seek(0, 2) - FIRST_BYTES, 0))
            return begin + file.read()


def begin_of(path: str) -> tuple[bytes, str | None]:
    """Return the first bytes of a file, decompressed if that is possible, and its compression.
    There are none if it cannot be read.
    """
    codec = None
    begin = b""
    try:
        with open(path, "rb") as file:
            begin = file.read(FIRST_BYTES)
        codec = next((name for magic, name in CODECS.items() if begin.startswith(magic)), None)
        if codec:
            with pa.input_stream(path, compression=codec) as stream:
                begin = stream.read(FIRST_BYTES)
    except (OSError, pa.ArrowException):
        pass  # whoever reads the file names what is wrong
    return begin, codec


def is_prose(begin: bytes) -> bool:
    """Return whether the first bytes of a file are lines of text, and no JSON."""
    printed = b"\n" in begin and not begin.translate(None, _PRINTED)
    return printed and not re.match(rb"\s*(\{|\[\s*\{)", begin)


def _opened(path: str, columns: Sequence[str] | None) -> Any:
    """Open a file as a reader of record batches.

    Args:
        path: The file.
        columns: The columns to read, as text; None reads all, as pyarrow takes them.
    """
    begin, codec = begin_of(path)
    if begin.lstrip()[:1] in (b"{", b"[") or begin.translate(None, _PRINTED):
        raise pa.ArrowInvalid("it is no text with a delimiter between columns")
    try:
        encoding = "utf-8"
        text = begin[: begin.rfind(b"\n")].decode()
    except UnicodeDecodeError:
        encoding = "latin-1"
        text = begin.decode(encoding)
    line = (text.removeprefix("\ufeff").splitlines() or [""])[0]
    delimiter = "\t" if "\t" in line else max(_DELIMITERS, key=line.count)
    names = [name.strip('"') for name in line.split(delimiter)]
    without_gaps = all(names[1:]) and len(set(names)) == len(names)
    counted = names == [str(index) for index in range(len(names))]
    header = without_gaps and (counted or not any(map(_is_number, names)))
    texts = dict.fromkeys(columns or (), pa.string())
    return csv.open_csv(
        pa.input_stream(path, compression=codec),
        csv.ReadOptions(
            use_threads=False,
            autogenerate_column_names=bool(line) and not header,
            encoding=encoding,
        ),
        csv.ParseOptions(delimiter=delimiter),
        csv.ConvertOptions(column_types=texts, include_columns=list(texts)),
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# The known formats. A file that none of them knows is read in the first format.
FORMATS: tuple[Format, ...] = (Parquet(), DelimitedText())
FORMAT_NAMES = " or ".join(format.name for format in FORMATS)
SUFFIXES = ", ".join(suffix for format in FORMATS for suffix in format.suffixes)

COMPRESSED = (".gz", ".bz2", ".zst")
# suffixes that tell no format: none, numbers (part.0, part-0.c000) and names of compressions
_NO_FORMAT = re.compile(r"(\.[^a-z]*|\.c[0-9]+|\.(snappy|gz|gzip|zstd?|lz4|lzo|br|brotli))?")


def format_of(path: str) -> Format:
    """Return the format of a file: by the suffix of its name, else by its first bytes."""
    return _known(path) or _by_bytes(path) or FORMATS[0]


def is_data(path: str) -> bool:
    """Return whether a file is in a known format, by its suffix; or by its first bytes, if its
    suffix tells no format.
    """
    no_format = _NO_FORMAT.fullmatch(Path(path).suffix.lower()) is not None
    return bool(_known(path) or (no_format and _by_bytes(path)))


def _known(path: str) -> Format | None:
    plain = Path(path).with_suffix("") if Path(path).suffix.lower() in COMPRESSED else Path(path)
    suffix = plain.suffix.lower()
    return next((format for format in FORMATS if suffix in format.suffixes), None)


def _by_bytes(path: str) -> Format | None:
    begin, _ = begin_of(path)
    return next((format for format in FORMATS if format.knows(begin)), None)
