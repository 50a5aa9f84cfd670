"""Choose the format of a file by its path, or by its first bytes; tell what a file is that no
format reads, and how it becomes Parquet. No other file chooses a reader.
"""

import re
from pathlib import Path
from typing import NamedTuple

from recapp.dataset.data_file import Format
from recapp.dataset.delimited import DelimitedText, begin_of, is_printed
from recapp.dataset.parquet import Parquet

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
    """Return the kind of the first bytes of a file."""
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
