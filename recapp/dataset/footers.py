"""Find ids that are outside of their tables, and bags that are too long: in the footers of files
before training, and in rows after an error.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow.types as pt

from recapp.dataset.arrow_types import value_type
from recapp.dataset.data_file import DataFile
from recapp.dataset.decode import TICKS
from recapp.dataset.derived_columns import DAY_SECONDS
from recapp.dataset.formats import of_row_group
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
    for path, first, begins, ids in _bags(narrowed, schema, feature):
        positions = np.flatnonzero(ids == number)
        if len(positions):
            row = first + int(np.searchsorted(begins, positions[0], side="right")) - 1
            return f"row {row} of {path}"
    return ""


def place_of_bag(source: Source, schema: Schema, feature: str, length: int) -> str:
    """Return the first row of a source whose bag of a feature has so many ids, and its file, as
    part of a line; empty if there is none.
    """
    for path, first, begins, _ in _bags(source, schema, feature):
        positions = np.flatnonzero(np.diff(begins) == length)
        if len(positions):
            return f"row {first + int(positions[0])} of {path}"
    return ""


def _bags(
    source: Source, schema: Schema, feature: str
) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """Yield for each chunk of rows its file, its first row there, the offsets of the bags of a
    feature, and the ids; nothing for a feature that is computed.
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
        yield file.path, first, begins, ids


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


_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}


def time_range(files: Sequence[DataFile], column: str, unit: str) -> tuple[int, int] | None:
    """Return the first and the last time of a column, in whole seconds since 1970 (UTC).

    Return None if the files do not say: a writer has left statistics out, times are text, whose
    statistics are in the order of letters, all times are missing, or a file is not Parquet.

    Args:
        files: The files.
        column: The canonical name of the column.
        unit: The unit of plain numbers, as in `dataset.times`.
    """
    ends: list[int] = []
    for file in files:
        file_ends = _of_file(file, file.columns[column], unit) if column in file.columns else None
        if file_ends is None:
            return None
        ends += file_ends
    return (min(ends), max(ends)) if ends else None


def _of_file(file: DataFile, name: str, unit: str) -> list[int] | None:
    """Return the first and the last time of each row group of a file that has some; None if the
    file does not say.
    """
    kind = value_type(file.types.field(name).type)
    times: list[int] = []
    for number in range(len(file.starts) - 1):
        group = of_row_group(file, name, number)
        statistics = group and group.statistics
        if statistics is None or not statistics.has_min_max:
            if (
                statistics
                and statistics.has_null_count
                and statistics.null_count == group.num_values
            ):
                continue  # all of them are missing
            return None
        tick = _tick(statistics, kind, unit)
        ends = (statistics.min_raw, statistics.max_raw)
        if pt.is_unsigned_integer(kind):  # the raw numbers are signed
            ends = (statistics.min, statistics.max)
        if tick is None or not all(map(math.isfinite, ends)):
            return None
        times += [math.floor(end * tick) for end in ends]
    return times


def _tick(statistics: Any, kind: Any, unit: str) -> Fraction | None:
    """Return the seconds of one tick of the numbers that Parquet stores; None if they are no times.

    Parquet has no seconds: it stores Arrow's timestamps in seconds as milliseconds.
    """
    if pt.is_date(kind):
        return Fraction(DAY_SECONDS)
    if pt.is_timestamp(kind) and statistics.physical_type == "INT64":  # INT96 has no order
        unit = _UNITS.get(json.loads(statistics.logical_type.to_json()).get("timeUnit"), "")
    elif not (pt.is_integer(kind) or pt.is_floating(kind)):
        return None
    return Fraction(1, TICKS[unit]) if unit else None
