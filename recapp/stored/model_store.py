"""Where stored models are: their two kinds, what the room does with the operations of a store
(`recapp/stored/store.py`), and the search for models below a directory.
"""

import io
import os
import re
import stat
import zlib
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from recapp.errors import ArtefactError, CheckpointError, RecappError, suggest
from recapp.stored.store import LOCAL, Entry, Files, Folder, LocalFiles, beside

MANIFEST = "manifest.json"  # of every stored model; written last


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of stored model.

    Args:
        name: The name of the kind, for people.
        article: The article of the name.
        format: The name of the format in its manifest.
        version: The latest version of the format; a reader refuses a later one.
        manifest_bytes: The most bytes of a manifest, so that reading a large file does not fill the
            memory.
        error: The class of its errors.
        written: The verb for the making of its files, for errors.
        fix: The advice for a damaged model.
        newer: The advice for a model of a later version.
        mistaken: The advice for a path to a model of the other kind.
        has_nan: Whether numbers in its manifest may be NaN.
        resumes: Whether training can resume from it.
    """

    name: str
    article: str
    format: str
    version: int
    manifest_bytes: int
    error: type[RecappError]
    written: str
    fix: str
    newer: str
    mistaken: str
    has_nan: bool
    resumes: bool


CHECKPOINT = Kind(
    name="checkpoint",
    article="a",
    format="recapp",
    version=4,
    manifest_bytes=2**30,  # enough for more than a million blocks
    error=CheckpointError,
    written="saved",
    fix="use another checkpoint",
    newer="use a later recapp",
    mistaken=(
        "{folder} is an artefact that recapp.export has written, and no checkpoint: name the "
        "checkpoint that it was made of"
    ),
    has_nan=True,
    resumes=True,
)
ARTEFACT = Kind(
    name="artefact",
    article="an",
    format="recapp-artefact",
    version=4,
    manifest_bytes=2**28,
    error=ArtefactError,
    written="written",
    fix="export it again",
    newer="use a later recapp, or export the checkpoint with this one",
    mistaken=(
        "{folder} is a checkpoint: `python -m recapp.export {ckpt_path} output=DIR` makes "
        "an artefact of it"
    ),
    has_nan=False,
    resumes=False,
)
FORMATS = (CHECKPOINT.format, ARTEFACT.format)


MOST_LINKS = 40  # that Linux follows
STORES: dict[Path, Files] = {}
"""The stores of paths that are not of this machine's disks, by the directory above them."""
_LEFT_BEHIND = re.compile(r".+\.ckpt\.(?:tmp|old|\d+(?:-\d+)?(?:\.tmp|\.old)?)")


def files_at(path: Path) -> Files:
    """Return the store of a path."""
    return next((store for top, store in STORES.items() if path.is_relative_to(top)), LOCAL)


def entry_of(path: Path) -> Entry | None:
    """Return what the store of a path knows of it; None if the name is free."""
    return next(iter(files_at(path).entries(path)), None)


def is_link(path: Path) -> bool:
    """Return whether a name is a link, even one without a target."""
    entry = entry_of(path)
    return entry is not None and entry.target is not None


def size_of(file: Path) -> int | None:
    """Return the size of a file in bytes; None if it does not exist."""
    entry = entry_of(file)
    return entry.size if entry and entry.kind == "file" else None


def checkpoints_in(folder: Path) -> list[Entry]:
    """Return the checkpoints in a directory, links included."""
    entries = files_at(folder).entries(folder, 1)
    return [one for one in entries if one.path.suffix == ".ckpt" and one.path != folder]


def links_to(path: Path) -> list[Path]:
    """Return the links to a directory from the same parent directory."""
    entry = entry_of(path)
    links = [one for one in checkpoints_in(path.parent) if one.target is not None]
    return [one.path for one in links if entry and one.identity == entry.identity]


def end_of_links(path: Path) -> Path:
    """Return the path to which a link leads; directories above it may be links still."""
    for _ in range(MOST_LINKS):
        entry = entry_of(path)
        if entry is None or entry.target is None:
            break
        path = entry.target
    return path


def write_file(file: Path, content: bytes) -> dict[str, Any]:
    """Write a small file, and return its size and checksum as an entry of a manifest."""
    with files_at(file).create(file) as out:
        out.write(content)
    return {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}


def share(file: Path, name: Path) -> bool:
    """Give a file a second name. Return whether that is possible."""
    store = files_at(name)
    return isinstance(store, LocalFiles) and store is files_at(file) and store.share(file, name)


def new_version(path: Path, number: int) -> Path:
    """Return a free name for a directory, the future target of the link `path`.

    Args:
        path: The name of the link.
        number: The training step, a part of the new name.
    """
    again = ("", *(f"-{i}" for i in range(1, 1000)))
    names = (beside(path, f"{number:06d}{suffix}") for suffix in again)
    return next(name for name in names if entry_of(name) is None)


def clean_up(folder: Path) -> None:
    """Delete the remains of killed saves in a directory, and versions without a link."""
    store = files_at(folder)
    entries = [entry for entry in store.entries(folder, 1) if entry.path != folder]
    names = {entry.path for entry in entries}
    for path in sorted(name for name in names if name.name.endswith(".ckpt.old")):
        if path.with_suffix("") in names:
            store.remove(path)
        else:
            store.publish(path, path.with_suffix(""))
    needed = {one.identity for one in entries if one.target and one.path.suffix == ".ckpt"}
    for entry in entries:
        if _LEFT_BEHIND.fullmatch(entry.path.name) and (
            entry.target or entry.identity not in needed
        ):
            store.remove(entry.path)


class Pinned:
    """An open directory: its files can be opened even after its name leads to another directory.

    Args:
        path: The name of the directory, also for messages.

    Raises:
        OSError: The directory does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder: Folder = files_at(path).open_folder(path)

    def close(self) -> None:
        """Close the directory; files opened from it stay open."""
        self.folder.close()

    def open(self, file: str, kind: Kind) -> BinaryIO:
        """Open a regular file; refuse a pipe, which would wait for a writer.

        Args:
            file: Its path in the directory.
            kind: The kind of stored model, for errors of this call and of later reads.

        Raises:
            FileNotFoundError: The file does not exist.
            RecappError: The file cannot be read; the class is that of `kind`.
        """
        name = self.path / file
        try:
            descriptor = self.folder.descriptor(file)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise kind.error(f"{name} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise kind.error(f"{name} is no file of {kind.article} {kind.name}")
        return io.BufferedReader(_StoredFile(descriptor, name, kind.error))

    def read(self, file: str, kind: Kind) -> bytes:
        """Return the content of a manifest.

        Raises:
            FileNotFoundError: The file does not exist.
            RecappError: The file is larger than a manifest of `kind`, or cannot be read.
        """
        with self.open(file, kind) as source:
            if bytes_of(source) > kind.manifest_bytes:
                raise kind.error(f"{self.path / file} is no file of {kind.article} {kind.name}")
            return source.read()


class _StoredFile(io.FileIO):
    """An open file whose read errors name the file, in one line."""

    def __init__(self, descriptor: int, path: Path, error: type[RecappError]) -> None:
        super().__init__(descriptor, "rb")
        self._path = path
        self._error = error

    def readinto(self, buffer: Any) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise self._unreadable(error) from error

    def readall(self) -> bytes:
        try:
            return super().readall()
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> RecappError:
        return self._error(f"{self._path} cannot be read: {error.strerror}")


def path_of(source: BinaryIO) -> str:
    """Return a local path to an open file that stays valid when its name leads elsewhere."""
    return f"/proc/self/fd/{source.fileno()}"


def bytes_of(source: BinaryIO) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(source.fileno()).st_size


def crc32_of(source: BinaryIO) -> str:
    """Return the checksum of a whole open file as in manifests: eight hex digits."""
    source.seek(0)
    checksum = 0
    while raw := source.read(1 << 20):
        checksum = zlib.crc32(raw, checksum)
    return f"{checksum:08x}"


LEVELS = 6  # of directories to search: sweeps/DATE/TIME/JOB/checkpoints/NAME.ckpt
MOST_ENTRIES = 20_000  # directory entries to look at: some tenths of a second
HEAD_BYTES = 256  # of a manifest; they name its format


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path leads to a whole checkpoint; the remains of a killed save are not
    whole.
    """
    path = Path(path)
    return size_of(files_at(path).current(path) / MANIFEST) is not None


def read_manifest_text(path: Path) -> bytes:
    """Return the content of the manifest of a checkpoint or an artefact, unchecked.

    Raises:
        RecappError: The file is too large, or cannot be read.
        OSError: There is no stored model.
    """
    with closing(Pinned(files_at(path).current(path))) as pinned:
        return pinned.read(MANIFEST, CHECKPOINT)


def is_artefact(path: str | Path) -> bool:
    """Return whether the manifest of a directory names the format of artefacts."""
    path = Path(path)
    try:
        with (
            closing(Pinned(files_at(path).current(path))) as pinned,
            pinned.open(MANIFEST, ARTEFACT) as source,
        ):
            return ARTEFACT.format.encode() in source.read(HEAD_BYTES)
    except (RecappError, OSError):
        return False


def find_checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints below a directory, oldest first, without links to other checkpoints.
    The search ends at the depth of sweeps and at `MOST_ENTRIES`, so that a home directory does not
    take minutes.
    """
    folder = Path(folder)
    below = islice(files_at(folder).entries(folder, LEVELS), MOST_ENTRIES)
    names = {
        entry.path.with_suffix("") if entry.path.suffix == ".old" else entry.path
        for entry in below
        if entry.path != folder and entry.path.name.endswith((".ckpt", ".ckpt.old"))
    }
    entries = [entry for name in names if is_checkpoint(name) and (entry := entry_of(name))]
    places = {entry.identity for entry in entries if entry.target is None}
    paths = [one.path for one in entries if one.target is None or one.identity not in places]
    return sorted(paths, key=lambda path: (_written(path), path.name))


def _written(path: Path) -> int:
    manifest = entry_of(files_at(path).current(path) / MANIFEST)
    return manifest.written if manifest else 0


def why_none(path: Path, kind: Kind) -> str:
    """Return the reason why a path is not a stored model, with the name of a similar one."""
    folder = files_at(path).current(path)
    entry = entry_of(folder)
    if kind is ARTEFACT:
        if entry is None or entry.kind != "folder":
            return f"{path}: there is no such directory: `recapp.export` writes artefacts"
        return f"{folder} is no artefact: {MANIFEST} is missing"
    if entry and entry.kind == "folder":
        try:
            below = [str(p) for p in find_checkpoints(folder)]
        except OSError:  # a directory was deleted meanwhile: give no hint
            below = []
        hint = f"; below it there is {below[-1]}" if below else ""
        return (
            f"{path} is no checkpoint, or an incomplete one: it has no {MANIFEST}, which is "
            f"written last{hint}"
        )
    if entry and entry.kind == "file":
        return f"{path} is a file: a checkpoint of recapp is a directory with a {MANIFEST}"
    beside = [one.path.name for one in checkpoints_in(path.parent)]
    hint = f": {suggest(path.name, beside)}" if beside else ""
    return f"there is no checkpoint {path}{hint}"
