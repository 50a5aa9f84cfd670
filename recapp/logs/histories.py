"""Histories: for each row of an event log, the items of the same user at earlier times; and
negatives: items that the user has in no row.

    user  item  time  liked      history (length 2)
    u1    a     10    1          []
    u1    b     20    0          [a]
    u1    c     30    1          [a]          b was not liked
    u1    d     30    1          [a]          not c: events of one time do not see each other
    u1    e     40    1          [c, d]       the latest ones, the latest last

    events    rows, users, items and times of each part, by a hash of the user    state/events
    lists     the events of some users at once, sorted by user and time           state/histories
    parts     the lists of a part, in the order of its rows

Negatives are drawn evenly from the items of all rows, by a hash of the seed, the row and a count,
so that the same seed draws the same ones, in any number of threads.

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

from recapp.dataset.arrow_types import is_number
from recapp.dataset.counter_hash import hashes
from recapp.errors import DataError
from recapp.logs.fitting import Fitted
from recapp.logs.log_parts import Part, Workers, deal, dealt
from recapp.logs.splits import times_of, users_of
from recapp.logs.vocabularies import Occurrences
from recapp.run.recipe import Convert

EVENTS = 1 << 21  # about as many rows are in memory of a thread at once
HISTORY = "history"
LIKED = "liked"
NEGATIVES = "negatives"
_STREAM = (0x4157,)
_DRAWS = 0x0E6A
TRIES = 32  # to draw an item that the user does not have; who has nearly all gets fewer
Int64Array = npt.NDArray[np.int64]


def liked_rows(
    chunk: pa.RecordBatch, path: str, first: int, settings: Convert, found: Fitted
) -> npt.NDArray[np.bool_]:
    """Return whether each row is liked: its number is large enough; all are without a rule, [N].

    Raises:
        DataError: The column of the rule has no numbers.
    """
    liked_N = np.ones(chunk.num_rows, np.bool_)
    for name, least in (settings.liked or {}).items():
        column = found.column(name, chunk, path, first)
        if not is_number(column.type):
            raise DataError(f"liked={{{name}: {least:g}}}: {path}: column {name} has no numbers")
        numbers = column.cast(pa.float64())
        liked_N &= pc.fill_null(pc.greater_equal(numbers, least), False).to_numpy(False)
    return liked_N


def write_histories(
    settings: Convert, found: Fitted, parts: Sequence[Part], state: Path, workers: Workers
) -> None:
    """Write the histories and negatives of all rows, for `lists_of`, unless they are there.

    Args:
        settings: The settings.
        found: The types of columns.
        parts: The logs.
        state: The directory of what a conversion needs until it is done.
        workers: The threads.
    """
    if not (settings.history or settings.negatives) or (state / "histories" / "done").exists():
        return
    events = state / "events"
    lists = state / "histories"
    events.mkdir(exist_ok=True)
    lists.mkdir(exist_ok=True)
    shards = sum(part.source.rows for part in parts) // EVENTS + 1
    firsts = [part.first for part in parts]
    read = [str(settings.user), str(settings.item), str(settings.time), *(settings.liked or ())]

    def look(part: Part) -> pa.Table:
        table = pa.concat_tables(
            _events(chunk, path, first, settings, found) for path, first, chunk in part.chunks(read)
        )
        users_N = table["user"].to_numpy()
        shard_N = (hashes(_STREAM, users_N) % np.uint64(shards)).astype(np.int64)
        deal(events / f"{part.number:05d}.arrow", table, shard_N, shards)
        counts = Occurrences()
        counts.add(table["item"].combine_chunks())
        return counts.result()

    def join(shard: int) -> None:
        table = dealt(sorted(events.glob("*.arrow")), shard).combine_chunks()
        columns = {HISTORY: _histories(table, settings.history or 0)}
        if settings.negatives:
            columns[NEGATIVES] = _negatives(table, every_item, settings.negatives, settings.seed)
        part_N = np.searchsorted(firsts, table["row"].to_numpy(), side="right") - 1
        found = pa.table({"row": table["row"], **columns})
        deal(lists / f"{shard:05d}.arrow", found, part_N, len(parts))

    items = Occurrences()
    for counted in workers.each(parts, look):
        items.merge(counted)
    every_item = items.result().sort_by("value")["value"].combine_chunks()
    for _ in workers.each(range(shards), join):
        pass
    (lists / "done").touch()


def lists_of(part: Part, state: Path) -> pa.Table:
    """Return the history, and the negatives if there are any, of each row of a part, in order."""
    table = dealt(sorted((state / "histories").glob("*.arrow")), part.number)
    return table.take(pa.array(np.argsort(table["row"].to_numpy(), kind="stable")))


def with_negatives(rows: pa.Table, item: str, negatives: pa.Array) -> pa.Table:
    """Return rows, each followed by its negatives: the same row with another item, not liked.

    Args:
        rows: The rows, with a column `liked`.
        item: The column of items.
        negatives: The other items of each row.
    """
    count_N = pc.list_value_length(negatives).to_numpy() + 1
    place_M = np.repeat(np.arange(len(count_N)), count_N)
    is_first_M = np.append(True, place_M[1:] != place_M[:-1])
    table = rows.take(pa.array(place_M))
    items = pc.replace_with_mask(
        table[item].combine_chunks(), pa.array(~is_first_M), negatives.flatten()
    )
    liked = pc.multiply(table[LIKED], pa.array(is_first_M.astype(np.int64)))
    table = table.set_column(table.schema.get_field_index(item), item, items)
    return table.set_column(table.schema.get_field_index(LIKED), LIKED, liked)


def _events(
    chunk: pa.RecordBatch, path: str, first: int, settings: Convert, found: Fitted
) -> pa.Table:
    assert settings.item is not None
    return pa.table(
        {
            "row": first + np.arange(chunk.num_rows),
            "user": users_of(chunk, str(settings.user), path, first),
            "time": times_of(chunk, settings.time, path, first)
            if settings.time
            else np.zeros(chunk.num_rows, np.int64),
            "item": found.column(settings.item, chunk, path, first),
            "liked": liked_rows(chunk, path, first, settings, found),
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


def _negatives(events: pa.Table, every_item: pa.Array, most: int, seed: int) -> pa.Array:
    """Return items that the user of an event has in none, `most` for each liked event.

    Args:
        events: All events of some users.
        every_item: The items of all rows.
        most: The number of negatives of an event.
        seed: The seed of the draws.
    """
    items = len(every_item)
    _, user_N = np.unique(events["user"].to_numpy(), return_inverse=True)
    own_N = pc.fill_null(pc.index_in(events["item"], every_item), -1).to_numpy()
    pairs = np.unique((user_N * items + own_N)[own_N >= 0])  # not of missing items
    liked_N = events["liked"].to_numpy()
    row_D = np.repeat(events["row"].to_numpy()[liked_N], most)
    user_D = np.repeat(user_N[liked_N], most)
    draw_D = row_D * most + np.tile(np.arange(most), int(liked_N.sum()))
    item_D = np.full(len(draw_D), -1)
    for attempt in range(TRIES):
        open_D = np.flatnonzero(item_D < 0)
        draws = hashes((_DRAWS, seed, attempt), draw_D[open_D])
        drawn = (draws % np.uint64(items)).astype(np.int64)
        wanted = user_D[open_D] * items + drawn
        item_D[open_D] = np.where(np.isin(wanted, pairs), -1, drawn)
    count_N = np.zeros(len(user_N), np.int64)
    count_N[liked_N] = (item_D.reshape(-1, most) >= 0).sum(axis=1)
    bounds = pa.array(np.concatenate([[0], np.cumsum(count_N)]), pa.int32())
    return pa.ListArray.from_arrays(bounds, every_item.take(pa.array(item_D[item_D >= 0])))


def _latest(new_N: npt.NDArray[np.bool_]) -> Int64Array:
    """Return the place of the latest True up to each place, [N]."""
    return np.maximum.accumulate(np.where(new_N, np.arange(len(new_N)), 0))
