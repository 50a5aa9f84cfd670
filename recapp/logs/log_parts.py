"""Parts of logs, and the work on them by threads.

A part is a run of whole row groups, about 262,144 rows; the last parts, and those of smaller logs,
are smaller, so that all threads end at about the same time. Each part is read, counted and
converted by itself; results come in the order of the parts. Rows that belong together across parts
are dealt: each part writes them into a file with a record batch for each shard, and a shard is read
from all files.

Letter: N rows.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import ipc

from recapp.dataset.decode import BadValue
from recapp.dataset.source import Segment, Source, arrow_chunks
from recapp.errors import DataError

PART_ROWS = 1 << 18
LEAST_ROWS = 1 << 16  # of a part, but for the last one
SHARES = 8  # a part takes about one of so many shares of the rows that are left, if that is less
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Part:
    """Consecutive rows of logs.

    Args:
        number: The number of the part.
        first: The number of its first row in the logs.
        source: Its rows.
    """

    number: int
    first: int
    source: Source

    def chunks(
        self, columns: Collection[str] | None = None
    ) -> Iterator[tuple[str, int, pa.RecordBatch]]:
        """Yield the file of some rows, the number of the first one in the logs, and the rows.

        Args:
            columns: The columns that are read; None reads all.
        """
        first = self.first
        source = self.source if columns is None else self.source.only(columns)
        for file, _, chunk in arrow_chunks(source):
            yield file.path, first, chunk
            first += chunk.num_rows


def parts_of(source: Source) -> list[Part]:
    """Return the parts of some rows, in order."""
    parts: list[Part] = []
    segments: list[Segment] = []
    first = 0
    rows = 0
    all_rows = source.rows
    for number, segment in enumerate(source.segments):
        segments.append(segment)
        rows += segment.rows
        most = max(LEAST_ROWS, (all_rows - first) // SHARES)
        if rows >= min(PART_ROWS, most) or number == len(source.segments) - 1:
            parts.append(Part(len(parts), first, replace(source, segments=tuple(segments))))
            first += rows
            segments = []
            rows = 0
    return parts


@contextmanager
def naming(column: str, path: str, first: int, kind: type[DataError] = DataError) -> Iterator[None]:
    """Turn a bad value, found inside of the `with`, into an error that names its place.

    Args:
        column: The column.
        path: The file of the rows.
        first: The number of the first row in the logs.
        kind: The class of the error.

    Raises:
        DataError: A value was bad.
    """
    try:
        yield
    except BadValue as error:
        where = f"{path}: row {first + error.index} of the logs, column {column}"
        raise kind(f"{where}: {error.problem}") from None


def deal(file: Path, rows: pa.Table, shard_N: npt.NDArray[np.int64], shards: int) -> None:
    """Write rows into a file with a record batch for each shard; the file appears when it is whole.

    Args:
        file: The file.
        rows: The rows.
        shard_N: The shard of each row, [N].
        shards: The number of shards.
    """
    order_N = np.argsort(shard_N, kind="stable")
    order = pa.array(order_N)
    columns = [column.combine_chunks().take(order) for column in rows.columns]
    dealt = pa.RecordBatch.from_arrays(columns, schema=rows.schema)
    bounds = np.searchsorted(shard_N[order_N], np.arange(shards + 1)).tolist()
    unfinished = file.with_name(f"{file.name}.tmp")
    with ipc.new_file(str(unfinished), rows.schema) as writer:
        for begin, end in pairwise(bounds):
            writer.write_batch(dealt.slice(begin, end - begin))
    unfinished.replace(file)


def dealt(files: Sequence[Path], shard: int) -> pa.Table:
    """Return the rows of a shard in some files, one file after the other."""
    batches = []
    for file in files:
        with ipc.open_file(pa.memory_map(str(file))) as reader:
            batches.append(reader.get_batch(shard))
    return pa.Table.from_batches(batches)


class Workers:
    """Threads that work on parts.

    Args:
        threads: Their number.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def each(self, parts: Sequence[T], function: Callable[[T], R]) -> Iterator[R]:
        """Yield the result of a function for each part, or each of other things, in order; at most
        as many as there are threads are in work.
        """
        with ThreadPoolExecutor(self.threads, "recapp-parts") as pool:
            waiting = deque(pool.submit(function, part) for part in parts[: self.threads])
            rest = iter(parts[self.threads :])
            try:
                while waiting:
                    yield waiting.popleft().result()
                    waiting.extend(pool.submit(function, part) for part in islice(rest, 1))
            finally:
                pool.shutdown(cancel_futures=True)
