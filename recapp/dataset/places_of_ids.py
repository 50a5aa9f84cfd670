"""Find ids that are outside of their tables: in the footers of files before training, and in rows
after an error.
"""

from collections.abc import Mapping

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
    if feature not in schema.sparse or feature in {column.name for column in schema.derived}:
        return ""  # computed
    # these import torch, which a command that finds nothing need not load
    from recapp.dataset.collate import Collate
    from recapp.dataset.sequential_rows import arrow_chunks, ids_by_feature

    some = schema.unlabelled().only_raw((), (feature,))
    segments = tuple(
        segment
        for segment in source.segments
        if (ends := _range(source, schema, segment, feature)) is None
        or ends[0] <= number <= ends[1]
    )
    narrowed = Source(source.files, segments, source.bags).only([feature])
    collate = Collate(some, narrowed.bags, "none")
    for file, first, chunk in arrow_chunks(narrowed):
        rows = collate.rows(chunk, file.columns, file.path, first + np.arange(chunk.num_rows))
        (ids,) = ids_by_feature(rows, some, narrowed.bags).values()
        found = np.flatnonzero(ids == number)
        if len(found):
            bags = [bag.offsets_N1 for bag in rows.bags]
            row = np.searchsorted(bags[0], found[0], side="right") - 1 if bags else found[0]
            return f"row {first + int(row)} of {file.path}"
    return ""


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
