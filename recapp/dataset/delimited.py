"""Read text with a delimiter between columns: CSV, TSV and the like, plain or compressed by gzip,
bz2 or zstd.

All columns are text, from which recapp reads ids, numbers and labels. Types that pyarrow infers
would change ids: "007" becomes 7, and hexadecimal words that have only decimal digits become other
numbers.

The first line determines the delimiter and the header. A header has no repeated name, no empty name
(except the first, for an index from pandas) and no numbers, except the 0, 1, 2, .. of columns
without names in pandas. Without a header pyarrow names the columns f0, f1, ..

A file is one row group, and its rows are counted when it is opened: each start of a run reads the
text once more than it would read Parquet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import csv

from recapp.dataset.data_file import DataFile, Facts, Stamp, UnreadableFileError
from recapp.dataset.parquet import UNREADABLE, reason
from recapp.errors import DataError

FIRST_BYTES = 65_536  # at the beginning of a file, to search for its first lines
CODECS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
"""The compressions by the first bytes of a file."""
_DELIMITERS = "\t,;|"
# bytes of text in ASCII, UTF-8 or Latin-1
_PRINTED = b"\t\n\f\r" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))


@dataclass(frozen=True)
class DelimitedText:
    """Read text with a delimiter (a `recapp.dataset.data_file.Format`)."""

    name: str = "CSV"
    suffixes: tuple[str, ...] = (".csv", ".tsv")

    def knows(self, begin: bytes) -> bool:
        """Return whether a file begins with lines of text, the first two with equally many
        delimiters. Those of a page of prose have not.
        """
        first, second, *_ = [*begin.splitlines(), b"", b""]
        same = [m for m in _DELIMITERS.encode() if 0 < first.count(m) == second.count(m)]
        return is_printed(begin) and bool(same) and begin.lstrip()[:1] not in (b"{", b"[")

    def facts(self, path: str, stamp: Stamp) -> Facts:
        """Return the columns, all of text, and the number of rows, which are counted.

        Raises:
            UnreadableFileError: The file is no text, or a row has other columns than the first.
        """
        try:
            with _opened(path, None) as reader:
                columns = reader.schema.names
            with _opened(path, columns[:1]) as reader:
                rows = sum(chunk.num_rows for chunk in reader)
        except UNREADABLE as error:
            raise UnreadableFileError(reason(error)) from error
        return Facts(pa.schema([(name, pa.string()) for name in columns]), [rows])

    def chunks(self, file: DataFile, row_group: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file.

        Raises:
            DataError: A row cannot be read.
        """
        try:
            with _opened(file.path, file.read or file.types.names[:1]) as reader:
                yield from reader
        except UNREADABLE as error:
            raise DataError(
                f"{file.path}: cannot be read ({reason(error)}); write the file again or leave it "
                "out"
            ) from error

    def marks(self, path: str) -> bytes:
        """Return the first and the last bytes of the file.

        Raises:
            OSError: The file cannot be read.
        """
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


def is_printed(begin: bytes) -> bool:
    """Return whether the first bytes of a file are lines of text."""
    return b"\n" in begin and not begin.translate(None, _PRINTED)


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
    texts = dict.fromkeys(columns or (), pa.string())
    return csv.open_csv(
        pa.input_stream(path, compression=codec),
        csv.ReadOptions(
            use_threads=False,
            autogenerate_column_names=bool(line) and not _is_header(line, delimiter),
            encoding=encoding,
        ),
        csv.ParseOptions(delimiter=delimiter),
        csv.ConvertOptions(column_types=texts, include_columns=list(texts)),
    )


def _is_header(line: str, delimiter: str) -> bool:
    """Return whether the first line of a text has the names of columns."""
    names = [name.strip('"') for name in line.split(delimiter)]
    without_gaps = all(names[1:]) and len(set(names)) == len(names)
    counted = names == [str(index) for index in range(len(names))]
    return without_gaps and (counted or not any(map(_is_number, names)))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
