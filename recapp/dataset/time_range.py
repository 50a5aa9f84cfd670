"""The range of a column of times, from the statistics of row groups, without reading a value.

    footers -> the least and the largest time of all rows, in whole seconds since 1970 (UTC)

A wrong unit shows itself here: seconds that are read as milliseconds are all in January 1970.
"""

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pyarrow.types as pt

from recapp.dataset.arrow_types import value_type
from recapp.dataset.data_file import DataFile
from recapp.dataset.decode import TICKS
from recapp.dataset.derived_columns import DAY_SECONDS
from recapp.dataset.parquet import of_row_group

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
        found = _of_file(file, file.columns[column], unit) if column in file.columns else None
        if found is None:
            return None
        ends += found
    return (min(ends), max(ends)) if ends else None


def _of_file(file: DataFile, name: str, unit: str) -> list[int] | None:
    """Return the first and the last time of each row group of a file that has some; None if the
    file does not say.
    """
    kind = value_type(file.types.field(name).type)
    found: list[int] = []
    for number in range(len(file.starts) - 1):
        group = of_row_group(file, name, number)
        stored = group and group.statistics
        if stored is None or not stored.has_min_max:
            if stored and stored.has_null_count and stored.null_count == group.num_values:
                continue  # all of them are missing
            return None
        tick = _tick(stored, kind, unit)
        ends = (stored.min_raw, stored.max_raw)
        if pt.is_unsigned_integer(kind):  # the raw numbers are signed
            ends = (stored.min, stored.max)
        if tick is None or not all(map(math.isfinite, ends)):
            return None
        found += [math.floor(end * tick) for end in ends]
    return found


def _tick(stored: Any, kind: Any, unit: str) -> Fraction | None:
    """Return the seconds of one tick of the numbers that Parquet stores; None if they are no times.

    Parquet has no seconds: it stores Arrow's timestamps in seconds as milliseconds.
    """
    if pt.is_date(kind):
        return Fraction(DAY_SECONDS)
    if pt.is_timestamp(kind) and stored.physical_type == "INT64":  # INT96 has no order
        unit = _UNITS.get(json.loads(stored.logical_type.to_json()).get("timeUnit"), "")
    elif not (pt.is_integer(kind) or pt.is_floating(kind)):
        return None
    return Fraction(1, TICKS[unit]) if unit else None
