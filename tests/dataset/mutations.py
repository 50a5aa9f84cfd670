"""Damaged files, each a function of a number, and a process that reads them, so that it hangs or
dies instead of the test.
"""

import gzip
import io
import json
import multiprocessing as mp
import resource
import traceback
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from recapp.dataset.schema import Schema
from recapp.dataset.source import open_source
from recapp.dataset.stream import BatchStream
from recapp.errors import ConfigError, DataError

SCHEMA = Schema(
    "label",
    ("number", "spelled"),
    ("text", "id", "words", "kind", "bag"),
    hex=("kind",),
    integers=("id",),
)
ROWS = 300
SECONDS = 20
MOST_GROWTH = 600 << 20
WRITERS = (
    {"compression": "none", "use_dictionary": False, "write_page_checksum": True},
    {"compression": "snappy", "use_dictionary": True},
    {"compression": "gzip", "use_dictionary": ["text", "kind"], "write_page_checksum": True},
    {"compression": "zstd", "use_dictionary": True, "data_page_version": "2.0"},
    {
        "compression": "none",
        "use_dictionary": ["text"],
        "data_page_version": "2.0",
        "write_statistics": False,
    },
    {
        "compression": "none",
        "use_dictionary": False,
        "column_encoding": {"id": "DELTA_BINARY_PACKED", "text": "DELTA_BYTE_ARRAY"},
    },
)


def table(seed):
    """Return rows of every type that is read, with nulls."""
    random = np.random.default_rng(seed)
    numbers = random.integers(0, 2**40, ROWS)
    gaps = random.random(ROWS) < 0.2
    return pa.table(
        {
            "label": pa.array(random.integers(0, 2, ROWS).astype(bool)),
            "number": pa.array(random.normal(size=ROWS).astype(np.float32), mask=gaps),
            "spelled": pa.array([str(number % 100) for number in numbers], pa.large_string()),
            "text": pa.array([f"item {number % 40}" for number in numbers], mask=gaps),
            "id": pa.array(numbers, pa.int64(), mask=~gaps),
            "words": pa.array([f"{number:x}".encode() for number in numbers]),
            "kind": pa.array([f"{number % 64:08x}" for number in numbers]).dictionary_encode(),
            "bag": pa.array(
                [
                    None if gap else list(map(str, range(number % 5)))
                    for gap, number in zip(gaps, numbers, strict=True)
                ]
            ),
        }
    )


def text_of(rows):
    """Return rows as CSV; texts have delimiters, quotes and line ends, lists are joined."""
    columns = {name: rows.column(name).to_pylist() for name in rows.column_names}
    columns["text"] = [None if one is None else f'{one}, "x"\n' for one in columns["text"]]
    columns["bag"] = [" ".join(bag or ()) for bag in columns["bag"]]
    columns["words"] = [word.decode() for word in columns["words"]]
    columns["label"] = [int(label) for label in columns["label"]]
    buffer = io.BytesIO()
    csv.write_csv(pa.table(columns), buffer)
    return buffer.getvalue()


def json_of(rows):
    """Return rows as JSON lines."""
    plain = [row | {"words": row["words"].decode()} for row in rows.to_pylist()]
    return "".join(json.dumps(row) + "\n" for row in plain).encode()


def arrow_of(rows, writer, compression):
    """Return rows as an IPC file or stream."""
    buffer = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with writer(buffer, rows.schema, options=options) as file:
        file.write_table(rows, max_chunksize=120)
    return buffer.getvalue()


OTHERS = {  # files in other formats than Parquet, by suffix
    "csv": lambda: text_of(table(0)),
    "csv.gz": lambda: gzip.compress(text_of(table(0))),
    "jsonl": lambda: json_of(table(0)),
    "arrow": lambda: arrow_of(table(0), pa.ipc.new_file, None),
    "feather": lambda: arrow_of(table(0), pa.ipc.new_file, "lz4"),
    "arrows": lambda: arrow_of(table(0), pa.ipc.new_stream, None),
}


@cache
def other_file(suffix):
    """Return the bytes of an undamaged file in another format than Parquet."""
    return OTHERS[suffix]()


def other_mutated(suffix, number):
    """Return the damaged file of that number: one of six kinds of damage to a whole file."""
    random = np.random.default_rng(number)
    content = bytearray(other_file(suffix))
    first, second = sorted(random.integers(0, len(content), 2).tolist())
    second = min(second, first + 400)
    match number % 6:
        case 0:
            for at in random.integers(0, len(content), int(random.integers(1, 9))).tolist():
                content[at] ^= 1 << int(random.integers(8))
        case 1:
            del content[first:]
        case 2:
            content[first:second] = bytes([int(random.choice([0, 255]))]) * (second - first)
        case 3:
            del content[first:second]
        case 4:
            content[first:first] = random.bytes(int(random.integers(1, 64)))
        case 5:  # signs that have a meaning in text
            for at in random.integers(0, len(content), 4).tolist():
                content[at] = int(random.choice(list(b'"\n\r,{}[]:\\')))
    return bytes(content)


@cache
def whole_file(kind):
    """Return the bytes of an undamaged file."""
    buffer = io.BytesIO()
    pq.write_table(table(kind), buffer, row_group_size=120, data_page_size=400, **WRITERS[kind])
    return buffer.getvalue()


def footer_of(content):
    """Return where the footer begins: its length stands before the last four bytes."""
    return len(content) - 8 - int.from_bytes(content[-8:-4], "little")


def mutated(number):
    """Return the damaged file of that number: one of eleven kinds of damage to a whole file."""
    random = np.random.default_rng(number)
    kind = number % len(WRITERS)
    way = number // len(WRITERS) % 11
    content = bytearray(whole_file(kind))
    footer = footer_of(content)
    size = len(content)
    first, second = sorted(random.integers(4, size, 2).tolist())
    other = whole_file(int(random.integers(len(WRITERS))))
    match way:
        case 0 | 1 | 2:  # bits: in the footer, in the pages, anywhere
            low, high = ((footer, size), (4, footer), (0, size))[way]
            for at in random.integers(low, high, int(random.integers(1, 9))).tolist():
                content[at] ^= 1 << int(random.integers(8))
        case 3:
            del content[first:]
        case 4:  # a block of zeros, or of ones
            last = min(first + int(random.integers(1, 64)), size)
            content[first:last] = bytes([int(random.choice([0, 255]))]) * (last - first)
        case 5:  # two pieces of the pages change places
            length = int(random.integers(1, 200))
            a, b = random.integers(4, max(5, footer - length), 2).tolist()
            content[a : a + length], content[b : b + length] = (
                content[b : b + length],
                content[a : a + length],
            )
        case 6:  # pages of one file, footer of another
            content = bytearray(content[:footer] + other[footer_of(other) :])
        case 7:  # cut anywhere and continued with another
            content = bytearray(content[:first] + other[int(random.integers(len(other))) :])
        case 8:
            del content[first:second]
        case 9:
            content[first:first] = random.bytes(int(random.integers(1, 64)))
        case 10:  # a byte of the footer, drawn anew, as are numbers in it
            for at in random.integers(footer, size - 8, 3).tolist():
                content[at] = int(random.integers(256))
    return bytes(content)


def read(path):
    """Return the batches of a file, or the one line of its error for people."""
    try:
        source = open_source(str(path), SCHEMA)
        stream = BatchStream(source, SCHEMA, batch_size=64, lanes=4, training=False)
        return [
            (batch.labels_B.tolist(), batch.dense_BI.tolist(), batch.sparse.values().tolist())
            for batch in stream
        ]
    except (DataError, ConfigError) as error:
        return str(error)


def serve(pipe, folder):
    """Read the files whose contents come through a pipe.

    For each the answer is the traceback of what was no error for people, and the memory taken.
    """
    for name, content in (("parquet", whole_file(0)), *((o, other_file(o)) for o in OTHERS)):
        path = Path(folder) / f"damaged.{name}"
        path.write_bytes(content)
        read(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while (asked := pipe.recv()) is not None:
        suffix, content = asked
        path = Path(folder) / f"damaged.{suffix}"
        path.write_bytes(content)
        try:
            answer = read(path)
            wrong = "more than one line" if isinstance(answer, str) and "\n" in answer else ""
        except Exception:
            answer = ""
            wrong = traceback.format_exc()
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        pipe.send((answer, wrong or (f"{growth >> 20} MB more" if growth > MOST_GROWTH else "")))


class ReadingProcess:
    """A process that reads files; it is started anew where it hangs or dies."""

    def __init__(self, folder):
        self._folder = str(folder)
        self._process = None

    def read(self, content, suffix="parquet"):
        """Return (what was read or the line that said why not, what went wrong)."""
        if self._process is None:
            self._pipe, there = mp.get_context("fork").Pipe()
            self._process = mp.get_context("fork").Process(
                target=serve, args=(there, self._folder), daemon=True
            )
            self._process.start()
            there.close()
        self._pipe.send((suffix, content))
        try:
            if self._pipe.poll(SECONDS):
                return self._pipe.recv()
            wrong = "no answer"
        except EOFError:
            self._process.join(5)
            wrong = f"the reader died ({self._process.exitcode})"
        self.stop()
        return "", wrong

    def stop(self):
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
