"""Find ids that are outside of their tables, and bags that are too long: in the footers of files
before training, and in rows after an error.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from recapp.dataset.parquet import of_row_group
from recapp.dataset.schema import Schema
from recapp.dataset.source import Segment, Source


def first_outside(
    source: Source, schema: Schema, limits: Mapping[str, range]
) -> tuple[str, int] | None:
    """Return a feature and an id of it that its table has no row for; None if the footers of the
    files show none. No value is read.

    Args:
        source: The rows.
        schema: The columns of the rows.
        limits: The ids of each feature that its table has a row for.
    """
    for segment in source.segments:
        for feature, ids in limits.items():
            for number in _range(source, schema, segment, feature) or ():
                if number not in ids:
                    return feature, number
    return None


def place_of_id(source: Source, schema: Schema, feature: str, number: int) -> str:
    """Return the first row of a source that has an id, and its file, as part of a line; empty if
    there is none.
    """
    segments = tuple(
        segment
        for segment in source.segments
        if (ends := _range(source, schema, segment, feature)) is None
        or ends[0] <= number <= ends[1]
    )
    narrowed = Source(source.files, segments, source.bags)
    for begins, ids, place in _bags(narrowed, schema, feature):
        found = np.flatnonzero(ids == number)
        if len(found):
            return place(int(np.searchsorted(begins, found[0], side="right")) - 1)
    return ""


def place_of_bag(source: Source, schema: Schema, feature: str, length: int) -> str:
    """Return the first row of a source whose bag of a feature has so many ids, and its file, as
    part of a line; empty if there is none.
    """
    for begins, _, place in _bags(source, schema, feature):
        found = np.flatnonzero(np.diff(begins) == length)
        if len(found):
            return place(int(found[0]))
    return ""


def _bags(
    source: Source, schema: Schema, feature: str
) -> Iterator[tuple[np.ndarray, np.ndarray, Callable[[int], str]]]:
    """Yield for each chunk of rows the offsets of their bags of a feature, the ids, and a function
    that names a row; nothing for a feature that is computed.
    """
    if feature not in schema.sparse or feature in {column.name for column in schema.derived}:
        return
    # these import torch, which a command that finds nothing need not load
    from recapp.dataset.collate import Collate
    from recapp.dataset.sequential_rows import arrow_chunks, ids_by_feature

    some = schema.unlabelled().only_raw((), (feature,))
    narrowed = source.only([feature])
    collate = Collate(some, narrowed.bags, "none")
    for file, first, chunk in arrow_chunks(narrowed):
        rows = collate.rows(chunk, file.columns, file.path, first + np.arange(chunk.num_rows))
        (ids,) = ids_by_feature(rows, some, narrowed.bags).values()
        bags = [bag.offsets_N1 for bag in rows.bags]
        begins = bags[0] if bags else np.arange(len(ids) + 1)
        yield begins, ids, partial(_row_of, file.path, first)


def _row_of(path: str, first: int, row: int) -> str:
    return f"row {first + row} of {path}"


def _range(
    source: Source, schema: Schema, segment: Segment, feature: str
) -> tuple[int, int] | None:
    """Return the least and the greatest id of a feature in a row group; None if the footer does not
    tell, or the ids are not all numbers of the column: those that pad lists are no ids.
    """
    file = source.files[segment.file]
    column = of_row_group(file, file.columns.get(feature, ""), segment.row_group)
    known = column and column.statistics
    if known is None or not known.has_min_max or type(known.min) is not int:
        return None
    computed = feature not in schema.sparse or feature in {column.name for column in schema.derived}
    padding = schema.padding
    padded = feature in padding if isinstance(padding, Mapping) else padding is not None
    # 32 bits with a sign may be those of a hexadecimal number
    if computed or padded or (feature in schema.hex and known.min < 0):
        return None
    return known.min, known.max
