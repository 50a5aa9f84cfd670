"""Choose the format of a file by its path, or by its first bytes; tell what a file is that no
format reads, and how it becomes Parquet. No other file chooses a reader.

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

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import csv

from recapp.dataset.data_file import DataFile, Facts, Format, Stamp, UnreadableFileError
from recapp.dataset.parquet import UNREADABLE, Parquet, reason
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


FORMATS: tuple[Format, ...] = (Parquet(), DelimitedText())
"""The known formats. A file that none of them knows is read in the first format."""

COMPRESSED = (".gz", ".bz2", ".zst")
# suffixes that tell no format: none, numbers (part.0, part-0.c000) and names of compressions
_NO_FORMAT = re.compile(r"(\.[^a-z]*|\.c[0-9]+|\.(snappy|gz|gzip|zstd?|lz4|lzo|br|brotli))?")
_LIBSVM = re.compile(r"\S+( \d+:\S+)+ *")


class Kind(NamedTuple):
    """What a file is that no format reads.

    Args:
        name: What such a file is, in words.
        fix: How it becomes Parquet, in words.
    """

    name: str
    fix: str


_by = "{} converts it".format
_DUCKDB = _by("duckdb FILE -c \"COPY (SELECT ...) TO 'x.parquet'\"")
_COLUMNS = "write each array as a column: pyarrow.parquet.write_table(pyarrow.table({...}), PATH)"
_TRUSTED = f"load it if you trust it, and {_COLUMNS}"
_KINDS = (  # offset, bytes there, name, fix
    (0, b"PARE", "Parquet with an encrypted footer", "write it without encryption"),
    (0, b"ARROW1", "an Arrow file", _by("polars.read_ipc(FILE).write_parquet('x.parquet')")),
    (
        0,
        b"\xff\xff\xff\xff",
        "an Arrow stream",
        _by("polars.read_ipc_stream(FILE).write_parquet('x.parquet')"),
    ),
    (0, b"FEA1", "a Feather file of version 1", _by("pandas.read_feather(FILE).to_parquet(PATH)")),
    (0, b"ORC", "an ORC file", _by("pandas.read_orc(FILE).to_parquet(PATH)")),
    (0, b"Obj\x01", "an Avro file", _by("polars.read_avro(FILE).write_parquet(PATH)")),
    (8, b"DUCK", "a DuckDB database", _DUCKDB),
    (0, b"SQLite format 3\0", "an SQLite database", _DUCKDB),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", _by("pandas.read_hdf(FILE).to_parquet(PATH)")),
    (0, b"\x93NUMPY", "an array of NumPy", _COLUMNS),
    (0, b"\xfd7zXZ\0", "compressed by xz", "decompress it (xz -d)"),
    *((0, bytes([0x80, protocol]), "a pickle", _TRUSTED) for protocol in range(2, 6)),
    (
        0,
        b"PK\x03\x04",
        "a zip archive, which workbooks of Excel, npz of NumPy and files of torch.save are, too",
        f"unzip it and name what was inside; or read it, and {_COLUMNS}",
    ),
    (0, b"\xff\xfe", "text in UTF-16", "write it in UTF-8 (iconv -f utf-16 -t utf-8)"),
    (0, b"\xfe\xff", "text in UTF-16", "write it in UTF-8 (iconv -f utf-16 -t utf-8)"),
)


def format_of(path: str) -> Format:
    """Return the format of a file: by the suffix of its name, else by its first bytes."""
    return _known(path) or _by_bytes(path) or FORMATS[0]


def is_data(path: str) -> bool:
    """Return whether a file is in a known format, by its suffix; or by its first bytes, if its
    suffix tells no format.
    """
    no_format = _NO_FORMAT.fullmatch(Path(path).suffix.lower()) is not None
    return bool(_known(path) or (no_format and _by_bytes(path)))


def format_names() -> str:
    """Return the names of the formats, for messages."""
    return " or ".join(format.name for format in FORMATS)


def all_suffixes() -> str:
    """Return the suffixes of all formats, for messages."""
    return ", ".join(suffix for format in FORMATS for suffix in format.suffixes)


def _known(path: str) -> Format | None:
    plain = Path(path).with_suffix("") if Path(path).suffix.lower() in COMPRESSED else Path(path)
    suffix = plain.suffix.lower()
    return next((format for format in FORMATS if suffix in format.suffixes), None)


def _by_bytes(path: str) -> Format | None:
    begin, _ = begin_of(path)
    return next((format for format in FORMATS if format.knows(begin)), None)


def kind_of(path: str, format: Format | None = None) -> Kind | None:
    """Return what a file is that no format reads; None for unknown bytes.

    Args:
        path: The file; an unreadable one is unknown.
        format: The format that did not read it; None if that was not tried. Its own files
            are damaged, and of no kind.
    """
    begin, codec = begin_of(path)
    kind = _of_bytes(begin)
    text = kind is not None and kind.name.startswith("text")
    damaged = kind is not None and kind.name.startswith("text with")
    if format and (format.knows(begin) or (damaged and isinstance(format, DelimitedText))):
        return None
    if codec and not text:
        inside = f" ({kind.name})" if kind else ""
        return Kind(f"compressed by {codec}{inside}", "decompress it")
    return kind


def _of_bytes(begin: bytes) -> Kind | None:
    for offset, magic, name, fix in _KINDS:
        if begin[offset : offset + len(magic)] == magic:
            return Kind(name, fix)
    return _of_text(begin.decode(errors="replace")) if is_printed(begin) else None


def _of_text(text: str) -> Kind:
    text = text.lstrip("\ufeff \t\r\n")
    line = text.partition("\n")[0]
    if re.match(r"\{|\[\s*{", text):
        return Kind(
            "JSON",
            _by("polars.read_ndjson(FILE).write_parquet('x.parquet')")
            + " where each line is a row, "
            "else pandas.read_json(FILE, dtype=False).to_parquet(PATH)",
        )
    if _LIBSVM.fullmatch(line):
        return Kind("libsvm", "write a column of lists of the ids, and one of the label")
    if DelimitedText().knows(text.encode()):
        return Kind("text with a delimiter between columns", "give it the suffix .csv")
    return Kind("text without a delimiter of one sign", "put tabs or commas between its columns")
