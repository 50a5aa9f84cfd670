"""Tell from its first bytes what a file is that no format reads, and how it becomes Parquet.

    bytes of a known beginning    ORC, Arrow, SQLite, ..    its name, and lines or a sentence
    compressed                    gzip, bz2, zstd           what is inside, read through Arrow
    text                          JSON, libsvm, delimited   lines of Python that keep every row

Columns of delimited text stay text, from which recapp reads ids, numbers and labels. Types that
pyarrow infers would change ids: "007" becomes 7, and hexadecimal words that have only decimal
digits become other numbers.

The first line determines the delimiter and the header. A header has no repeated name, no empty name
(except the first, for an index from pandas) and no numbers, except the 0, 1, 2, .. of columns
without names in pandas. Without a header pyarrow names the columns f0, f1, ..
"""

import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

_FIRST_BYTES = 65_536  # at the beginning of a file, to search for its first lines
# bytes of text in ASCII, UTF-8 or Latin-1
_PRINTED = b"\t\n\f\r" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_LIBSVM = re.compile(r"\S+( \d+:\S+)+ *")


@dataclass(frozen=True)
class FileKind:
    """A kind of files that no format reads.

    Args:
        name: What such a file is, in words.
        fix: How it becomes Parquet, in words; empty if lines of Python do it.
        imports: Lines of Python before the loop over files.
        reads: Lines of Python that make `table` of the file `source`.
    """

    name: str
    fix: str = ""
    imports: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


def _pandas(read: str, name: str) -> FileKind:
    return FileKind(name, f"pandas.{read}(FILE).to_parquet('x.parquet') converts it")


_DUCKDB = "duckdb FILE -c \"COPY (SELECT ...) TO 'x.parquet'\" converts it"
_COLUMNS = "write each array as a column: pyarrow.parquet.write_table(pyarrow.table({...}), PATH)"
_ARROW = "import pyarrow as pa"
_KINDS: tuple[tuple[int, bytes, FileKind], ...] = (  # offset, bytes there, kind
    (0, b"PARE", FileKind("Parquet with an encrypted footer", "write it without encryption")),
    (
        0,
        b"ARROW1",
        FileKind("an Arrow file", "", (_ARROW,), ("table = pa.ipc.open_file(source).read_all()",)),
    ),
    (
        0,
        b"\xff\xff\xff\xff",
        FileKind(
            "an Arrow stream", "", (_ARROW,), ("table = pa.ipc.open_stream(source).read_all()",)
        ),
    ),
    (0, b"FEA1", _pandas("read_feather", "a Feather file of version 1")),
    (
        0,
        b"ORC",
        FileKind(
            "an ORC file", "", ("from pyarrow import orc",), ("table = orc.read_table(source)",)
        ),
    ),
    (0, b"Obj\x01", FileKind("an Avro file", "polars.read_avro(FILE).write_parquet(PATH) does it")),
    (8, b"DUCK", FileKind("a DuckDB database", _DUCKDB)),
    (0, b"SQLite format 3\0", FileKind("an SQLite database", _DUCKDB)),
    (0, b"\x89HDF\r\n\x1a\n", _pandas("read_hdf", "an HDF5 file")),
    (0, b"\x93NUMPY", FileKind("an array of NumPy", _COLUMNS)),
    (0, b"\xfd7zXZ\0", FileKind("compressed by xz", "decompress it (xz -d)")),
    *(
        (
            0,
            bytes([0x80, protocol]),
            FileKind("a pickle", f"load it if you trust it, and {_COLUMNS}"),
        )
        for protocol in range(2, 6)
    ),
)
_CODECS = (  # first bytes, name, suffix by which pyarrow detects it
    (b"\x1f\x8b", "gzip", ".gz"),
    (b"BZh", "bz2", ".bz2"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
)
_IN_ZIP: tuple[tuple[str, FileKind], ...] = (  # end of the name of a member, kind
    ("[Content_Types].xml", _pandas("read_excel", "an Excel workbook")),
    (".npy", FileKind("arrays of NumPy (npz)", _COLUMNS)),
    ("data.pkl", FileKind("a file of torch.save", f"load it if you trust it, and {_COLUMNS}")),
    ("", FileKind("a zip archive", "unzip it and name what was inside")),
)
_TFRECORD = FileKind("a TFRecord file", f"read it with TensorFlow, and {_COLUMNS}")


def kind_of(file: Path) -> FileKind | None:
    """Return what a file is that no format reads; None for Parquet, and for unknown bytes.

    Args:
        file: The file; an unreadable one is unknown.
    """
    begin = first_bytes(file)
    if begin.startswith(b"PK\x03\x04"):
        return _in_zip(file)
    for magic, codec, suffix in _CODECS:
        if begin.startswith(magic):
            return _compressed(file, codec, file.suffix.lower() == suffix)
    return _of_bytes(begin, file.stat().st_size if begin else 0, "source", ())


def first_bytes(file: Path) -> bytes:
    """Return the first bytes of a file; none if it cannot be read."""
    try:
        with file.open("rb") as content:
            return content.read(_FIRST_BYTES)
    except OSError:
        return b""


def is_printed(begin: bytes) -> bool:
    """Return whether the first bytes of a file are lines of text."""
    return b"\n" in begin and not begin.translate(None, _PRINTED)


def _of_bytes(begin: bytes, size: int, opened: str, imports: tuple[str, ...]) -> FileKind | None:
    """Return the kind of some bytes.

    Args:
        begin: The first bytes.
        size: The number of all bytes; 0 if unknown.
        opened: The expression that opens the file `source`.
        imports: The lines that this expression needs.
    """
    for offset, magic, kind in _KINDS:
        if begin[offset : offset + len(magic)] == magic:
            return kind
    record = int.from_bytes(begin[:8], "little") + 16  # a length and two checksums around a record
    if len(begin) > 12 and begin[12] == 0x0A and 16 < record <= size:
        return _TFRECORD
    if begin.startswith(_UTF16):
        return _delimited(begin, "utf-16", opened, imports)
    if not is_printed(begin):
        return None
    try:
        begin[: begin.rindex(b"\n")].decode()
    except UnicodeDecodeError:
        return _delimited(begin, "latin-1", opened, imports)
    return _json(begin, opened, imports) or _delimited(begin, "utf-8", opened, imports)


def _compressed(file: Path, codec: str, detected: bool) -> FileKind | None:
    """Return the kind of a compressed file; None if it cannot be decompressed.

    Args:
        file: The file.
        codec: The name of its compression.
        detected: Whether pyarrow detects that from the suffix of the file.
    """
    try:
        with pa.input_stream(str(file), compression=codec) as stream:
            begin = stream.read(_FIRST_BYTES)
    except (OSError, pa.ArrowException):
        return None
    opened = "source" if detected else f"pa.input_stream(source, compression={codec!r})"
    found = _of_bytes(begin, 0, opened, () if detected else (_ARROW,))
    if found and found.reads and all(found is not kind for *_, kind in _KINDS):
        return found
    inside = f" ({found.name})" if found else ""
    return FileKind(f"compressed by {codec}{inside}", "decompress it")


def _in_zip(file: Path) -> FileKind:
    try:
        names = zipfile.ZipFile(file).namelist()
    except (OSError, zipfile.BadZipFile):
        names = []
    return next(kind for end, kind in _IN_ZIP if not end or any(n.endswith(end) for n in names))


def _json(begin: bytes, opened: str, imports: tuple[str, ...]) -> FileKind | None:
    """Return the kind of JSON text; None for other text."""
    text = begin.decode(errors="replace").lstrip("\ufeff \t\r\n")
    if re.match(r"\[\s*{", text):
        table = (f"table = pa.Table.from_pylist(json.loads({_all_of(opened)}))",)
        return FileKind("a JSON array", "", ("import json", _ARROW), table)
    line = text.partition("\n")[0]
    try:
        is_row = isinstance(json.loads(line), dict)
    except ValueError:
        is_row = len(line) > _FIRST_BYTES // 2 and line.startswith("{")
    if not is_row:
        return _pandas("read_json", "a JSON document") if text.startswith("{") else None
    reads = (
        "whole = json.ReadOptions(block_size=1 << 28)  # a row is no longer",
        f"table = json.read_json({opened}, read_options=whole)",
    )
    return FileKind("JSON lines", "", (*imports, "from pyarrow import json"), reads)


def _delimited(begin: bytes, encoding: str, opened: str, imports: tuple[str, ...]) -> FileKind:
    """Return the kind of text with a delimiter, or of libsvm.

    Args:
        begin: The first bytes; empty if they cannot be read.
        encoding: Their encoding.
        opened: The expression that opens the file `source`.
        imports: The lines that this expression needs.
    """
    lines = begin.decode(encoding, "replace").lstrip("\ufeff").splitlines()[:2] or [""]
    if _LIBSVM.fullmatch(lines[0]):
        return _libsvm(opened)
    delimiter = _delimiter(lines)
    options = _options(lines[0], delimiter, encoding)
    if len(delimiter) > 1 or delimiter == " ":  # pyarrow takes one sign
        content = _all_of(opened)
        lines_of = f"b'\\t'.join(line.split()) for line in {content}.splitlines()"
        plain = (
            f"b'\\n'.join({lines_of})" if delimiter == " " else f"{content}.replace(b'::', b'\\t')"
        )
        imports = ("import io", _ARROW)
        opened = f"io.BytesIO({plain})"
    reads = (
        f"content = lambda source: {opened}",
        "names = csv.open_csv(content(source), **options).schema.names",
        "text = csv.ConvertOptions(column_types=dict.fromkeys(names, 'string'))",
        "table = csv.read_csv(content(source), convert_options=text, **options)",
    )
    set_up = ("from pyarrow import csv", "options = {}", *options)
    return FileKind(f"text with {delimiter!r} between columns", "", (*imports, *set_up), reads)


def _all_of(opened: str) -> str:
    """Return the expression that reads all bytes of the file `source`, opened by another one."""
    return f"pa.input_stream({opened}).read()" if opened == "source" else f"{opened}.read()"


def _libsvm(opened: str) -> FileKind:
    content = _all_of(opened)
    reads = (
        f"rows = [line.split() for line in {content}.decode().splitlines()]",
        "pairs = [[pair.split(':') for pair in row[1:]] for row in rows]",
        "ids = [[int(index) for index, _ in row] for row in pairs]",
        "values = [[float(value) for _, value in row] for row in pairs]",
        "labels = [row[0] for row in rows]",
        "table = pa.table({'label': labels, 'ids': ids, 'values': values})",
    )
    return FileKind("libsvm", "", (_ARROW,), reads)


def _delimiter(lines: list[str]) -> str:
    """Return what is between the columns of text with these first lines."""
    line = lines[0]
    for sign in ("\t", "::"):
        if sign in line:
            return sign
    best = max(",;|", key=line.count)
    widths = {len(each.split()) for each in lines}
    return " " if best not in line and len(widths) == 1 and max(widths) > 1 else best


def _options(line: str, delimiter: str, encoding: str) -> list[str]:
    """Return the lines that set the options of `read_csv` for text with this first line."""
    names = [name.strip('"') for name in line.split(None if delimiter == " " else delimiter)]
    without_gaps = all(names[1:]) and len(set(names)) == len(names)
    named = any(not _is_number(name) for name in names) and not any(
        _is_number(name) for name in names
    )
    header = without_gaps and (named or names == [str(index) for index in range(len(names))])
    sign = delimiter if len(delimiter) == 1 and delimiter != " " else "\t"
    made = []
    if sign != ",":
        made.append(f"options['parse_options'] = csv.ParseOptions(delimiter={sign!r})")
    reading = ["autogenerate_column_names=True"] if line and not header else []
    reading += [f"encoding={encoding!r}"] if encoding != "utf-8" else []
    if reading:
        made.append(f"options['read_options'] = csv.ReadOptions({', '.join(reading)})")
    return made


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


TEXT = _delimited(b"", "utf-8", "source", ())
"""The kind of a file that is called text but cannot be read."""
