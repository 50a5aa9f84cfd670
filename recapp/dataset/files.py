"""List the files of a path: a file, a glob, a directory, a hive directory, a `_file_list.txt`, or a
list of these.

    logs/                                     its files, in natural order: day_2 before day_10
    logs/dt=2026-01-01/.., dt=...             the files of all partitions, partition by partition
    logs/day_*.parquet, logs/dt=2026-01-*     matching files; if none match, matching directories

Paths may be URIs of other places, such as s3://bucket/logs (`recapp/dataset/storage.py`). Names
that begin with `_` or `.` are skipped. The key of a partition (`dt`) is a column where it is named.
Files in an unknown format are refused with advice. Files that would silently be skipped, mixed or
read twice are refused as well: two formats, directories of data among partitions, links to
directories that are read already, several splits, and removed files of a table of Delta Lake,
Iceberg or Hudi, of which only the table's log tells which files are alive. This opens only files
whose names tell no format, to read their first bytes.
"""

import os
import re
from collections.abc import Iterable, Sequence
from glob import escape, glob, has_magic
from pathlib import Path

from recapp.dataset.file_bytes import begin_of, is_prose
from recapp.dataset.formats import COMPRESSED, FORMAT_NAMES, FORMATS, SUFFIXES, Formats
from recapp.dataset.storage import RemotePath, located, open_file, stamp_of
from recapp.errors import DataError, alike, meant
from recapp.settings.option_files import MOST_BYTES, read_text
from recapp.settings.uris import is_uri, refuse_secrets

FILE_LIST = "_file_list.txt"
_PARTITION = re.compile(r"[^=]+=")
_COUNT = re.compile(r"[0-9]{1,9}")  # the first line of a list: its number of paths
_LIVE_FILES = {
    "Delta Lake": "deltalake.DeltaTable(DIR).file_uris()",
    "Iceberg": "pyiceberg.table.StaticTable.from_metadata(FILE).scan().plan_files()",
    "Hudi": "hudi.HudiTableBuilder.from_base_uri(DIR).build().get_file_slices()",
}


def file_names(
    paths: str | Sequence[str], *, setting: str = "dataset.path", formats: Formats = FORMATS
) -> list[str]:
    """List the files that `paths` names, without opening them.

    Args:
        paths: A path, or a list of them.
        setting: The setting's name, for error messages.
        formats: The formats of the files.

    Raises:
        DataError: A path does not exist, has no data, or is a URI with a secret.
    """
    path_list = given_paths(paths)
    if not path_list:
        raise DataError(
            f"{setting}: an empty list; name a directory, a glob or {FORMAT_NAMES} files"
        )
    return [name for path in path_list for name in _Listing(path, setting, formats).files]


def left_out(
    paths: str | Sequence[str], *, setting: str = "dataset.path", formats: Formats = FORMATS
) -> dict[str, list[str]]:
    """Return what the given directories have besides the files that `file_names` lists: names by
    reason. What a glob or a list does not name is not asked for, and not left out.

    Args:
        paths: A path, or a list of them.
        setting: The setting's name, for error messages.
        formats: The formats of the files.

    Raises:
        DataError: As for `file_names`.
    """
    reasons: dict[str, list[str]] = {}
    for path in given_paths(paths):
        for reason, names in _Listing(path, setting, formats).left_out.items():
            reasons.setdefault(reason, []).extend(names)
    return reasons


def given_paths(paths: str | Sequence[str]) -> list[str]:
    """Return a setting of one path or several paths as a list."""
    return [paths] if isinstance(paths, str) else [str(path) for path in paths]


class NoFilesError(DataError):
    """A directory, a pattern or a prefix names no files, or none yet."""


class _Listing:
    """What one path names.

    Args:
        path: The path.
        setting: The setting's name, for error messages.
        formats: The formats of the files.

    Attributes:
        files: The files, in natural order.
        left_out: The other entries of directories that are read, by reason.
    """

    def __init__(self, path: str, setting: str, formats: Formats) -> None:
        self.path = path
        self.setting = setting
        self.formats = formats
        self.left_out: dict[str, list[str]] = {}
        self._entered: dict[str, Path] = {}
        if path.lower().startswith("file://"):
            raise self._error(f"write the path itself, {path[len('file://') :]}")
        refuse_secrets(path, setting)
        try:
            self.files = self._expanded()
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror})") from error

    def _error(self, problem: str, kind: type[DataError] = DataError) -> DataError:
        return kind(f"{self.setting}={self.path}: {problem}")

    def _expanded(self) -> list[str]:
        path = located(self.path)
        known, rest = literal(self.path) if has_magic(self.path) else ("", "")
        if has_magic(rest) and not path.exists():
            return self._one_data_set(self._matching(known, rest), located(known))
        if path.name == FILE_LIST and path.is_file():
            return self._listed(path)
        if path.is_dir():
            return self._one_data_set(self._in_directory(path), path)
        if not path.exists():
            self._refuse_bucket()
            there = path.parent.iterdir() if path.parent.is_dir() else ()
            near = alike(path.name, sorted(entry.name for entry in there))
            hint = f"; {meant(near)}" if near else ""
            kind = NoFilesError if is_uri(self.path) else DataError  # a prefix begins with a file
            raise self._error(f"no such file or directory{hint}", kind)
        if not path.is_file():
            raise self._error("is neither a file nor a directory")
        return [str(path) if is_uri(self.path) else self.path]

    def _one_data_set(self, files: list[str], top: Path) -> list[str]:
        """Return files below a directory, if they are one data set in one format."""
        refuse_splits(files, top, self.setting, self.path)
        formats = [self.formats.of(file).name for file in files]
        if len(set(formats)) > 1:
            number = next(n for n, name in enumerate(formats) if name != formats[0])
            one = Path(files[0])
            other = Path(files[number])
            raise self._error(
                f"holds {one.name} and {other.name}, files of several formats: name those that "
                f"are meant, such as {one.parent}/*{one.suffix}, or move the others elsewhere"
            )
        names = set(files)
        for file in files:
            if twin := next((f"{file}{end}" for end in COMPRESSED if file + end in names), None):
                raise self._error(
                    f"{Path(file).name} and {Path(twin).name} are one name in two forms, whose "
                    "rows would be read twice; move one of them elsewhere, or rename it"
                )
        return files

    def _matching(self, known: str, pattern: str) -> list[str]:
        found = (
            located(known).glob(pattern)
            if is_uri(self.path)
            else map(Path, glob(escape(known) + pattern))
        )
        matches = _naturally(path for path in found if not _hidden(path))
        files = [match for match in matches if match.is_file()]
        if files:
            self._refuse_tables({file.parent for file in files})
            return list(map(str, files))
        directories = [match for match in matches if match.is_dir()]
        if not directories:
            self._refuse_bucket()
            raise self._error("no file matches; check the pattern", NoFilesError)
        return [name for directory in directories for name in self._in_directory(directory)]

    def _refuse_bucket(self) -> None:
        """Refuse a path of a bucket that does not exist."""
        path = located(self.path)
        if isinstance(path, RemotePath) and path.is_in_bucket and not path.top.exists():
            raise self._error(f"there is no {path.top}")

    def _in_directory(self, directory: Path) -> list[str]:
        self._refuse_tables([directory])
        if files := self._walk(directory, directory):
            return files
        entries = sorted(entry for entry in directory.iterdir() if not _hidden(entry))
        folders = [entry for entry in entries if entry.is_dir()]
        if below := [folder for folder in folders if _holds_data(folder, self.formats)]:
            refuse_splits(list(map(str, below)), directory, self.setting, self.path)
            raise self._error(
                f"no {FORMAT_NAMES} files here, but in {', '.join(one.name for one in below)}; "
                "name one of those directories"
            )
        has = f"has {', '.join(entry.name for entry in entries[:5])}" if entries else "is empty"
        text = f"no {FORMAT_NAMES} files ({SUFFIXES}); the directory {has}"
        raise self._error(text, NoFilesError)

    def _walk(self, here: Path, top: Path) -> list[str]:
        """List the data of a directory, or of its partitions and of theirs.

        A directory that was entered before is refused: its data would be read twice, or links form
        a circle.
        """
        other = self._entered.setdefault(os.path.realpath(here), here)
        if other is not here:
            raise self._error(
                f"{other} and {here} are one directory, whose files would be read twice; "
                "remove the link, or name the files that are meant"
            )
        files, partitions, directories = self._entries(here, top)
        if files and partitions and here == top:
            raise self._error(
                f"holds {files[0].name} beside partitions such as {partitions[0].name}; name what "
                f"is meant, {here}/*{files[0].suffix} or "
                f"{here}/{partitions[0].name.partition('=')[0]}=*"
            )
        names = list(map(str, files))
        for partition in partitions:
            names += self._walk(partition, top)
        for directory in directories if here != top or (partitions and names) else ():
            if _holds_data(directory, self.formats):
                raise self._error(
                    f"holds partitions (key=value), and data in {directory}, which is no "
                    "partition; rename that directory, move it elsewhere or name the files that "
                    "are meant"
                )
        return names

    def _entries(self, here: Path, top: Path) -> tuple[list[Path], list[Path], list[Path]]:
        kinds: dict[str, list[Path]] = {"file": [], "partition": [], "directory": [], "other": []}
        entries = _naturally(here.iterdir())
        formats = self.formats.in_directory(map(str, entries))
        for entry in entries:
            if entry.is_dir():
                kind = "partition" if _PARTITION.match(entry.name) else "directory"
            else:
                kind = "file" if entry.is_file() and formats.is_data(str(entry)) else "other"
            if _hidden(entry):
                reason = "hidden"
            else:
                kinds[kind].append(entry)
                reason = "directories" if kind == "directory" else "in no known format"
            if _hidden(entry) or kind in ("directory", "other"):
                self.left_out.setdefault(reason, []).append(os.path.relpath(entry, top))
        files = kinds["file"]
        for entry in kinds["other"] if files else ():
            # without a suffix it may be data that is damaged, unless it is a page of text
            unknown = entry.is_file() and not entry.suffix and stamp_of(str(entry)).size > 0
            if unknown and not is_prose(begin_of(str(entry))[0]):
                raise self._error(
                    f"{entry.name} is in no known format and no text, and lies beside "
                    f"{files[0].name}: write it again, or move it elsewhere"
                )
        return files, kinds["partition"], kinds["directory"]

    def _refuse_tables(self, directories: Iterable[Path]) -> None:
        inside = [directory.absolute() for directory in directories]
        for folder in dict.fromkeys(one for each in inside for one in (each, *each.parents)):
            if (folder / "_delta_log").is_dir():
                table = "Delta Lake"
            elif (folder / ".hoodie").is_dir():
                table = "Hudi"
            elif next(folder.glob("metadata/*.metadata.json"), None) and any(
                each == folder or each.is_relative_to(folder / "data") for each in inside
            ):
                table = "Iceberg"
            else:
                continue
            raise self._error(
                f"belongs to {folder}, a table of {table}, whose removed rows are still in its "
                f"files: write its rows as Parquet elsewhere; or write a {FILE_LIST} of the files "
                f"that are alive, which {_LIVE_FILES[table]} tells, and name that"
            )

    def _listed(self, listing: Path) -> list[str]:
        """List the files that a `_file_list.txt` names.

        The list has a count, then paths, which are often paths of the machine that wrote it.
        """
        try:
            text = _text_of(listing).removeprefix("\ufeff")  # a mark that some editors write
        except ValueError as error:
            raise self._error(
                f"{error}: must be a text of the number of paths, then paths"
            ) from None
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines or not _COUNT.fullmatch(lines[0]) or int(lines[0]) != len(lines) - 1:
            raise self._error(
                "the first line must be the number of paths that follow; "
                f"{max(len(lines) - 1, 0)} follow"
            )
        if len(lines) == 1:
            raise self._error("names no files: 0 paths follow the first line")
        lines_by_file: dict[str, str] = {}
        names: list[str] = []
        for line in lines[1:]:
            own = (located(line),) if is_uri(line) or not is_uri(str(listing)) else ()
            places = (*own, listing.parent / line, listing.parent / Path(line).name)
            file = next((place for place in places if place.is_file()), None)
            if file is None:
                raise self._error(f"names {line}, which is neither there nor beside the list")
            other = lines_by_file.setdefault(os.path.realpath(file), line)
            if len(lines_by_file) == len(names):
                raise self._error(
                    f"names {other} and {line}, which are one file here, {file}, and would be "
                    "read twice; leave one line, or put both files here"
                )
            names.append(str(file))
        return names


def _text_of(listing: Path) -> str:
    if not isinstance(listing, RemotePath):
        return read_text(listing)
    with open_file(str(listing)) as file:
        text: bytes = file.read(MOST_BYTES)
    return text.decode()


def literal(path: str) -> tuple[str, str]:
    """Split a path into the leading directories that exist literally, and the rest.

    `b[1]` may be the name of a directory; then it is not a pattern for `b1`.
    """
    parts = path.split("/")
    for count in range(len(parts) - 1, 0, -1):
        known = "/".join(parts[:count])
        if located(known or "/").is_dir():
            return f"{known}/", "/".join(parts[count:])
    return "", path


def _holds_data(directory: Path, formats: Formats) -> bool:
    entries = [entry for entry in directory.iterdir() if not _hidden(entry)]
    return any(entry.is_file() and formats.is_data(str(entry)) for entry in entries) or any(
        entry.is_dir() and not entry.is_symlink() and _holds_data(entry, formats)
        for entry in entries
    )


def _hidden(path: Path) -> bool:
    return path.name[:1] in ("_", ".")


def _naturally(paths: Iterable[Path]) -> list[Path]:
    return sorted(
        paths,
        key=lambda path: [
            int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))
        ],
    )


_KEYS = {
    "path": "train training",
    "val_path": "valid val validation dev eval",
    "test_path": "test",
}
_KEY_OF_WORD = {word: key for key, words in _KEYS.items() for word in words.split()}
_SUFFIXES = {suffix.strip(". ") for suffix in f"{SUFFIXES}, snappy".split(",")}


def refuse_splits(names: Sequence[str], top: Path, setting: str, value: str) -> None:
    """Refuse files of several splits, because they would be read as one data set.

    Args:
        names: The files or directories that would be read.
        top: The directory below which names tell a split; its own name does not count.
        setting: The setting that names them.
        value: Its value.

    Raises:
        DataError: Some names are of validation or test data, and some are not.
    """
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(_split(name, top), name)
    if len(first) < 2:
        return
    examples = ", ".join(sorted(os.path.relpath(name, top) for name in first.values()))
    keys = [f"dataset.{key}" for key in _KEYS if key in first]
    fix = f"set {' and '.join(keys)} each to files of its own, by a glob or a list"
    raise DataError(
        f"{setting}={value}: {examples} are of several splits, and would be read as one: "
        f"{fix if setting in keys else 'name the files of one by a glob'}; "
        f"a list, {setting}=[...], reads all that it names"
    )


def _split(name: str, top: Path) -> str:
    """Return the setting for the split of a file, that for training where no name tells one."""
    for part in Path(os.path.relpath(name, top)).parts:
        words = [
            word.rstrip("0123456789")
            for word in re.split(r"[-_.\s]+", part.rpartition("=")[2].lower())
        ]
        words = [word for word in words if word and word not in _SUFFIXES]
        for word in (words[:1] + words[-1:]) if "=" not in part or len(words) == 1 else ():
            if key := _KEY_OF_WORD.get(word):
                return key
    return "path"
