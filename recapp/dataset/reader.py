"""Read lanes: stream row groups in chunks, and hand the rows of each chunk to the lanes that own
them.

    row group s  ──iter_batches──>  chunk of 8,192 rows ──decode──>  inbox of lane 3   [rows]
      (one cursor)                                      └─────────>  inbox of lane 5   [rows]

A reader owns some lanes. It opens a row group when one of its lanes needs the first row, decodes it
once for all its lanes, and closes it after the last needed row. In memory are one chunk of each
open row group, and the rows of shared chunks that lanes have not taken yet. If several lanes read
separate ranges of a large row group, each lane reads the row group by itself. Otherwise the reader
would hold nearly the whole row group until the last lane takes its range.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recapp.dataset.collate import Collate, SourceRows
from recapp.dataset.data_file import DataFile, chunks
from recapp.dataset.order import Deal, IntArray, after
from recapp.dataset.rows import Rows, join
from recapp.dataset.source import Source

# A row group up to this size is decoded once even if lanes read separate ranges of it.
SHARED_ROWS = 65_536
_EVERY_LANE = -1


class Reader:
    """Read the rows of some lanes of a deal, from a position on.

    Args:
        source: The rows of all lanes.
        deal: The rows of each lane.
        lanes: The lanes to read.
        position: The number of rows already taken from each lane (the same for all).
        collate: Decodes the rows.

    `take` raises DataError for unusable values and unreadable files.
    """

    def __init__(
        self, source: Source, deal: Deal, lanes: range, position: int, collate: Collate
    ) -> None:
        self._source = source
        self._deal = deal
        self._collate = collate
        left = {lane: after(deal.lanes[lane], position) for lane in lanes}
        self._plans = {lane: deque(_by_segment(pieces)) for lane, pieces in left.items()}
        self._inboxes: dict[tuple[int, int], deque[Rows]] = {}
        self._cursors: dict[tuple[int, int], Iterator[list[tuple[int, Rows]]]] = {}
        self._stretches = self._owned(left)
        self._due = {
            key: int((own[:, 1] - own[:, 0]).sum()) for key, own in self._stretches.items()
        }

    def take(self, lane: int, count: int) -> Rows:
        """Return the next `count` rows of a lane; fewer (at least one) at its end.

        Raises:
            ValueError: The lane has no rows left.
        """
        plan = self._plans[lane]
        parts = []
        while count and plan:
            segment, rows = plan[0]
            part = self._next_part(lane, segment, min(count, rows))
            parts.append(part)
            count -= len(part)
            plan[0] = (segment, rows - len(part))
            if rows == len(part):
                plan.popleft()
        if not parts:
            raise ValueError(f"lane {lane} has no rows left")
        return join(parts)

    def _owned(self, left: dict[int, IntArray]) -> dict[tuple[int, int], IntArray]:
        """Return the ranges of each segment that lanes need, in row order, by cursor.

        Returns:
            Cursor key -> [P, 3], a row for each range: (first row, end, lane).
        """
        pieces = np.concatenate(
            [np.insert(own, 3, lane, axis=1) for lane, own in left.items()]
            or [np.zeros((0, 4), np.int64)]
        )
        if not len(pieces):
            return {}  # fewer rows than lanes, or all rows are taken
        pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
        segments, starts = np.unique(pieces[:, 0], return_index=True)
        owned = {}
        for segment, own in zip(segments.tolist(), np.split(pieces, starts[1:]), strict=True):
            stretches = np.stack((own[:, 1], own[:, 1] + own[:, 2], own[:, 3]), axis=1)
            for lane in np.unique(own[:, 3]).tolist():
                key = self._key(lane, segment)
                owned[key] = (
                    stretches if key[1] == _EVERY_LANE else stretches[stretches[:, 2] == lane]
                )
        return owned

    def _key(self, lane: int, segment: int) -> tuple[int, int]:
        """Return the key of the cursor that reads a segment for a lane: the lane's own or a shared
        cursor.
        """
        shared = self._deal.cut[segment] or self._source.segments[segment].rows <= SHARED_ROWS
        return segment, _EVERY_LANE if shared else lane

    def _next_part(self, lane: int, segment: int, count: int) -> Rows:
        """Return up to `count` rows of a lane from one segment, but at least one row."""
        inbox = self._inboxes.get((lane, segment))
        while not inbox:
            self._advance(self._key(lane, segment))
            inbox = self._inboxes.get((lane, segment))
        rows = inbox.popleft()
        if len(rows) > count:
            inbox.appendleft(rows.slice(count, len(rows)))
            return rows.slice(0, count)
        if not inbox:
            del self._inboxes[lane, segment]
        return rows

    def _advance(self, key: tuple[int, int]) -> None:
        """Decode one more chunk of a row group, and hand its rows to the lanes."""
        if key not in self._cursors:
            self._cursors[key] = _stream(
                self._source, key[0], self._stretches.pop(key), self._collate
            )
        for lane, rows in next(self._cursors[key]):
            self._inboxes.setdefault((lane, key[0]), deque()).append(rows)
            self._due[key] -= len(rows)
        if not self._due[key]:
            del self._cursors[key]  # this closes the generator, and so the file


def _by_segment(pieces: IntArray) -> list[tuple[int, int]]:
    """Return a lane's pieces as (segment, rows); join neighbours of one segment."""
    if not len(pieces):
        return []
    starts = np.flatnonzero(np.diff(pieces[:, 0], prepend=-1))
    return list(
        zip(pieces[starts, 0].tolist(), np.add.reduceat(pieces[:, 2], starts).tolist(), strict=True)
    )


def _stream(
    source: Source, segment: int, stretches: IntArray, collate: Collate
) -> Iterator[list[tuple[int, Rows]]]:
    """Yield the rows of each lane in a segment, chunk by chunk.

    The generator opens the file, and closes it at its end.
    """
    number, row_group, first, _ = source.segments[segment]
    file = source.files[number]
    wanted = stretches + np.array([first, first, 0], dtype=np.int64)
    for begin, chunk in chunks(file, row_group, int(wanted[-1, 1])):
        parts = _hand_out(chunk, begin, wanted, file.starts[row_group], file, collate)
        if parts:
            yield parts


def _hand_out(
    chunk: pa.RecordBatch,
    begin: int,
    wanted: IntArray,
    file_row: int,
    file: DataFile,
    collate: Collate,
) -> list[tuple[int, Rows]]:
    """Decode the wanted rows of a chunk, lane by lane, and split them into the lanes' parts."""
    end = begin + chunk.num_rows
    inside = wanted[
        np.searchsorted(wanted[:, 1], begin, side="right") : np.searchsorted(wanted[:, 0], end)
    ]
    if not len(inside):
        return []
    inside = np.column_stack(
        (np.maximum(inside[:, 0], begin), np.minimum(inside[:, 1], end), inside[:, 2])
    )
    inside = inside[np.argsort(inside[:, 2], kind="stable")]
    lengths = inside[:, 1] - inside[:, 0]
    rows_N = _ranges(inside[:, 0], lengths)
    if len(inside) == 1:
        chunk = chunk.slice(int(rows_N[0]) - begin, len(rows_N))
    else:
        chunk = chunk.take(pa.array(rows_N - begin))
    decoded = collate.rows(chunk, file.columns, SourceRows(file.path, rows_N + file_row))
    lanes, starts = np.unique(inside[:, 2], return_index=True)
    bounds = np.append(np.concatenate(([0], np.cumsum(lengths)))[starts], len(decoded)).tolist()
    return [
        (lane, decoded.slice(bounds[index], bounds[index + 1]))
        for index, lane in enumerate(lanes.tolist())
    ]


def _ranges(starts: IntArray, lengths: IntArray) -> npt.NDArray[np.int64]:
    """Concatenate arange(start, start + length) of all pairs."""
    offsets = np.cumsum(lengths) - lengths
    ranges: npt.NDArray[np.int64] = np.arange(int(lengths.sum())) + np.repeat(
        starts - offsets, lengths
    )
    return ranges
