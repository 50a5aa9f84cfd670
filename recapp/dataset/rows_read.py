"""Tell what a run reads: files, rows, the share of positive labels, the range of times, and what of
the given directories is left out.

    files, settings -> a record -> metrics.json, the start report, the page of the run

    {"splits": {"train": {"files": 3, "first": PATH, "last": PATH, "rows": 70,
                          "positives": {"label": 0.25}, "positives_of": 70}},
     "times": {"ts": ["2026-01-31 08:15:00", "2026-02-01 08:14:59"]},
     "left_out": [{"why": "hidden", "count": 2, "names": ["_SUCCESS", "_metadata"]}]}

A split without rows is left out. `positives` has the share of each label that is 0 or 1 (the mean
of one from 0 to 1), of `positives_of` rows: of all, or of at most a million rows spread over all
files. It is empty if a value is no label, which is an error where the row is read. Times are null
if the files do not tell them.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from recapp.dataset.click_rows import ClickRows
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.decode import decode_finite, decode_labels
from recapp.dataset.files import left_out
from recapp.dataset.schema import Schema
from recapp.dataset.sequential_rows import arrow_chunks
from recapp.dataset.source import Source
from recapp.dataset.text import BadValue
from recapp.dataset.time_range import time_range
from recapp.errors import DataError
from recapp.settings.values import Paths

LABEL_ROWS = 2**20
LABEL_PARTS = 256  # of row groups; opening a file takes time, too
NAMED = 3  # the most names of what is left out, for each reason


def rows_read(
    sources: Mapping[str, Source], schema: Schema, paths: Mapping[str, Paths | None]
) -> dict[str, Any]:
    """Return what a run reads. This opens each file, and reads labels of at most a million rows of
    each split.

    Args:
        sources: The rows of each split.
        schema: The columns.
        paths: The values of the settings that name them, by setting.
    """
    used = {name: _used(source) for name, source in sources.items() if source.rows}
    found = {name: _split_read(source, schema) for name, source in used.items()}
    files = list({file.path: file for source in used.values() for file in source.files}.values())
    ends = {name: time_range(files, name, unit) for name, unit in schema.times.items()}
    times = {name: end and [moment(end[0]), moment(end[1])] for name, end in ends.items()}
    rest: dict[str, list[str]] = {}
    for setting, given in paths.items():
        for why, names in left_out(given, setting=setting).items() if given else ():
            rest.setdefault(why, []).extend(names)
    out = [{"why": w, "count": len(names), "names": names[:NAMED]} for w, names in rest.items()]
    return {"splits": found, "times": times, "left_out": out}


def rows_of(settings: DataSettings, rows: ClickRows, splits: Sequence[str]) -> dict[str, Any]:
    """Return what a training, or an evaluation, reads.

    Args:
        settings: The settings of the data set.
        rows: Its rows.
        splits: `train`, `val` or `test`.
    """
    apart = {"test"} if settings.val_path is None else {"val", "test"}
    named = [f"{split}_path" if split in apart else "path" for split in splits]
    paths = {f"dataset.{name}": getattr(settings, name) for name in named}
    return rows_read({split: rows.of(split) for split in splits}, rows.schema, paths)


def moment(seconds: int) -> str:
    """Return seconds since 1970 (UTC) for people, in any year: `2026-01-31 08:15:00`."""
    return str(np.datetime64(seconds, "s")).replace("T", " ")


def _used(source: Source) -> Source:
    """Return a source without the files of which it has no rows."""
    numbers = sorted({segment.file for segment in source.segments})
    place = {number: new for new, number in enumerate(numbers)}
    segments = tuple(each._replace(file=place[each.file]) for each in source.segments)
    return Source(tuple(source.files[number] for number in numbers), segments, source.bags)


def _split_read(source: Source, schema: Schema) -> dict[str, Any]:
    some = _spread(source)
    positives: dict[str, float] = {}
    with suppress(DataError, BadValue):
        positives = _positives(some, schema)
    first, last = (os.path.abspath(source.files[end].path) for end in (0, -1))
    return {
        "files": len(source.files),
        "first": first,
        "last": last,
        "rows": source.rows,
        "positives": positives,
        "positives_of": some.rows,
    }


def _positives(source: Source, schema: Schema) -> dict[str, float]:
    """Return the mean of each label that is a share.

    Raises:
        DataError, BadValue: A row cannot be read, or holds no label.
    """
    labels = [name for name in schema.labels if name not in schema.real_labels]
    sums = dict.fromkeys(labels, 0.0)
    for file, _, chunk in arrow_chunks(source.only(labels)) if labels else ():
        for name in labels:
            column = chunk.column(file.columns[name])
            soft = name in schema.soft_labels
            values = decode_finite(column, "label", 0, 1) if soft else decode_labels(column)
            sums[name] += float(values.sum(dtype=np.float64))
    return {name: value / source.rows for name, value in sums.items()}


def _spread(source: Source) -> Source:
    """Return at most `LABEL_ROWS` rows that are spread over the source, or all of fewer."""
    if source.rows <= LABEL_ROWS and len(source.segments) <= LABEL_PARTS:
        return source
    parts = source.segments[:: -(-len(source.segments) // LABEL_PARTS)]
    most = LABEL_ROWS // len(parts)
    return Source(
        source.files, tuple(each._replace(rows=min(each.rows, most)) for each in parts), source.bags
    )
