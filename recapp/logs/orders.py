"""Rows in another order than that of the files, in bounded memory.

    time    by a column of times, over all users
    user    the rows of a user together, by time; users in the order of a hash of their ids

    deal    the rows of each part, converted, with their keys    STATE/rows, a file for each part
    sort    those of a shard, a range of keys, of all parts      train/part-00000.parquet, ..

Rows of equal keys keep the order of the files. Memory holds a shard, about `ROWS` rows, for each
thread; all rows of one time, or of one user, are in one shard.

Letter: N rows.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recapp.dataset.counter_hash import hashes
from recapp.logs.log_parts import Part, Workers, dealt
from recapp.logs.splits import times_of, users_of
from recapp.run.recipe import Convert

ROWS = 1 << 18  # of a shard
KEY = "the key"  # a hash of the user, or the time
TIME = "the time"
SAMPLE = 256  # times of a part, by which ranges of times are cut
_STREAM = (0x02DE,)
Uint64Array = npt.NDArray[np.uint64]
GROUP_ROWS = 1 << 16  # of a row group of the results


def with_keys(
    rows: pa.Table, chunk: pa.RecordBatch, path: str, first: int, settings: Convert
) -> pa.Table:
    """Return converted rows with the keys by which they are sorted.

    Args:
        rows: The converted rows.
        chunk: The same rows of the logs.
        path: Their file, for errors.
        first: The number of the first row in the logs, for errors.
        settings: The settings.
    """
    times_N = times_of(chunk, str(settings.time), path, first)
    keys_N = _unsigned(times_N)
    if settings.order == "user":
        keys_N = hashes(_STREAM, users_of(chunk, str(settings.user), path, first))
    return rows.append_column(KEY, pa.array(keys_N)).append_column(TIME, pa.array(times_N))


def bounds_of(settings: Convert, parts: Sequence[Part], workers: Workers) -> Uint64Array:
    """Return the least key of each shard but the first."""
    shards = sum(part.source.rows for part in parts) // ROWS + 1
    share = np.arange(1, shards) / shards
    if settings.order == "user":
        return (share * 2.0**64).astype(np.uint64)

    def look(part: Part) -> npt.NDArray[np.int64]:
        chunks = part.chunks([str(settings.time)])
        times = [times_of(chunk, str(settings.time), path, first) for path, first, chunk in chunks]
        times_N = np.sort(np.concatenate(times))
        return times_N[np.linspace(0, len(times_N) - 1, SAMPLE).astype(np.int64)]

    some = np.sort(np.concatenate([*workers.each(parts, look)]))
    return _unsigned(some[(share * len(some)).astype(np.int64)])


def in_order(files: Sequence[Path], shard: int) -> Iterator[pa.Table]:
    """Yield the rows of a shard, sorted, a row group at a time."""
    rows = dealt(files, shard).combine_chunks()  # else each `take` below would copy all rows
    order_N = np.lexsort((rows[TIME].to_numpy(), rows[KEY].to_numpy()))
    for begin in range(0, len(order_N), GROUP_ROWS):
        some = rows.take(pa.array(order_N[begin : begin + GROUP_ROWS]))
        yield some.drop_columns([KEY, TIME])


def _unsigned(times_N: npt.NDArray[np.int64]) -> Uint64Array:
    """Return times as unsigned integers of the same order."""
    return times_N.view(np.uint64) ^ np.uint64(2**63)
