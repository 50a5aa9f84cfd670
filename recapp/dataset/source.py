"""A source of rows: files, their row groups, and the number of rows of each, before any row is
read.

    Source  =  segments in file order
               file 0: row group 0 [0, 1718)    file 1: row group 0 [0, 1655)    ..

A segment is a row group, or the part of a row group after a cut. This file reads no values. A
source can be cut at any row (`slice`, `split`), so that "the first 6/7" of a log is exact without
rewriting its files.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from recapp.dataset.arrow_types import is_list
from recapp.dataset.data_file import DataFile, UnreadableFileError, facts_of, stamp_of
from recapp.dataset.files import file_names, given_paths
from recapp.dataset.formats import format_of, kind_of
from recapp.dataset.schema import Schema
from recapp.errors import ConfigError, DataError


class Segment(NamedTuple):
    """Consecutive rows of one row group.

    Args:
        file: The number of the file.
        row_group: The number of the row group in it.
        first: The first row within the row group.
        rows: The number of rows.
    """

    file: int
    row_group: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of some files, in file order.

    Args:
        files: The files.
        segments: The parts of their row groups that belong to the source.
        bags: The sparse features with many ids per row, as `Schema.bags` tells.
    """

    files: tuple[DataFile, ...]
    segments: tuple[Segment, ...]
    bags: frozenset[str]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(segment.rows for segment in self.segments)

    def slice(self, first: int, last: int) -> "Source":
        """Return the rows [first, last) of this source.

        A cut row group becomes a shorter segment.
        """
        segments = []
        offset = 0
        for file, row_group, start, rows in self.segments:
            left = max(first - offset, 0)
            right = min(last - offset, rows)
            if left < right:
                segments.append(Segment(file, row_group, start + left, right - left))
            offset += rows
        return Source(self.files, tuple(segments), self.bags)

    def only(self, features: Collection[str]) -> "Source":
        """Return the same rows with only the columns of some features.

        Args:
            features: Canonical names.
        """
        narrowed = (
            file._replace(
                columns={name: column for name, column in file.columns.items() if name in features}
            )
            for file in self.files
        )
        return Source(tuple(narrowed), self.segments, self.bags & frozenset(features))


def open_source(
    paths: str | Sequence[str], schema: Schema, *, setting: str = "dataset.path"
) -> Source:
    """Open the files that `paths` names.

    Args:
        paths: A path or a list of them, as in `recapp.dataset.files`; a list keeps its order.
        schema: The required columns of every file.
        setting: The setting's name, for error messages.

    Raises:
        DataError: A path does not exist or has no data, or a file is not whole or lacks a column of
            `schema`.
    """
    names = file_names(paths, setting=setting)
    source = open_files(names, schema, setting=setting)
    if not source.segments:
        raise DataError(
            f"{setting}={given_paths(paths)[0]}: {len(names)} file(s) without a single row"
        )
    return source


def open_files(names: Sequence[str], schema: Schema, *, setting: str = "dataset.path") -> Source:
    """Open files by name; they may have no rows.

    Args:
        names: The files.
        schema: The required columns of every file.
        setting: The setting's name, for error messages.

    Raises:
        DataError: A file is not whole, or lacks a column of `schema`.
    """
    files: list[DataFile] = []
    segments: list[Segment] = []
    bags = frozenset[str]()
    for number, name in enumerate(names):
        file, own_bags, groups = _open_file(name, schema, setting)
        if files and own_bags != bags:
            one = min(own_bags ^ bags)
            here, there = ("a list", "one id") if one in own_bags else ("one id", "a list")
            raise DataError(
                f"{name}: column {file.columns[one]} ({one}) holds {here} a row, "
                f"in {names[0]} {there}; convert one of them"
            )
        bags = own_bags
        files.append(file)
        segments += [Segment(number, group, 0, rows) for group, rows in enumerate(groups) if rows]
    return Source(tuple(files), tuple(segments), bags)


def split(source: Source, val_share: Fraction, written: object = None) -> tuple[Source, Source]:
    """Split a source, in file order, into training rows and validation rows.

    Training gets the first floor(rows * (1 - val_share)) rows.

    Args:
        source: The rows.
        val_share: The share of validation rows, from 0 to less than 1.
        written: The user's text of the share, for errors.

    Raises:
        ConfigError: The share leaves no training rows.
    """
    rows_train = int(source.rows * (1 - val_share))
    if rows_train == 0:
        raise ConfigError(
            f"dataset.val_share={written or val_share}: leaves none of {source.rows} rows to train "
            "on; choose a smaller share"
        )
    return source.slice(0, rows_train), source.slice(rows_train, source.rows)


def _open_file(
    name: str, schema: Schema, setting: str
) -> tuple[DataFile, frozenset[str], Sequence[int]]:
    """Open a file; return it, its features with lists, and the rows of each row group."""
    format = format_of(name)
    try:
        stamp = stamp_of(name)
        types, rows = facts_of(format, name, stamp)
    except (OSError, UnreadableFileError) as error:
        if kind := kind_of(name, format):
            raise DataError(
                f"{setting}: {name} is {kind.name}, not {format.name}: {kind.fix}"
            ) from error
        raise DataError(
            f"{setting}: {name} is not a whole {format.name} file ({error}); write it again or "
            "leave it out"
        ) from error
    columns = schema.resolve(types, name)
    lists = (feature for feature in schema.sparse if is_list(types.field(columns[feature]).type))
    starts = tuple(accumulate(rows, initial=0))
    return DataFile(name, format, stamp, columns, starts), schema.bags(frozenset(lists)), rows
