"""Tell what a run reads: files, rows, the share of positive labels, the range of times, and what of
the given directories is left out.

    files, settings -> RowsRead -> metrics.json, the start report, the page of the run

The share of a label is that of all rows, or of at most a million rows spread over all files.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class SplitRead:
    """The rows of a split.

    Args:
        files: The number of its files.
        first: The first file.
        last: The last file.
        rows: The number of rows.
        positives: The share of each label that is 0 or 1 (the mean of one from 0 to 1); empty if a
            value is no label, which is an error where the row is read.
        positives_of: The number of rows that these shares are of.
    """

    files: int
    first: str
    last: str
    rows: int
    positives: Mapping[str, float]
    positives_of: int


@dataclass(frozen=True)
class LeftOut:
    """Files and directories that a given directory has and no reader reads, for one reason.

    Args:
        why: The reason, as a noun: `hidden`.
        count: Their number.
        names: The first names.
    """

    why: str
    count: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class RowsRead:
    """What a run reads.

    Args:
        splits: The rows of each split that has some: `train`, `val`, `test` or `input`.
        times: The first and the last time of each column of times, for people; None if the files do
            not say.
        left_out: What is left out.
    """

    splits: Mapping[str, SplitRead]
    times: Mapping[str, tuple[str, str] | None]
    left_out: tuple[LeftOut, ...]

    def plain(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return asdict(self)


def rows_read(
    sources: Mapping[str, Source], schema: Schema, paths: Mapping[str, Paths | None]
) -> RowsRead:
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
    times = {name: end and (moment(end[0]), moment(end[1])) for name, end in ends.items()}
    rest: dict[str, list[str]] = {}
    for setting, given in paths.items():
        for why, names in left_out(given, setting=setting).items() if given else ():
            rest.setdefault(why, []).extend(names)
    out = [LeftOut(why, len(names), tuple(names[:NAMED])) for why, names in rest.items()]
    return RowsRead(found, times, tuple(out))


def rows_of_training(settings: DataSettings, rows: ClickRows) -> RowsRead:
    """Return what a training run reads.

    Args:
        settings: The settings of the data set.
        rows: Its rows.
    """
    paths = {"dataset.path": settings.path, "dataset.val_path": settings.val_path}
    return rows_read({"train": rows.train, "val": rows.val}, rows.schema, paths)


def rows_of_split(settings: DataSettings, rows: ClickRows, split: str) -> RowsRead:
    """Return what an evaluation reads.

    Args:
        settings: The settings of the data set.
        rows: Its rows.
        split: `val` or `test`.
    """
    apart = split == "test" or settings.val_path is not None
    named = f"{split}_path" if apart else "path"
    paths = {f"dataset.{named}": getattr(settings, named)}
    return rows_read({split: rows.of(split)}, rows.schema, paths)


def moment(seconds: int) -> str:
    """Return seconds since 1970 (UTC) for people, in any year: `2026-01-31 08:15:00`."""
    return str(np.datetime64(seconds, "s")).replace("T", " ")


def _used(source: Source) -> Source:
    """Return a source without the files of which it has no rows."""
    numbers = sorted({segment.file for segment in source.segments})
    place = {number: new for new, number in enumerate(numbers)}
    segments = tuple(each._replace(file=place[each.file]) for each in source.segments)
    return Source(tuple(source.files[number] for number in numbers), segments, source.bags)


def _split_read(source: Source, schema: Schema) -> SplitRead:
    files = source.files
    some = _spread(source)
    positives: dict[str, float] = {}
    with suppress(DataError, BadValue):
        positives = _positives(some, schema)
    first, last = (os.path.abspath(files[end].path) for end in (0, -1))
    return SplitRead(len(files), first, last, source.rows, positives, some.rows)


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
