"""Which files a path means: a file, a glob, a directory, a hive directory, a `_file_list.txt`, or a
list of those.

    logs/                                     its *.parquet, in natural order: day_2 before day_10
    logs/dt=2026-01-01/*.parquet, dt=...      the files of all partitions, partition by partition
    logs/day_*.parquet, logs/dt=2026-01-*     matching files; where there are none, matching
    directories

Names beginning with `_` or `.` are no data. What a partition is called (`dt`) is not a column.
Other formats than Parquet and other places than mounted directories are refused with what to do.
Nothing is opened here but text that is to be converted, for its first line.
"""

import re
from collections.abc import Iterable, Sequence
from glob import glob, has_magic
from pathlib import Path

from recapp.dataset.text_files import TEXT_SUFFIXES, conversion
from recapp.errors import DataError, suggest

_FILE_LIST = "_file_list.txt"
_SUFFIXES = (".parquet", ".parq", ".pq")
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_PARTITION = re.compile(r"[^=]+=")


def file_names(paths: str | Sequence[str], *, setting: str = "dataset.path") -> list[str]:
    """The files that `paths` names, none of them opened.

    Raises DataError for a path that is not there, holds nothing, is no path but a URI, or holds
    text instead of Parquet; that error carries the lines of Python that convert the text as notes.
    """
    given = given_paths(paths)
    if not given:
        raise DataError(f"{setting}: an empty list; name a directory, a glob or Parquet files")
    names = []
    for path in given:
        try:
            names += _expand(path, setting)
        except OSError as error:
            raise DataError(f"{setting}={path}: cannot be read ({error.strerror})") from error
    return names


def given_paths(paths: str | Sequence[str]) -> list[str]:
    """The paths of a setting that is one path or a list of them."""
    return [paths] if isinstance(paths, str) else [str(path) for path in paths]


def _expand(path: str, setting: str) -> list[str]:
    """The files behind one path, in natural order."""
    _refuse_uri(path, setting)
    if has_magic(path) and not Path(path).exists():
        return _matching(path, setting)
    place = Path(path)
    if place.name == _FILE_LIST and place.is_file():
        return _listed(place, setting)
    if place.is_dir():
        return _in_directory(place, setting)
    if not place.exists():
        near = (
            suggest(place.name, [entry.name for entry in place.parent.iterdir()])
            if place.parent.is_dir()
            else ""
        )
        raise DataError(
            f"{setting}={path}: no such file or directory{f'; {near}' if 'did you' in near else ''}"
        )
    if not place.is_file():
        raise DataError(f"{setting}={path}: is neither a file nor a directory")
    _refuse_text([place], setting, path)
    return [path]


def _refuse_uri(path: str, setting: str) -> None:
    found = _URI.match(path)
    if not found:
        return
    if found[1].lower() == "file":
        raise DataError(f"{setting}={path}: write the path itself, {path[len('file://') :]}")
    raise DataError(
        f"{setting}={path}: recapp reads local and mounted directories, it has no client for "
        f"{found[1]}://; mount it or copy the files, then name that path"
    )


def _refuse_text(files: Sequence[Path], setting: str, given: str) -> None:
    """Where files are text that can be converted: how."""
    texts = [file for file in files if file.suffix.lower() in TEXT_SUFFIXES]
    if not texts or len(texts) < len(files):
        return
    lines, written = conversion(texts, given)
    error = DataError(
        f"{setting}={given}: {texts[0].suffix} is read after it is converted to Parquet: "
        f"run the three lines of Python above, then set {setting}={written}"
    )
    for line in lines:
        error.add_note(line)
    raise error


def _matching(path: str, setting: str) -> list[str]:
    """What a glob finds: files, or else the files of the directories that it finds."""
    found = [name for name in glob(path) if not _hidden(name)]
    files = _naturally(name for name in found if Path(name).is_file())
    if files:
        _refuse_text([Path(name) for name in files], setting, path)
        return files
    directories = _naturally(name for name in found if Path(name).is_dir())
    if not directories:
        raise DataError(f"{setting}={path}: no file matches; check the pattern")
    return [name for directory in directories for name in _in_directory(Path(directory), setting)]


def _in_directory(place: Path, setting: str) -> list[str]:
    entries = [entry for entry in place.iterdir() if not _hidden(entry.name)]
    found = _naturally(
        str(entry) for entry in entries if entry.suffix in _SUFFIXES and entry.is_file()
    )
    partitions = _partitions(entries)
    if found and partitions:
        raise DataError(
            f"{setting}={place}: holds {Path(found[0]).name} beside partitions such as "
            f"{partitions[0].name}; name what is meant, {place}/*.parquet or "
            f"{place}/{partitions[0].name.partition('=')[0]}=*"
        )
    found = found or _of_partitions(partitions)
    if found:
        return found
    below = sorted(
        {
            entry.name
            for entry in entries
            if entry.is_dir() and any(any(entry.glob(f"*{end}")) for end in _SUFFIXES)
        }
    )
    if below:
        raise DataError(
            f"{setting}={place}: no Parquet files here, but in {', '.join(below)}; "
            "name one of those directories"
        )
    _refuse_text(
        [entry for entry in entries if entry.suffix.lower() in TEXT_SUFFIXES], setting, str(place)
    )
    has = f"has {', '.join(sorted(entry.name for entry in entries)[:5])}" if entries else "is empty"
    raise DataError(
        f"{setting}={place}: no Parquet files ({', '.join(_SUFFIXES)}); the directory {has}"
    )


def _partitions(entries: Iterable[Path]) -> list[Path]:
    """The `key=value` directories among some entries, in natural order."""
    names = _naturally(
        str(entry) for entry in entries if _PARTITION.match(entry.name) and entry.is_dir()
    )
    return [Path(name) for name in names]


def _of_partitions(partitions: Sequence[Path]) -> list[str]:
    """The Parquet files of partitions and of the partitions within them."""
    found = []
    for partition in partitions:
        entries = [entry for entry in partition.iterdir() if not _hidden(entry.name)]
        found += _naturally(
            str(entry) for entry in entries if entry.suffix in _SUFFIXES and entry.is_file()
        )
        found += _of_partitions(_partitions(entries))
    return found


def _listed(place: Path, setting: str) -> list[str]:
    """The files of a `_file_list.txt`: a count, then paths, often those of the machine that wrote
    it.
    """
    lines = [
        line.strip() for line in place.read_text(errors="replace").splitlines() if line.strip()
    ]
    if not lines or not lines[0].isdigit() or int(lines[0]) != len(lines) - 1:
        raise DataError(
            f"{setting}={place}: the first line must be the number of paths that follow; "
            f"{max(len(lines) - 1, 0)} follow"
        )
    names = []
    for line in lines[1:]:
        beside = place.parent / Path(line).name
        found = [
            candidate
            for candidate in (Path(line), place.parent / line, beside)
            if candidate.is_file()
        ]
        if not found:
            raise DataError(
                f"{setting}={place}: names {line}, which is neither there nor beside the list"
            )
        names.append(str(found[0]))
    return names


def _hidden(name: str) -> bool:
    return Path(name).name[:1] in ("_", ".")


def _naturally(names: Iterable[str]) -> list[str]:
    return sorted(
        names,
        key=lambda name: [
            int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)
        ],
    )
