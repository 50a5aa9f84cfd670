"""Where the rows lie: files, their row groups and how many rows each has, from the footers alone.

    Source  =  segments in file order
               file 0: row group 0 [0, 1718)
               file 1: row group 0 [0, 1655)      a segment is a row group, or the part of one that a cut left

Nothing here reads a value. A source can be cut at any row (`slice`, `split`), so that "the first 6/7" of a log is exact
although nobody rewrote its files.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from recapp.dataset.schema import Schema, is_list, is_text
from recapp.errors import ConfigError, DataError, suggest

_FILE_LIST = "_file_list.txt"
_SUFFIXES = (".parquet", ".parq", ".pq")


class DataFile(NamedTuple):
    """One Parquet file: its path, canonical name -> column, the columns to decode as dictionaries, its row groups' first rows."""

    path: str
    columns: dict[str, str]
    texts: tuple[str, ...]
    starts: tuple[int, ...]


class Segment(NamedTuple):
    """Consecutive rows of one row group: rows [first, first + rows) of row group `row_group` of file number `file`."""

    file: int
    row_group: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of some files, in file order. `bags`: the sparse features that are lists (many ids a row)."""

    files: tuple[DataFile, ...]
    segments: tuple[Segment, ...]
    bags: frozenset[str]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(segment.rows for segment in self.segments)

    def slice(self, first: int, last: int) -> "Source":
        """The rows [first, last) of this source; a row group that is cut becomes a shorter segment."""
        kept, seen = [], 0
        for file, row_group, start, rows in self.segments:
            left, right = max(first - seen, 0), min(last - seen, rows)
            if left < right:
                kept.append(Segment(file, row_group, start + left, right - left))
            seen += rows
        return Source(self.files, tuple(kept), self.bags)


def open_source(paths: str | Sequence[str], schema: Schema, *, setting: str = "dataset.path") -> Source:
    """Read the footers of the Parquet files that `paths` names.

    paths: a directory (its `*.parquet`, without `_*` and `.*`), a glob, a `_file_list.txt`, a file, or a list of those. Files of a
    directory or glob are taken in natural order of their names (day_2 before day_10); a list keeps its order.
    setting: the name that error messages give the user.
    Raises DataError for a path that is not there, holds nothing, is no whole Parquet file or lacks a column of `schema`.
    """
    names = file_names(paths, setting=setting)
    files: list[DataFile] = []
    segments: list[Segment] = []
    bags = frozenset[str]()
    for number, name in enumerate(names):
        file, own_bags, groups = _open_file(name, schema, setting)
        if files and own_bags != bags:
            one = min(own_bags ^ bags)
            here, there = ("a list", "one id") if one in own_bags else ("one id", "a list")
            raise DataError(f"{name}: column {file.columns[one]} ({one}) holds {here} a row, in {names[0]} {there}; convert one of them")
        bags = own_bags
        files.append(file)
        segments += [Segment(number, group, 0, rows) for group, rows in enumerate(groups) if rows]
    if not segments:
        raise DataError(f"{setting}={_given(paths)[0]}: {len(names)} Parquet file(s) without a single row")
    return Source(tuple(files), tuple(segments), bags)


def file_names(paths: str | Sequence[str], *, setting: str = "dataset.path") -> list[str]:
    """The files that `paths` names, none of them opened.

    Raises DataError for a path that is not there or holds nothing.
    """
    if not _given(paths):
        raise DataError(f"{setting}: an empty list; name a directory, a glob or Parquet files")
    return [name for path in _given(paths) for name in _expand(path, setting)]


def split(source: Source, val_share: Fraction) -> tuple[Source, Source]:
    """Cut in file order: the first floor(rows * (1 - val_share)) rows to train on, the rest to validate.

    Raises ConfigError when the share is outside [0, 1) or leaves nothing to train on.
    """
    if not 0 <= val_share < 1:
        raise ConfigError(f"dataset.val_share={val_share}: a share of the rows, from 0 to less than 1, is allowed")
    rows_train = int(source.rows * (1 - val_share))
    if rows_train == 0:
        raise ConfigError(f"dataset.val_share={val_share}: leaves none of {source.rows} rows to train on; choose a smaller share")
    return source.slice(0, rows_train), source.slice(rows_train, source.rows)


def _given(paths: str | Sequence[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else [str(path) for path in paths]


def _expand(path: str, setting: str) -> list[str]:
    """The files behind one path, in natural order."""
    if has_magic(path) and not Path(path).exists():
        found = _naturally(name for name in glob(path) if not _hidden(name) and Path(name).is_file())
        if not found:
            raise DataError(f"{setting}={path}: no file matches; check the pattern")
        return found
    place = Path(path)
    if place.name == _FILE_LIST and place.is_file():
        return _listed(place, setting)
    if place.is_dir():
        return _in_directory(place, setting)
    if not place.exists():
        near = suggest(place.name, [entry.name for entry in place.parent.iterdir()]) if place.parent.is_dir() else ""
        raise DataError(f"{setting}={path}: no such file or directory{f'; {near}' if 'did you' in near else ''}")
    return [path]


def _in_directory(place: Path, setting: str) -> list[str]:
    entries = [entry for entry in place.iterdir() if not _hidden(entry.name)]
    found = _naturally(str(entry) for entry in entries if entry.suffix in _SUFFIXES)
    if found:
        return found
    below = sorted({entry.name for entry in entries if entry.is_dir() and any(any(entry.glob(f"*{end}")) for end in _SUFFIXES)})
    if below:
        raise DataError(f"{setting}={place}: no Parquet files here, but in {', '.join(below)}; name one of those directories")
    has = f"has {', '.join(sorted(entry.name for entry in entries)[:5])}" if entries else "is empty"
    raise DataError(f"{setting}={place}: no Parquet files ({', '.join(_SUFFIXES)}); the directory {has}")


def _listed(place: Path, setting: str) -> list[str]:
    """The files of a `_file_list.txt`: a count, then paths, often those of the machine that wrote it."""
    lines = [line.strip() for line in place.read_text().splitlines() if line.strip()]
    if not lines or not lines[0].isdigit() or int(lines[0]) != len(lines) - 1:
        raise DataError(f"{setting}={place}: the first line must be the number of paths that follow; {len(lines) - 1} follow")
    names = []
    for line in lines[1:]:
        beside = place.parent / Path(line).name
        found = [candidate for candidate in (Path(line), place.parent / line, beside) if candidate.is_file()]
        if not found:
            raise DataError(f"{setting}={place}: names {line}, which is neither there nor beside the list")
        names.append(str(found[0]))
    return names


def _open_file(name: str, schema: Schema, setting: str) -> tuple[DataFile, frozenset[str], list[int]]:
    try:
        with pq.ParquetFile(name) as file:
            arrow_schema, metadata = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{setting}: {name} is not a whole Parquet file ({reason}); write it again or leave it out") from error
    columns = schema.resolve(arrow_schema, name)
    groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    starts = [sum(groups[:index]) for index in range(len(groups))]
    types = {column: arrow_schema.field(column).type for column in columns.values()}
    bags = frozenset(feature for feature in schema.sparse if is_list(types[columns[feature]]))
    texts = tuple(column for column, kind in types.items() if is_text(kind))
    return DataFile(name, columns, texts, tuple(starts)), bags, groups


def _hidden(name: str) -> bool:
    return Path(name).name[:1] in ("_", ".")


def _naturally(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
