"""Read files of text whose rows are lines, in bounded memory: the base of CSV and JSON lines.

    bytes --decompress, decode--> UTF-8 --split_rows--> rows of a block --a format--> record batch

A file of text has no footer. So the first run reads it once from end to end, and finds

    groups     ranges of bytes with 65,536 rows each, which are read like row groups of Parquet: a
               lane or a resume begins at its own range
    bad rows   those that do not fit; `dataset.bad_rows` says how many may be left out

The user's cache keeps both for larger files (`recapp/settings/user_cache.py`). A compressed file,
and one in another encoding than UTF-8, cannot be entered in the middle: it is one group, which is
read from the start.
"""

import codecs
import math
import os
from abc import abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from recapp.dataset.data_file import DataFile, Facts, Format, UnreadableFileError, refuse_bad_rows
from recapp.dataset.data_settings import ISO
from recapp.dataset.decode import BadValue, refuse, shown
from recapp.dataset.file_bytes import PRINTED, UNREADABLE, begin_of, ends_of, open_stream
from recapp.dataset.storage import Stamp
from recapp.dataset.text_signs import LINE_FEED, NO_QUOTE, RETURN
from recapp.errors import DataError, first_line
from recapp.settings.user_cache import cached_file, in_turn, read_cached_file, write_cached_file

GROUP_ROWS = 65_536
BATCH_ROWS = 8192  # at most; a divisor of GROUP_ROWS
BLOCK_BYTES = 2**21
LONGEST_ROW = 2**24  # bytes; a longer one has lost its closing quote
CACHED_BYTES = 2**23  # smaller files are counted in a few milliseconds
_LAYOUT = 1  # the version of the entries of the cache
_MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


@lru_cache(None)
def text_loops() -> Any:
    """Import the compiled loops over text; who only opens files needs no numba."""
    from recapp.dataset import compiled_text

    return compiled_text


class Head(NamedTuple):
    """What the first lines of a file tell.

    Args:
        first: Where the first row begins, in bytes of UTF-8.
        names: The columns, one for each field of a row; none if a row is one field, whose columns
            only all rows tell.
        delimiter: The bytes between two fields.
        quote: The byte that quotes fields, or `NO_QUOTE`.
    """

    first: int
    names: Sequence[str] = ()
    delimiter: bytes = b""
    quote: int = NO_QUOTE


class Rows(NamedTuple):
    """Rows that stand in a block of text.

    Args:
        data_C: The block, which is good until the next rows are read.
        offset: Where it begins in the file, in bytes of UTF-8.
        first: Where the first row begins in the block.
        next: Where the row after the last one begins in the block.
        begin_N: The beginnings of the rows.
        end_NF: The ends of their fields.
        odd_K2: The beginnings of rows with another number of fields, and that number.
    """

    data_C: npt.NDArray[np.uint8]
    offset: int
    first: int
    next: int
    begin_N: npt.NDArray[np.int64]
    end_NF: npt.NDArray[np.int64]
    odd_K2: npt.NDArray[np.int64]


class Group(NamedTuple):
    """The rows of a range of bytes of UTF-8.

    Args:
        first: The first byte.
        last: The byte behind the last one.
        rows: The number of rows.
    """

    first: int
    last: int
    rows: int


class BadRow(NamedTuple):
    """A row that is left out.

    Args:
        at: Where it begins, in bytes of UTF-8.
        line: Its line, from 1 on.
        problem: What is wrong with it, in words.
    """

    at: int
    line: int
    problem: str


class Layout(NamedTuple):
    """What was found in a whole file.

    Args:
        columns: The columns and their types.
        groups: The ranges of its rows.
        bad: The rows that are left out.
    """

    columns: pa.Schema
    groups: tuple[Group, ...]
    bad: tuple[BadRow, ...]


class TextFile(NamedTuple):
    """A file of text, as its first bytes show it.

    Args:
        path: The file.
        codec: Its compression.
        encoding: Its encoding; text in another one than UTF-8 is changed to UTF-8 while it is read.
        mark: The bytes of the byte-order mark that are read as text.
        begin: The first bytes, as UTF-8.
    """

    path: str
    codec: str | None
    encoding: str
    mark: int
    begin: bytes

    @property
    def has_ranges(self) -> bool:
        """Whether the file can be read from any byte on."""
        return self.codec is None and self.encoding == "utf-8"

    def open(self) -> Any:
        """Open the file as a stream of UTF-8."""
        stream = open_stream(self.path, self.codec)
        if self.encoding == "utf-8":
            return stream
        return pa.transcoding_input_stream(stream, self.encoding, "utf-8")

    @staticmethod
    def of(path: str, encoding: str | None) -> "TextFile":
        """Read the first bytes of a file.

        Args:
            path: The file.
            encoding: Its encoding; None finds it out: that of a byte-order mark, UTF-8, or Latin-1.

        Raises:
            pa.ArrowInvalid, OSError, UnicodeDecodeError: It cannot be read, or is no text.
        """
        _, codec = begin_of(path)
        with open_stream(path, codec) as stream:
            begin = stream.read(BLOCK_BYTES)
        if encoding is None:
            encoding = next((name for mark, name in _MARKS.items() if begin.startswith(mark)), "")
        if not encoding:
            encoding = "utf-8"
            try:
                begin[: begin.rfind(b"\n")].decode()
            except UnicodeDecodeError:
                encoding = "latin-1"
        name = codecs.lookup(encoding).name.removesuffix("-sig")
        text = TextFile(path, codec, name, 0, begin)
        if name != "utf-8":
            with text.open() as stream:
                text = text._replace(begin=stream.read(BLOCK_BYTES))
        if text.begin.translate(None, PRINTED):
            raise pa.ArrowInvalid("it is no text")
        return text._replace(mark=3 * text.begin.startswith(codecs.BOM_UTF8))


@dataclass(frozen=True)
class Text(Format):
    """Read text whose rows are lines.

    Args:
        encoding: The encoding of the files; None finds it out.
        bad_rows: The most rows that may be left out.
        times: The columns whose text is a time, each with its form.
    """

    encoding: str | None = None
    bad_rows: int = 0
    times: tuple[tuple[str, str], ...] = ()

    @abstractmethod
    def head(self, text: TextFile) -> Head:
        """Return what the first lines of a file tell.

        Raises:
            pa.ArrowInvalid: The file is in another format.
        """

    @abstractmethod
    def checked(
        self, rows: Rows, columns: pa.Schema | None, head: Head
    ) -> tuple[pa.Schema, dict[int, str]]:
        """Return the columns of some rows, and the problem of each row that does not fit, by its
        beginning in the block.

        Args:
            rows: The rows.
            columns: The columns of the rows before these; None for the first rows.
            head: What the first lines tell.
        """

    @abstractmethod
    def batch(self, rows: Rows, columns: pa.Schema, layout: Layout, head: Head) -> pa.RecordBatch:
        """Return rows as a record batch.

        Args:
            rows: The rows.
            columns: The columns to read.
            layout: What was found in the whole file.
            head: What the first lines tell.

        Raises:
            BadValue: Bytes are no text.
        """

    @override
    def facts(self, path: str, stamp: Stamp) -> Facts:
        layout, _, _ = _layout(self, path, stamp)
        bad = [f"line {row.line:,} {row.problem}" for row in layout.bad]
        times = dict.fromkeys(dict(self.times), pa.timestamp("s"))
        columns = pa.schema([(one.name, times.get(one.name, one.type)) for one in layout.columns])
        return Facts(columns, [group.rows for group in layout.groups], bad)

    @override
    def chunks(self, file: DataFile, row_group: int) -> Iterator[pa.RecordBatch]:
        layout, head, text = _layout(self, file.path, file.stamp)
        names = file.read or layout.columns.names[:1]
        columns = pa.schema([layout.columns.field(name) for name in names])
        group = layout.groups[row_group]
        row = file.starts[row_group]
        try:
            with text.open() as stream:
                if text.has_ranges:
                    stream.seek(group.first)
                else:
                    stream.read(group.first)
                for rows in _rows(stream, head, group.first, group.last):
                    batch = self.batch(rows, columns, layout, head)
                    for name, form in self.times:
                        if name in columns.names:
                            times = times_of_text(batch.column(name), form)
                            batch = batch.set_column(columns.names.index(name), name, times)
                    yield batch
                    row += batch.num_rows
        except BadValue as error:
            where = f"{file.path}: row {row + error.index:,}"
            raise DataError(f"{where} {error.problem}") from None
        except UNREADABLE as error:
            raise DataError(
                f"{file.path}: cannot be read from row {row:,} on ({first_line(error)}); write the "
                "file again or leave it out"
            ) from error

    @override
    def marks(self, path: str) -> bytes:
        return b"%d " % GROUP_ROWS + ends_of(path)  # rows of a group decide on the order


def times_of_text(column: pa.Array, form: str) -> pa.Array:
    """Return the times that text spells, in whole seconds (UTC); a null for an empty text.

    Args:
        column: Text, or numbers that are read as their digits.
        form: `ISO`, or directives of strptime.

    Raises:
        BadValue: A text spells no time of this form.
    """
    texts = column.cast(pa.string())
    texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
    times = None
    if form != ISO:
        times = pc.strptime(texts, format=form, unit="s", error_is_null=True)
    for zone in (None, "UTC") if form == ISO else ():
        with suppress(pa.ArrowInvalid):
            exact = texts.cast(pa.timestamp("ns", zone))
            times = pc.floor_temporal(exact, unit="second").cast(pa.timestamp("s"))
    if times is None:  # some have a zone, or are wrong
        times = pa.array(map(_iso_seconds, texts.to_pylist()), pa.timestamp("s"))
    bad = pc.and_(times.is_null(), texts.is_valid()).to_numpy(zero_copy_only=False)
    like = "2026-11-29T17:16:11Z" if form == ISO else form
    refuse(bad, lambda n: f"holds {shown(texts[n])}, which is no time like {like} (text.times)")
    return times


def _iso_seconds(text: str | None) -> int | None:
    try:
        time = datetime.fromisoformat((text or "").removesuffix(" UTC"))
    except ValueError:
        return None
    return math.floor((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())


def line_ends(data_C: npt.NDArray[np.uint8]) -> int:
    """Return the number of line ends in bytes."""
    return int(max(np.count_nonzero(data_C == LINE_FEED), np.count_nonzero(data_C == RETURN)))


def _rows(stream: Any, head: Head, first: int, last: int | None = None) -> Iterator[Rows]:
    """Yield the rows of a stream in blocks; none is in two groups.

    Args:
        stream: The stream, at the first row.
        head: What the first lines tell.
        first: Where the first row begins in the file.
        last: The byte behind the last row; None reads to the end.

    Raises:
        pa.ArrowInvalid: A row is too long.
    """
    delimiter = np.frombuffer(head.delimiter, np.uint8)
    begin_N = np.empty(BATCH_ROWS, np.int64)
    # column by column, which are read one by one; the odd width keeps them apart in a CPU's cache
    end_NF = np.empty((max(len(head.names), 1), BATCH_ROWS + 24), np.int64).T
    odd_K2 = np.empty((BATCH_ROWS, 2), np.int64)
    buffer_C = np.empty(BLOCK_BYTES + text_loops().AT_ONCE, np.uint8)
    rest = counted = 0
    while True:
        if 2 * rest > len(buffer_C) - text_loops().AT_ONCE:  # a long row
            buffer_C = np.append(buffer_C, buffer_C)
        left = None if last is None else last - first - rest
        block = stream.readinto(buffer_C[rest : -text_loops().AT_ONCE][:left].data)
        data_C = buffer_C[: rest + block]
        at = 0
        while True:
            most = min(BATCH_ROWS, GROUP_ROWS - counted % GROUP_ROWS)
            rows, odd, next = text_loops().split_rows(
                data_C, at, not block, delimiter, head.quote, begin_N[:most], end_NF, odd_K2
            )
            if at and block and 4 * rows <= most:
                next = at  # few rows are left, and are read with those of the next block
            elif rows or odd:
                counted += rows
                yield Rows(data_C, first, at, next, begin_N[:rows], end_NF[:rows], odd_K2[:odd])
            if next == at or next == len(data_C):
                break
            at = next
        first += next
        rest = len(data_C) - next
        buffer_C[:rest] = data_C[next:]
        if not block:
            return
        if rest > LONGEST_ROW:
            raise pa.ArrowInvalid(
                f"a row has more than {LONGEST_ROW:,} bytes; if a quote begins it that none ends, "
                "set dataset.text.quote=none"
            )


@lru_cache(64)
def _layout(format: Text, path: str, stamp: Stamp) -> tuple[Layout, Head, TextFile]:
    """Return what is in a file, from the cache if it is there.

    Raises:
        UnreadableFileError: The file is not whole, or in another format.
        DataError: There are more bad rows than may be.
    """
    try:
        text = TextFile.of(path, format.encoding)
        head = format.head(text)
        place = None
        if stamp.size >= CACHED_BYTES:
            name = path if "://" in path else os.path.realpath(path)
            identity = [_LAYOUT, name, *stamp, repr(format)]
            place = cached_file("rows", identity)
        with in_turn(place, f"{path}: counting rows"):  # ranks of one machine read it once
            layout = _from_plain(read_cached_file(place))
            if layout is None:
                layout = _found(format, text, head)
                columns = b64encode(layout.columns.serialize()).decode()
                write_cached_file(place, layout._asdict() | {"columns": columns})
    except UNREADABLE as error:
        raise UnreadableFileError(first_line(error)) from error
    return layout, head, text


def _found(format: Text, text: TextFile, head: Head) -> Layout:
    """Read a file from end to end, and return what is in it.

    Raises:
        DataError: There are more bad rows than may be.
    """
    columns = None if not head.names else pa.schema([(name, pa.string()) for name in head.names])
    groups = [Group(head.first, head.first, 0)]
    bad: list[BadRow] = []
    counted = 0
    with text.open() as stream:
        line = 1 + line_ends(np.frombuffer(stream.read(head.first), np.uint8))
        for rows in _rows(stream, head, head.first):
            columns, problems = format.checked(rows, columns, head)
            for at, problem in sorted(problems.items()):
                there = line + line_ends(rows.data_C[rows.first : at])
                bad.append(BadRow(rows.offset + at, there, problem))
                refuse_bad_rows(f"{text.path}: line {there:,} {problem}", len(bad), format.bad_rows)
            line += line_ends(rows.data_C[rows.first : rows.next])
            counted += len(rows.begin_N)
            good = len(rows.begin_N) + len(rows.odd_K2) - len(problems)
            groups[-1] = Group(groups[-1].first, rows.offset + rows.next, groups[-1].rows + good)
            if text.has_ranges and good and counted % GROUP_ROWS == 0:
                groups.append(Group(groups[-1].last, groups[-1].last, 0))
    return Layout(columns or pa.schema([]), tuple(groups), tuple(bad))


def _from_plain(entry: Any) -> Layout | None:
    with suppress(TypeError, KeyError, ValueError, pa.ArrowException):  # absent, or damaged
        return Layout(
            pa.ipc.read_schema(pa.py_buffer(b64decode(entry["columns"]))),
            tuple(Group(*map(int, group)) for group in entry["groups"]),
            tuple(BadRow(int(at), int(line), str(what)) for at, line, what in entry["bad"]),
        )
    return None
