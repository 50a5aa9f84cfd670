"""A log file, the base of file formats, and the facts of files in a checkpoint.

    Format.facts     its columns, and the rows of each row group           when it is opened
    Format.chunks    the rows of a row group, from the first row on        when they are read
    Format.marks     bytes that change when its contents change            when training resumes

A row group is a range of rows that can be read without the rows before it. Parquet has row groups;
in a format without them, each file is one. The order of an epoch is computed before a value is
read, so a format whose files do not store their numbers of rows counts them in `facts`.
`recapp/dataset/formats.py` chooses the format of a path.

A checkpoint has the facts of its training files, which a resume compares with the current files.

    file         name with its partitions, rows, bytes, digest of the marks of its contents
    fingerprint  number of files, digest of all facts in order, and the facts of the first files

The order of an epoch is a function of its files. So a position inside of an epoch is valid only for
the same files in the same order. Directories do not count, so data may be moved. The format of a
file chooses the bytes that mark its contents (`Format.marks`). For Parquet these are the footer,
which is read anyway; changed pages under an equal footer are not detected.

After a resume an epoch continues with these files:

current files                  inside of an epoch                       between two epochs
the same                       continue                                 continue
the same, then new files       finish the epoch without the new files   take all files, with a note
other files                    refuse, or take with resume_data=ignore  take all files, with a note
no files in the checkpoint     continue, with a note                    continue, with a note
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, md5
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import unquote

from recapp.dataset.storage import Stamp, changed, stamp_of
from recapp.errors import CheckpointError, DataError
from recapp.settings.uris import is_uri

if TYPE_CHECKING:
    import pyarrow as pa

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
KEPT_FACTS = 64  # files whose facts are cached: a rank reads its files in order


class Facts(NamedTuple):
    """The columns and numbers of rows of a file, known before its values are read.

    Args:
        columns: The names and types of its columns.
        rows: The number of rows of each row group.
        bad: What is wrong with each row that is left out, with its line.
    """

    columns: "pa.Schema"
    rows: Sequence[int]
    bad: Sequence[str] = ()


class UnreadableFileError(Exception):
    """A file is not whole, or not in its format; the text is the reason, as part of a line."""


def refuse_bad_rows(last: str, count: int, most: int) -> None:
    """Refuse rows that do not fit their file, if there are more than may be left out.

    Args:
        last: The last of them, with its file and line.
        count: The number of them.
        most: The number that `dataset.bad_rows` allows.

    Raises:
        DataError: There are more.
    """
    if count > most:
        fix = f"it is bad row {count:,}, and dataset.bad_rows=skip:{most} leaves out {most:,}"
        if not most:
            fix = "mend it, or leave out up to N such rows by dataset.bad_rows=skip:N"
        raise DataError(f"{last}; {fix}")


class Format(ABC):
    """Read the files of one format. A format is hashable, and can be pickled.

    Attributes:
        name: The name of the format, for people.
        suffixes: The suffixes of its files, in lower case, with the dot.
    """

    name: str
    suffixes: tuple[str, ...]

    @abstractmethod
    def knows(self, begin: bytes) -> bool:
        """Return whether a file is in this format, by its first bytes; they are decompressed where
        that is possible.
        """

    @abstractmethod
    def facts(self, path: str, stamp: Stamp) -> Facts:
        """Return the columns of a file and the number of rows of each row group.

        Args:
            path: The file.
            stamp: The stamp of the file.

        Raises:
            UnreadableFileError: The file is not whole, or in another format.
            DataError: Its numbers of rows are impossible.
        """

    @abstractmethod
    def chunks(self, file: "DataFile", row_group: int) -> "Iterator[pa.RecordBatch]":
        """Yield the rows of a row group, in order, some thousand rows at a time.

        A chunk has the columns `file.read` under the file's own names, with the types of `facts` or
        dictionary-encoded, nested ones at least with the parts that are asked for. The generator
        may be closed before its end.

        Args:
            file: The file.
            row_group: The number of the row group.

        Raises:
            DataError: The rows cannot be read.
        """

    @abstractmethod
    def marks(self, path: str) -> bytes:
        """Return bytes of the file that change with its contents, as far as they are cheap to read.

        Raises:
            OSError: The file cannot be read.
        """


class DataFile(NamedTuple):
    """A file, with its state at the time of opening.

    Args:
        path: The file.
        format: The format of the file.
        stamp: The stamp at that time.
        columns: Canonical name -> the file's own name.
        starts: The first row of each row group, and at the end the number of rows.
        kept: Further columns to read, by the file's own names.
    """

    path: str
    format: Format
    stamp: Stamp
    columns: dict[str, str]
    starts: tuple[int, ...]
    kept: tuple[str, ...] = ()

    @property
    def read(self) -> list[str]:
        """The file's own names of the columns to read from it, each once."""
        return list(dict.fromkeys(self.above.values()))

    @property
    def asked(self) -> dict[str, None]:
        """The columns that chunks have: those of the file, parts of nested ones, partitions."""
        return dict.fromkeys([*self.columns.values(), *self.kept])

    @property
    def above(self) -> dict[str, str]:
        """The columns to read, each with the file's own column that has it: itself, or the nested
        one of which it is a part.
        """
        from recapp.dataset.nested_columns import own_column  # needs pyarrow, only for files

        partitions = self.partitions
        types = self.types
        own = set(types.names)  # of which there are many, for each of as many
        return {
            name: name if name in own else own_column(types, name)
            for name in self.asked
            if name not in partitions
        }

    @property
    def partitions(self) -> dict[str, str | None]:
        """The columns to read that are partitions, with their value in all rows."""
        asked = self.asked
        found = {key: one for key, one in partitions_of(self.path).items() if key in asked}
        return {key: one for key, one in found.items() if key not in self.types.names}

    @property
    def types(self) -> "pa.Schema":
        """The names and types of all columns of the file, without partitions."""
        return facts_of(self.format, self.path, self.stamp).columns

    @property
    def bad(self) -> Sequence[str]:
        """What is wrong with each row that is left out, with its line."""
        return facts_of(self.format, self.path, self.stamp).bad


@lru_cache(KEPT_FACTS)
def facts_of(format: Format, path: str, stamp: Stamp) -> Facts:
    """Return the facts of the file with this stamp.

    Raises:
        UnreadableFileError, DataError: As for `Format.facts`.
    """
    return format.facts(path, stamp)


def with_partitions(types: "pa.Schema", path: str) -> "pa.Schema":
    """Return the columns of a file and its partitions, which are text; its own come first."""
    import pyarrow as pa

    for key in partitions_of(path):
        types = types if key in types.names else types.append(pa.field(key, pa.string()))
    return types


@lru_cache(KEPT_FACTS)
def partitions_of(path: str) -> dict[str, str | None]:
    """Return the values of the hive partitions above a file: {"dt": "2026-01-01"}. None is a value
    that was missing where they were written.
    """
    pairs = (directory.partition("=") for directory in _partition_directories(path))
    return {key: None if value == _NO_VALUE else unquote(value) for key, _, value in pairs}


def chunks(
    file: DataFile, row_group: int, rows: int
) -> "Generator[tuple[int, pa.RecordBatch], None, None]":
    """Yield the first rows of a row group as Arrow record batches.

    The file is closed at the end.

    Args:
        file: The file.
        row_group: The number of the row group.
        rows: The number of wanted rows; the last chunk may have more.

    Yields:
        The number of a chunk's first row within the row group, and the chunk.

    Raises:
        DataError: The rows cannot be read.
    """
    from recapp.dataset.arrow_types import has_views

    # in another place a trip, and bytes that are asked for one after another may be those of two
    # versions: there the stamp is compared behind the first chunk and before the last one
    far = is_uri(file.path)
    if not far and _has_changed(file):
        raise changed(file.path)
    begin = 0
    values = file.partitions
    odd = {
        name: own
        for name, own in file.above.items()
        if name != own or has_views(file.types.field(own).type)
    }
    try:
        for chunk in file.format.chunks(file, row_group):
            is_last = begin + chunk.num_rows >= rows
            if far and (begin == 0 or is_last) and _has_changed(file):
                raise changed(file.path)
            yield begin, _completed(chunk, values, odd) if values or odd else chunk
            begin += chunk.num_rows
            if is_last:
                return
    except DataError as error:
        if far and _has_changed(file):
            raise changed(file.path) from error
        raise
    raise DataError(
        f"{file.path}: row group {row_group} has fewer rows than were counted when the file was "
        "opened; write it again or leave it out"
    )


def _completed(
    chunk: "pa.RecordBatch", values: dict[str, str | None], odd: dict[str, str]
) -> "pa.RecordBatch":
    """Return a chunk with the values of partitions, and with columns that are parts of others or
    have views.
    """
    import pyarrow as pa

    from recapp.dataset.nested_columns import part_of

    columns = dict(zip(chunk.schema.names, chunk.columns, strict=True))
    for name, value in values.items():
        columns[name] = pa.repeat(pa.scalar(value, pa.string()), chunk.num_rows)
    parts = {name: part_of(columns[own], own, name) for name, own in odd.items()}
    return pa.record_batch(columns | parts)


def _has_changed(file: DataFile) -> bool:
    try:
        return stamp_of(file.path) != file.stamp
    except OSError as error:
        raise DataError(f"{file.path}: can be read no more ({error.strerror})") from error


# ---- the facts of files in a checkpoint

CONVERSION = "recapp_dataset.json"  # the manifest of a conversion, beside its splits
LISTED = 1000  # the most files with stored facts, so that a checkpoint stays small
_DIGEST_BYTES = 8
# Whether to refuse a resume inside of an epoch if the files differ from the checkpoint's.
ResumeData = Literal["check", "ignore"]


def conversions_of(files: Iterable[DataFile]) -> list[dict[str, Any]]:
    """Return what is known of the conversions (`recapp.data convert`) that have made some files:
    their manifests without the lists of files, and the MD5 of each manifest.
    """
    found = []
    for folder in dict.fromkeys(os.path.dirname(os.path.dirname(file.path)) for file in files):
        with suppress(OSError, ValueError, AttributeError):  # none is there, or it is another file
            raw = Path(folder, CONVERSION).read_bytes()
            rest = {name: one for name, one in json.loads(raw).items() if name != "files"}
            found.append({"md5": md5(raw).hexdigest(), **rest})
    return found


class FileFacts(NamedTuple):
    """The compared facts of a file.

    Args:
        name: The name of the file, after the names of its partitions (`dt=2026-01-01`).
        rows: The number of rows.
        size: The size in bytes.
        contents: The digest of the bytes that mark the contents, in hexadecimal.
    """

    name: str
    rows: int
    size: int
    contents: str


@dataclass(frozen=True)
class Fingerprint:
    """The facts of the files of an epoch, for a checkpoint.

    Args:
        count: The number of files.
        digest: The digest of the facts of all files, in order, in hexadecimal.
        first: The facts of the first `LISTED` files, which let an error name a difference.
    """

    count: int
    digest: str
    first: tuple[FileFacts, ...]

    @classmethod
    def of(cls, files: Sequence[FileFacts]) -> "Fingerprint":
        """Return the fingerprint of some files."""
        return cls(
            len(files), _digest(repr([tuple(f) for f in files]).encode()), (*files[:LISTED],)
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the fingerprint as plain values, for `from_plain`."""
        first = [list(file) for file in self.first]
        return {"count": self.count, "digest": self.digest, "first": first}

    @classmethod
    def from_plain(cls, plain: Any, checkpoint: str | Path) -> "Fingerprint":
        """Return the fingerprint of a checkpoint.

        Args:
            plain: The result of `to_plain`.
            checkpoint: The checkpoint, for messages.

        Raises:
            CheckpointError: `plain` is not a fingerprint.
        """
        try:
            first = tuple(FileFacts(*facts) for facts in plain["first"])
            return cls(int(plain["count"]), str(plain["digest"]), first)
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(
                f"{checkpoint}: what it says of the files that it was trained on is damaged; use "
                "another checkpoint"
            ) from None


def file_facts(files: Sequence[DataFile]) -> tuple[FileFacts, ...]:
    """Return the facts of open files, after reading the marks of their contents.

    Raises:
        DataError: A file can no longer be read.
    """
    facts = []
    for file in files:
        try:
            digest = _digest(file.format.marks(file.path))
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read ({error.strerror})") from error
        facts.append(FileFacts(_name(file.path), file.starts[-1], file.stamp.size, digest))
    return tuple(facts)


def difference(fingerprint: Fingerprint, files: Sequence[FileFacts]) -> str:
    """Return the first difference of the files of a checkpoint from the current ones, in words;
    empty without one. Files that were added behind them are none.

    Args:
        fingerprint: The fingerprint of the checkpoint.
        files: The facts of the current files, in reading order.
    """
    if Fingerprint.of(files[: fingerprint.count]) == fingerprint:
        return ""
    for was, now in zip(fingerprint.first, files, strict=False):
        if was.name != now.name:
            gone = was.name not in {file.name for file in files}
            return f"{was.name} is gone" if gone else f"{now.name} stands where {was.name} stood"
        if was.rows != now.rows:
            return f"{was.name} had {was.rows:,} rows and has {now.rows:,}"
        if was.size != now.size:
            return f"{was.name} had {was.size:,} bytes and has {now.size:,}"
        if was != now:
            return f"{was.name} has other contents, with as many rows and bytes as before"
    if len(files) < len(fingerprint.first):
        return f"{fingerprint.first[len(files)].name} is gone"
    if len(files) < fingerprint.count:
        return (
            f"{fingerprint.count - len(files):,} of {fingerprint.count:,} files are gone from the "
            "end"
        )
    return f"one of the files behind the first {LISTED:,} is another one"


def _name(path: str) -> str:
    """Return the name of a file with its partitions, such as dt=2026-01-01/part-0.parquet."""
    return "/".join([*_partition_directories(path), Path(path).name])


def _partition_directories(path: str) -> list[str]:
    """Return the names of the directories of a file's partitions, the highest first."""
    directories = Path(path).parts[:-1]
    count = 0
    while count < len(directories) and "=" in directories[-1 - count]:
        count += 1
    return [*directories[len(directories) - count :]]


def _digest(raw: bytes) -> str:
    return blake2b(raw, digest_size=_DIGEST_BYTES).hexdigest()


def resumed_files(
    plain: Any,
    files: Sequence[FileFacts],
    *,
    batches: int,
    checkpoint: str | Path,
    resume_data: ResumeData = "check",
) -> tuple[int | None, str]:
    """Return the number of first files with which the epoch of a checkpoint is finished, None for
    all files; and a note for people, or an empty text.

    Args:
        plain: The fingerprint of the checkpoint, as plain values; None if it has none.
        files: The facts of the current files.
        batches: The batches of the epoch that were trained before the save.
        checkpoint: The checkpoint, for messages.
        resume_data: `check` refuses different files, `ignore` takes them.

    Raises:
        CheckpointError: The files differ in the middle of an epoch, or the fingerprint is damaged.
    """
    if plain is None:
        return None, (
            f"{checkpoint} was written before checkpoints knew their data: whether the "
            "training files have changed since is not checked"
        )
    fingerprint = Fingerprint.from_plain(plain, checkpoint)
    change = f"the training files have changed since {checkpoint} was saved"
    if not (other := difference(fingerprint, files)):
        added = files[fingerprint.count :]
        if not added:
            return None, ""
        return fingerprint.count if batches else None, (
            f"training files were added since {checkpoint} was saved: {len(added):,} with "
            f"{sum(file.rows for file in added):,} rows; they begin "
            f"{'with the next epoch' if batches else 'now'}"
        )
    if not batches:
        return None, f"{change}: {other}; the next epoch reads them as they are"
    change = f"{change}, after {batches:,} batches of an epoch: {other}"
    if resume_data == "ignore":
        return None, (
            f"resume_data=ignore: {change}; the epoch goes on after as many batches of what "
            "is there now"
        )
    raise CheckpointError(
        f"{change}; rows would be trained twice or never: bring the files back, go on from a "
        "checkpoint of an epoch's end, or set resume_data=ignore"
    )
