"""Read the first rows of a data set to choose sizes of tables, and to check that text can be
ids.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recapp.dataset.schema import Schema
from recapp.dataset.sequential_chunks import decoded_chunks
from recapp.dataset.source import Source
from recapp.sparse.batch import MISSING

COUNTED_ROWS = 65_536
ROWS_PER_ID = 4  # rows of a table for each distinct id: few ids share a row, even later ones
GROWTH = 1.05  # if distinct ids grow by this factor over the second half, expect many more


def table_rows(source: Source, schema: Schema, most: int | None) -> list[int]:
    """Return the number of rows of each sparse feature's table, in schema order.

    Count the distinct ids of the first 65,536 rows (or of all rows, if there are fewer). The size
    is the next power of two of 4 times that count, at least 2 and at most `most`. If the count
    still grows by 5 % over the second half of those rows, the size is `most`; for a dynamic table
    the count is then extrapolated linearly to all rows.

    Args:
        source: The rows.
        schema: The columns of the rows.
        most: The largest allowed number of rows of a hashed table; None for tables that grow.
    """
    counted = min(source.rows, COUNTED_ROWS)
    seen = {name: np.zeros(0, dtype=np.int64) for name in schema.sparse}
    few = _add(seen, source.slice(0, counted // 2), schema)
    many = _add(seen, source.slice(counted // 2, counted), schema)
    made = []
    for before, now in zip(few, many, strict=True):
        grows = now > before and now >= GROWTH * before
        if most is not None:
            made.append(most if grows else min(most, rows_for(now)))
        else:
            made.append(rows_for(now * source.rows // counted if grows else now))
    return made


def rows_for(ids: int) -> int:
    """Return the rows of a table for a number of distinct ids: the next power of two of 4 times
    that.

    Without ids there are 2 rows, one of them for missing ids.
    """
    return 1 << max(ROWS_PER_ID * ids - 1, 1).bit_length()


def check_values(
    source: Source, schema: Schema, *, ids: Sequence[str] = (), numbers: Sequence[str] = ()
) -> None:
    """Decode some features of the first row group.

    Args:
        source: The rows.
        schema: The columns of the rows.
        ids: Sparse features whose text must spell integers.
        numbers: Dense features.

    Raises:
        DataError: A value is not an id, or not a number.
    """
    sparse = tuple(ids) or schema.sparse[:1]  # a schema has at least one
    first = Source(source.files, source.segments[:1], source.bags).only([*numbers, *sparse])
    hexadecimal = tuple(name for name in schema.hex if name in sparse)
    some = replace(schema.unlabelled(), dense=tuple(numbers), sparse=sparse, hex=hexadecimal)
    for _ in decoded_chunks(first, some):
        pass


def _add(seen: dict[str, np.ndarray], source: Source, schema: Schema) -> list[int]:
    """Add the ids of some rows to the ids seen so far.

    Returns:
        The number of distinct ids of each feature so far, without missing ids.
    """
    ids_only = replace(schema.unlabelled(), dense=())
    for rows in decoded_chunks(source.only(schema.sparse), ids_only):
        single = iter(rows.ids_NS.T)
        bags = iter(rows.bags)
        for name, known in seen.items():
            seen[name] = np.union1d(
                known, next(bags).values_L if name in source.bags else next(single)
            )
    return [int((known != MISSING).sum()) for known in seen.values()]
