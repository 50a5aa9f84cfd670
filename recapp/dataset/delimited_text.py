"""Read text with a delimiter between columns: CSV, TSV and the like, plain or compressed.

All columns of such text are text, from which recapp reads ids, numbers and labels. Types that
pyarrow infers would change ids: "007" becomes 7, and hexadecimal words that have only decimal
digits become other numbers. The first line determines the delimiter and the header. A header has no
repeated name, no empty name (except the first, for an index from pandas) and no numbers, except the
0, 1, 2, .. of columns without names in pandas. Without a header pyarrow names the columns f0, f1,
.. A file of text is one row group, and its rows are counted when it is opened: each start of a run
reads the text once more than it would read Parquet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import csv
from typing_extensions import override

from recapp.dataset.data_file import DataFile, Facts, Format, UnreadableFileError
from recapp.dataset.file_bytes import (
    FIRST_BYTES,
    PRINTED,
    UNREADABLE,
    begin_of,
    is_prose,
    open_stream,
    reason,
)
from recapp.dataset.storage import Stamp, open_file
from recapp.errors import DataError

_DELIMITERS = "\t,;|"


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
        with open_file(path) as file:
            begin = file.read(FIRST_BYTES)
            file.seek(max(file.size() - FIRST_BYTES, 0))
            marks: bytes = begin + file.read()
        return marks


def _opened(path: str, columns: Sequence[str] | None) -> Any:
    """Open a file as a reader of record batches.

    Args:
        path: The file.
        columns: The columns to read, as text; None reads all, as pyarrow takes them.
    """
    begin, codec = begin_of(path)
    if begin.lstrip()[:1] in (b"{", b"[") or begin.translate(None, PRINTED):
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
        open_stream(path, codec),
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
