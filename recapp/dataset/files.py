"""List the files of a path: a file, a glob, a directory, a hive directory, a `_file_list.txt`, or a
list of these.

    logs/                                     its files, in natural order: day_2 before day_10
    logs/dt=2026-01-01/.., dt=...             the files of all partitions, partition by partition
    logs/day_*.parquet, logs/dt=2026-01-*     matching files; if none match, matching directories

Names that begin with `_` or `.` are skipped. The key of a partition (`dt`) is not a column. Text in
an unknown format, and paths that are not local, are refused with advice. Files that would silently
be skipped, mixed or read twice are refused as well: text beside data files that were not converted
from it, directories of data among partitions, links to directories that are read already, several
splits (`recapp/dataset/splits.py`), removed files of a table (`recapp/dataset/table_formats.py`).
This opens only files whose names tell no format, to read their first bytes.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from glob import escape, glob, has_magic
from pathlib import Path

from recapp.dataset.formats import all_suffixes, begins_as_data, format_names, is_data
from recapp.dataset.splits import glob_of, refuse_splits, settings_of_splits
from recapp.dataset.table_formats import FILE_LIST, refuse_tables
from recapp.dataset.text_files import (
    TEXT_SUFFIXES,
    conversion,
    holds_rows,
    holds_text,
    layout,
    new_folder,
    refuse_unknown,
    root_of,
)
from recapp.errors import DataError, alike, meant
from recapp.settings.small_files import read_text
from recapp.settings.values import typed

# suffixes that tell no format: none, numbers (part.0, part-0.c000) and names of compressions
_NO_FORMAT = re.compile(r"(\.[^a-z]*|\.c[0-9]+|\.(snappy|gz|gzip|zstd?|lz4|lzo|br|brotli))?")
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_MOUNTED = re.compile(r"([a-z][a-z0-9]+):/+")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_PARTITION = re.compile(r"[^=]+=")
_COUNT = re.compile(r"[0-9]{1,9}")  # the first line of a list: its number of paths


def file_names(paths: str | Sequence[str], *, setting: str = "dataset.path") -> list[str]:
    """List the files that `paths` names, without opening them.

    Args:
        paths: A path, or a list of them.
        setting: The setting's name, for error messages.

    Raises:
        DataError: A path does not exist, has no data, is a URI, or has text that no format reads.
            The last error has notes with Python code that converts the text.
    """
    given = given_paths(paths)
    if not given:
        raise DataError(
            f"{setting}: an empty list; name a directory, a glob or {format_names()} files"
        )
    names = []
    for path in given:
        try:
            names += _expand(path, setting)
        except OSError as error:
            raise DataError(f"{setting}={path}: cannot be read ({error.strerror})") from error
    return names


def left_out(paths: str | Sequence[str], *, setting: str = "dataset.path") -> dict[str, list[str]]:
    """Return what the given directories have besides the files that `file_names` lists: names by
    reason. What a glob or a list does not name is not asked for, and not left out.

    Args:
        paths: A path, or a list of them.
        setting: The setting's name, for error messages.

    Raises:
        DataError: As for `file_names`.
    """
    found: dict[str, list[str]] = {}
    for path in given_paths(paths):
        used = {Path(name) for name in _expand(path, setting)}
        for directory in _searched(path):
            for entry in sorted(_besides(directory, used)):
                name = os.path.relpath(entry, directory)
                found.setdefault(_reason(entry, used), []).append(name)
    return found


def _searched(path: str) -> list[Path]:
    """Return the directories whose files a path means."""
    if Path(path).exists():
        return [Path(path)] if Path(path).is_dir() else []
    known, rest = _literal(path)
    found = [Path(name) for name in glob(escape(known) + rest) if not _hidden(name)]
    return [] if any(each.is_file() for each in found) else found


def _besides(directory: Path, used: Collection[Path]) -> Iterator[Path]:
    """Yield what a directory and its partitions have besides the files that are read."""
    for entry in directory.iterdir():
        if _PARTITION.match(entry.name) and not _hidden(entry.name) and entry.is_dir():
            yield from _besides(entry, used)
        elif entry not in used:
            yield entry


def _reason(entry: Path, used: Collection[Path]) -> str:
    """Return why a file or a directory is left out."""
    if _hidden(entry.name):
        return "hidden"
    if entry.is_dir():
        return "directories"
    if _is_text(entry):
        return "converted text"
    return f"not {format_names()}"


def given_paths(paths: str | Sequence[str]) -> list[str]:
    """Return a setting of one path or several paths as a list."""
    return [paths] if isinstance(paths, str) else [str(path) for path in paths]


def _expand(path: str, setting: str) -> list[str]:
    """List the files behind one path, in natural order."""
    _refuse_uri(path, setting)
    named = Path(path)
    known, rest = _literal(path)
    if has_magic(rest) and not named.exists():
        pattern = escape(known) + rest
        return _readable(_matching(path, pattern, setting), setting, path, Path(known), pattern)
    if named.name == FILE_LIST and named.is_file():
        return _readable(_listed(named, setting), setting, path)
    if named.is_dir():
        return _readable(_in_directory(named, setting, {}), setting, path, named)
    if not named.exists():
        there = os.listdir(named.parent) if named.parent.is_dir() else []
        near = alike(named.name, sorted(there))
        hint = f"; {meant(near)}" if near else _elsewhere(path)
        raise DataError(f"{setting}={path}: no such file or directory{hint}")
    if not named.is_file():
        raise DataError(f"{setting}={path}: is neither a file nor a directory")
    return _readable([path], setting, path)


def _literal(path: str) -> tuple[str, str]:
    """Split a path into the leading directories that exist literally, and the rest.

    `b[1]` may be the name of a directory; then it is not a pattern for `b1`.
    """
    parts = path.split("/")
    for count in range(len(parts) - 1, 0, -1):
        known = "/".join(parts[:count])
        if Path(known or "/").is_dir():
            return f"{known}/", "/".join(parts[count:])
    return "", path


def _refuse_uri(path: str, setting: str) -> None:
    """Raise DataError if a path is a URI."""
    found = _URI.match(path)
    if not found:
        return
    if found[1].lower() == "file":
        raise DataError(f"{setting}={path}: write the path itself, {path[len('file://') :]}")
    raise DataError(
        f"{setting}={path}: recapp reads local and mounted directories, it has no client for "
        f"{found[1]}://; mount it or copy the files, then name that path"
    )


def _elsewhere(path: str) -> str:
    """Return what to do for a path that looks as if its files were on another system."""
    if found := _MOUNTED.match(path):
        return f"; a path of this machine is meant, such as /{found[1]}/{path[found.end() :]}"
    if _REPOSITORY.fullmatch(path) and not Path(path).parent.exists():
        return (
            "; a path of this machine is meant: where it is a repository of Hugging Face, `hf "
            f"download {path} --repo-type dataset --local-dir DIR` copies it"
        )
    return ""


def _readable(
    files: Sequence[str], setting: str, given: str, top: Path | None = None, pattern: str = ""
) -> list[str]:
    """Return the files that a format reads; skip text from which such files were converted.

    Args:
        files: Data files and text files.
        setting: The setting's name.
        given: The setting's value.
        top: The directory in which files were searched; None if each of them was named.
        pattern: The pattern for `glob`, if the value is a pattern.

    Raises:
        DataError: A text file was not converted, and the text has the code that converts it; or
            files are of several splits.
    """
    made = {str(Path(file).with_suffix("")) for file in files if _is_data(file)}
    texts = [Path(file) for file in files if _holds_text(file)]
    left = [text for text in texts if str(text.with_suffix("")) not in made]
    if not left:
        found = [file for file in files if Path(file) not in texts]
        if top is not None:
            refuse_splits(found, top, setting, given)
        return found
    _refuse_equal_names(left, setting, given)
    first = left[0]
    mixed = len(left) < len(files)
    same_kind = [text for text in left if layout(text) == layout(first)]
    named = Path(given)
    if named.is_dir():
        depth = len(first.relative_to(named).parts)
        pattern = "/".join([escape(str(named)), *["*=*"] * (depth - 1), f"*{first.suffix}"])
    if top is not None and {text.suffix for text in same_kind} != {first.suffix}:
        pattern = glob_of([str(text) for text in same_kind]) or pattern
    listed = named.name == FILE_LIST
    beside = mixed or listed or len(same_kind) < len(files)  # part of a data set with other files
    root = root_of(same_kind)
    name = first.name.partition(".")[0] if named == first else root.resolve().name
    folder = root if beside else new_folder(name)
    written = given if beside else str(folder)
    then = f"name the .parquet files in {given}" if listed else f"set {typed(setting, written)}"
    if top is not None and not beside:
        below = [text.absolute().relative_to(root).with_suffix(".parquet") for text in same_kind]
        split = settings_of_splits([str(folder / name) for name in below], folder, setting)
        then = f"set {split}" if split else then
    away = f"; or move it elsewhere, away from the {format_names()} files" if mixed else ""
    error = DataError(
        f"{setting}={given}: {first.name} is read after it is converted to Parquet: "
        f"run the lines of Python above, then {then}{away}"
    )
    for line in conversion(same_kind, None if named == first else pattern, folder):
        error.add_note(line)
    raise error


def _matching(path: str, pattern: str, setting: str) -> list[str]:
    """List the files that a glob matches, or else the data of the directories that it matches."""
    found = [name for name in glob(pattern) if not _hidden(name)]
    files = _naturally(name for name in found if Path(name).is_file())
    if files:
        refuse_tables({Path(file).parent for file in files}, setting, path)
        return files
    directories = _naturally(name for name in found if Path(name).is_dir())
    if not directories:
        raise DataError(f"{setting}={path}: no file matches; check the pattern")
    seen: dict[str, Path] = {}
    return [
        name for directory in directories for name in _in_directory(Path(directory), setting, seen)
    ]


def _in_directory(directory: Path, setting: str, seen: dict[str, Path]) -> list[str]:
    """List the data of a directory or of its partitions.

    Args:
        directory: The directory.
        setting: The setting's name.
        seen: The directories that are read already, by real path; this adds `directory`.
    """
    _enter(directory, directory, setting, seen)
    refuse_tables([directory], setting, str(directory))
    entries = _entries(directory)
    found = _data(entries, setting)
    partitions = _partitions(entries)
    if found and partitions:
        raise DataError(
            f"{setting}={directory}: holds {Path(found[0]).name} beside partitions such as "
            f"{partitions[0].name}; name what is meant, {directory}/*{Path(found[0]).suffix} or "
            f"{directory}/{partitions[0].name.partition('=')[0]}=*"
        )
    found = found or _of_partitions(directory, partitions, setting, seen)
    if found:
        if partitions:
            _refuse_others(directory, entries, setting)
        return found
    below = sorted(entry.name for entry in entries if entry.is_dir() and _holds_data(entry))
    if below:
        places = [str(directory / name) for name in below]
        refuse_splits(places, directory, setting, str(directory))
        raise DataError(
            f"{setting}={directory}: no {format_names()} files here, but in {', '.join(below)}; "
            "name one of those directories"
        )
    has = f"has {', '.join(sorted(entry.name for entry in entries)[:5])}" if entries else "is empty"
    texts = _naturally(str(entry) for entry in entries if entry.is_file() and holds_text(entry))
    hint = "; name the text that is meant, and the lines that convert it are shown" if texts else ""
    raise DataError(
        f"{setting}={directory}: no {format_names()} files ({all_suffixes()}); the "
        f"directory {has}{hint}"
    )


def _entries(directory: Path) -> list[Path]:
    return [entry for entry in directory.iterdir() if not _hidden(entry.name)]


def _data(entries: Iterable[Path], setting: str) -> list[str]:
    """List the data files and text files among some entries, in natural order.

    Raises:
        DataError: There are such files, and one whose name and first bytes tell no format.
    """
    files = [entry for entry in entries if entry.is_file()]
    found = [entry for entry in files if _is_data(entry) or _is_text(entry)]
    if found and not any(map(_is_data, found)):  # text that is to be converted, all of it
        found = [entry for entry in files if entry in found or holds_rows(entry)]
    for entry in sorted(set(files).difference(found)) if found else ():
        if not entry.suffix and entry.stat().st_size:
            refuse_unknown(entry, found[0], setting)
    return _naturally(map(str, found))


def _partitions(entries: Iterable[Path]) -> list[Path]:
    """List the `key=value` directories among some entries, in natural order."""
    names = _naturally(
        str(entry) for entry in entries if _PARTITION.match(entry.name) and entry.is_dir()
    )
    return [Path(name) for name in names]


def _of_partitions(
    top: Path, partitions: Sequence[Path], setting: str, seen: dict[str, Path]
) -> list[str]:
    """List the data of partitions and of nested partitions."""
    found = []
    for partition in partitions:
        _enter(partition, top, setting, seen)
        entries = _entries(partition)
        _refuse_others(top, entries, setting)
        found += _data(entries, setting)
        found += _of_partitions(top, _partitions(entries), setting, seen)
    return found


def _enter(directory: Path, top: Path, setting: str, seen: dict[str, Path]) -> None:
    """Refuse a directory that was entered before: its data would be read twice, or links form a
    circle.
    """
    real = os.path.realpath(directory)
    if real in seen:
        raise DataError(
            f"{setting}={top}: {seen[real]} and {directory} are one directory, whose files would "
            "be read twice; remove the link, or name the files that are meant"
        )
    seen[real] = directory


def _refuse_others(top: Path, entries: Iterable[Path], setting: str) -> None:
    """Refuse data outside of the partitions, which would be skipped."""
    for entry in entries:
        if not _PARTITION.match(entry.name) and entry.is_dir() and _holds_data(entry):
            raise DataError(
                f"{setting}={top}: holds partitions (key=value), and data in {entry}, which is no "
                "partition; rename that directory, move it elsewhere or name the files that are "
                "meant"
            )


def _holds_data(directory: Path) -> bool:
    """Return whether a directory or a directory below it has data."""
    for here, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not _hidden(name)]
        files = [Path(here, name) for name in names if not _hidden(name)]
        if any(_is_data(file) or _is_text(file) for file in files):
            return True
    return False


def _listed(listing: Path, setting: str) -> list[str]:
    """List the files that a `_file_list.txt` names.

    The list has a count, then paths, which are often paths of the machine that wrote it.
    """
    try:
        text = read_text(listing).removeprefix("\ufeff")  # some editors write a byte order mark
    except ValueError as error:
        raise DataError(
            f"{setting}={listing}: {error}: must be a text of the number of paths, then paths"
        ) from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or not _COUNT.fullmatch(lines[0]) or int(lines[0]) != len(lines) - 1:
        raise DataError(
            f"{setting}={listing}: the first line must be the number of paths that follow; "
            f"{max(len(lines) - 1, 0)} follow"
        )
    if len(lines) == 1:
        raise DataError(f"{setting}={listing}: names no files: 0 paths follow the first line")
    named: dict[str, str] = {}
    names = []
    for line in lines[1:]:
        beside = listing.parent / Path(line).name
        found = [
            candidate
            for candidate in (Path(line), listing.parent / line, beside)
            if candidate.is_file()
        ]
        if not found:
            raise DataError(
                f"{setting}={listing}: names {line}, which is neither there nor beside the list"
            )
        real = os.path.realpath(found[0])
        if real in named:
            raise DataError(
                f"{setting}={listing}: names {named[real]} and {line}, which are one file here, "
                f"{found[0]}, and would be read twice; leave one line, or put both files here"
            )
        named[real] = line
        names.append(str(found[0]))
    return names


def _is_data(file: str | Path) -> bool:
    """Return whether a file is in a known format, by its suffix; or by its first bytes, if its
    suffix tells no format.
    """
    return is_data(str(file)) or (_tells_no_format(file) and begins_as_data(file))


def _is_text(file: Path) -> bool:
    """Return whether a file of a directory has rows that lines of Python convert: by its suffix, or
    by its first bytes, if its suffix tells no format. A README has none.
    """
    by_suffix = file.suffix.lower() in TEXT_SUFFIXES
    return not _is_data(file) if by_suffix else _tells_no_format(file) and holds_rows(file)


def _tells_no_format(file: str | Path) -> bool:
    return _NO_FORMAT.fullmatch(Path(file).suffix.lower()) is not None


def _holds_text(file: str) -> bool:
    return not _is_data(file) and holds_text(Path(file))


def _refuse_equal_names(texts: Iterable[Path], setting: str, given: str) -> None:
    """Refuse text files that have one name, such as a.csv and a.csv.gz: they are converted to one
    file, or hold the same rows.
    """
    known: dict[Path, Path] = {}
    for text in texts:
        name = text.with_suffix("") if text.suffix.lower() == ".gz" else text
        name = name.with_suffix("") if name.suffix.lower() in TEXT_SUFFIXES else name
        other = known.setdefault(name, text)
        if other is not text:
            raise DataError(
                f"{setting}={given}: {other.name} and {text.name} are one name in two forms, whose "
                "rows would be read twice; move one of them elsewhere, or rename it"
            )


def _hidden(name: str) -> bool:
    return Path(name).name[:1] in ("_", ".")


def _naturally(names: Iterable[str]) -> list[str]:
    """Sort names as people count: day_2 before day_10."""
    return sorted(
        names,
        key=lambda name: [
            int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)
        ],
    )
