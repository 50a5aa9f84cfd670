"""Histories: for each row of an event log, the items of the same user at earlier times.

    user  item  time  liked      history (length 2)
    u1    a     10    1          []
    u1    b     20    0          [a]
    u1    c     30    1          [a]          b was not liked
    u1    d     30    1          [a]          not c: events of one time do not see each other
    u1    e     40    1          [c, d]       the latest ones, the latest last

    events    rows, users, items and times of each part, by a hash of the user    state/events
    lists     the events of some users at once, sorted by user and time           state/histories
    parts     the lists of a part, in the order of its rows

A history has only earlier events, so that none of a later split is in it. Memory holds the events
of about `EVENTS` rows for each thread.

Letters: N events, L items in all their histories.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc

from recapp.dataset.counter_hash import hashes
from recapp.dataset.decode import decode_ids
from recapp.logs.fitting import Fitted
from recapp.logs.log_parts import Part, Workers
from recapp.logs.splits import times_of
from recapp.run.recipe import Convert

EVENTS = 1 << 21  # about as many rows are in memory of a thread at once
HISTORY = "history"
LIKED = "liked"
_STREAM = (0x4157,)
Int64Array = npt.NDArray[np.int64]


def liked_rows(chunk: pa.RecordBatch, settings: Convert, found: Fitted) -> npt.NDArray[np.bool_]:
    """Return whether each row is liked: its number is large enough; all are without a rule, [N]."""
    liked_N = np.ones(chunk.num_rows, np.bool_)
    for name, least in (settings.liked or {}).items():
        numbers = found.column(name, chunk, "", 0).cast(pa.float64())
        liked_N &= pc.fill_null(pc.greater_equal(numbers, least), False).to_numpy(False)
    return liked_N


def write_histories(
    settings: Convert, found: Fitted, parts: Sequence[Part], state: Path, workers: Workers
) -> None:
    """Write the histories of all rows, for `histories_of`, unless they are there.

    Args:
        settings: The settings.
        found: The types of columns.
        parts: The logs.
        state: The directory of what a conversion needs until it is done.
        workers: The threads.
    """
    if settings.history is None or (state / "histories" / "done").exists():
        return
    events = state / "events"
    lists = state / "histories"
    events.mkdir(exist_ok=True)
    lists.mkdir(exist_ok=True)
    shards = sum(part.source.rows for part in parts) // EVENTS + 1
    firsts = np.array([part.first for part in parts])

    def deal(part: Part) -> None:
        table = pa.concat_tables(
            _events(chunk, path, first, settings, found) for path, first, chunk in part.chunks()
        )
        users_N = table["user"].to_numpy()
        shard_N = (hashes(_STREAM, users_N) % np.uint64(shards)).astype(np.int64)
        for shard in range(shards):
            here = table.filter(pa.array(shard_N == shard))
            _write(events / f"{shard:05d}-{part.number:05d}.arrow", here)

    def join(shard: int) -> None:
        files = sorted(events.glob(f"{shard:05d}-*.arrow"))
        table = pa.concat_tables(map(_read, files)).combine_chunks()
        rows_N = table["row"].to_numpy()
        order_N = np.argsort(rows_N, kind="stable")
        histories = _histories(table, settings.history or 0).take(pa.array(order_N))
        sorted_N = rows_N[order_N]
        bounds = np.append(np.searchsorted(sorted_N, firsts), len(sorted_N)).tolist()
        for part, begin in zip(parts, bounds, strict=False):
            count = bounds[part.number + 1] - begin
            here = {"row": sorted_N[begin : begin + count], HISTORY: histories.slice(begin, count)}
            _write(lists / f"{part.number:05d}-{shard:05d}.arrow", pa.table(here))

    for _ in workers.each(parts, deal):
        pass
    for _ in workers.each(range(shards), join):
        pass
    (lists / "done").touch()


def histories_of(part: Part, state: Path) -> pa.Array:
    """Return the history of each row of a part, in the order of the rows."""
    files = sorted((state / "histories").glob(f"{part.number:05d}-*.arrow"))
    table = pa.concat_tables(map(_read, files)).combine_chunks()
    order_N = np.argsort(table["row"].to_numpy(), kind="stable")
    lists: pa.Array = table[HISTORY].combine_chunks().take(pa.array(order_N))
    return lists


def _events(
    chunk: pa.RecordBatch, path: str, first: int, settings: Convert, found: Fitted
) -> pa.Table:
    assert settings.item is not None
    return pa.table(
        {
            "row": first + np.arange(chunk.num_rows),
            "user": decode_ids(chunk.column(settings.user)),
            "time": times_of(chunk.column(settings.time)),
            "item": found.column(settings.item, chunk, path, first),
            "liked": liked_rows(chunk, settings, found),
        }
    )


def _histories(events: pa.Table, most: int) -> pa.Array:
    """Return the history of each event, of up to `most` items."""
    users_N, times_N, rows_N = (events[name].to_numpy() for name in ("user", "time", "row"))
    order_N = np.lexsort((rows_N, times_N, users_N))
    users_N = users_N[order_N]
    times_N = times_N[order_N]
    liked_N = events["liked"].to_numpy()[order_N]
    before_N1 = np.concatenate([[0], np.cumsum(liked_N)])
    new_user_N = np.append(True, users_N[1:] != users_N[:-1])
    new_time_N = new_user_N | np.append(True, times_N[1:] != times_N[:-1])
    first_N = before_N1[_latest(new_user_N)]
    end_N = before_N1[_latest(new_time_N)]
    begin_N = np.maximum(end_N - most, first_N)
    length_N = end_N - begin_N
    bound_N1 = np.concatenate([[0], np.cumsum(length_N)])
    place_L = np.arange(bound_N1[-1]) + np.repeat(begin_N - bound_N1[:-1], length_N)
    items = events["item"].combine_chunks().take(pa.array(order_N[liked_N][place_L]))
    lists: Any = pa.ListArray.from_arrays(pa.array(bound_N1, pa.int32()), items)
    return lists.take(pa.array(np.argsort(order_N)))


def _latest(new_N: npt.NDArray[np.bool_]) -> Int64Array:
    """Return the place of the latest True up to each place, [N]."""
    return np.maximum.accumulate(np.where(new_N, np.arange(len(new_N)), 0))


def _write(file: Path, table: pa.Table) -> None:
    with ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table)


def _read(file: Path) -> pa.Table:
    with ipc.open_file(pa.memory_map(str(file))) as reader:
        return reader.read_all()
