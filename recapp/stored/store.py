"""The store of local disks and shared file systems for stored models, and what the room does with
the operations of stores (`recapp/stored/operations.py`).

    step_000020.ckpt/                a stored model: a directory that is whole
    last.ckpt -> step_000020.ckpt    a link to a model, replaced at once
    last.ckpt -> last.ckpt.000027    a link to a directory that has no other name
    a.ckpt.tmp                       a directory that is being written or deleted
    a.ckpt.old                       the earlier a.ckpt between two renames
    served.recapp-replaced           the earlier artefact; users name their own copies served.old

One rename cannot replace a directory. So `publish` of local disks first renames the earlier one,
which is not lost if the process is killed between the two renames: readers look there, too.

URIs, of stores without renames and links, lead to `recapp/stored/remote_files.py`. Below are the
two kinds of stored models.
"""

import fcntl
import io
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from typing_extensions import override

from recapp.errors import ArtefactError, CheckpointError, RecappError, suggest
from recapp.settings.uris import leads_elsewhere, path_to
from recapp.stored.operations import (
    CHECKPOINTS,
    LAST,
    MANIFEST,
    MOST_LINKS,
    OLD,
    REPLACED,
    TMP,
    Entry,
    Files,
    Folder,
    beside,
)


def _aside(path: Path) -> Path:
    """Return the name of an earlier directory while another takes its name."""
    return beside(path, OLD if path.suffix == ".ckpt" else REPLACED)


class LocalFiles(Files):
    """The files below a directory of this machine (a `recapp.stored.operations.Files`)."""

    @override
    def entries(self, path: Path, inside: bool = False) -> Iterator[Entry]:
        if inside:
            with suppress(OSError), os.scandir(path) as names:
                yield from filter(None, (_entry(Path(each)) for each in names))
        elif top := _entry(path) or _entry(self.current(path)):
            yield top._replace(path=path)

    @override
    def current(self, name: Path) -> Path:
        named = [p for p in (Path(os.path.abspath(name)), Path(os.path.realpath(name))) if p.name]
        asides = map(_aside, named)  # the path "." has a name only in absolute form
        return next((path for path in (name, *asides) if path.exists()), name)

    @override
    def open_folder(self, folder: Path) -> "_Folder":
        return _Folder(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))

    @override
    @contextmanager
    def create(self, file: Path) -> Iterator[BinaryIO]:
        file.parent.mkdir(parents=True, exist_ok=True)
        replaces = file.exists()
        new = beside(file, TMP)
        try:
            with open(new, "wb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            new.replace(file)
        except BaseException:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        if replaces:  # the names of a new directory are flushed when it is published
            sync(file.parent)

    @override
    def publish(self, folder: Path, name: Path, *, link: bool = False) -> None:
        aside = _aside(name)
        new = folder
        if link:
            if not os.path.lexists(name) and os.path.lexists(aside):
                aside.rename(name)
            new = beside(name, TMP)
            self.remove(new)
            new.symlink_to(os.path.relpath(folder, name.parent))
        else:
            sync(folder)
        if os.path.lexists(name) and not (link and name.is_symlink()):
            _delete(aside)
            name.rename(aside)
        new.rename(name)
        sync(name.parent)
        if aside != folder:
            _delete(aside)

    @override
    def remove(self, path: Path) -> None:
        for name in (_aside(path), path):
            if path.suffix == ".ckpt" and name.is_dir() and not name.is_symlink():
                _delete(beside(path, TMP))
                name = name.rename(beside(path, TMP))
            _delete(name)

    @override
    @contextmanager
    def locked(self, folder: Path) -> Iterator[bool]:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = folder.exists() and os.path.samestat(os.fstat(handle), folder.stat())
            except BlockingIOError:
                alone = False
            except OSError:  # some network file systems lack locks
                alone = True
            for path in folder.iterdir() if alone else ():
                _delete(path)
            yield alone
        finally:
            os.close(handle)


@dataclass(frozen=True)
class _Folder:
    """An open directory.

    Args:
        handle: Its descriptor, which `close` closes.
    """

    handle: int

    def close(self) -> None:
        os.close(self.handle)

    def size(self, file: str) -> int | None:
        with suppress(OSError):
            status = os.stat(file, dir_fd=self.handle)
            return status.st_size if stat.S_ISREG(status.st_mode) else -1
        return None

    def descriptor(self, file: str) -> int:
        # a pipe does not wait for a writer
        return os.open(file, os.O_RDONLY | os.O_NONBLOCK, dir_fd=self.handle)


def _entry(path: Path) -> Entry | None:
    try:
        status = path.lstat()
        target = None
        if stat.S_ISLNK(status.st_mode):
            target = Path(os.path.abspath(path.parent / os.readlink(path)))
            with suppress(OSError):  # a link to nothing
                status = path.stat()
    except OSError:
        return None
    mode = status.st_mode
    kind = "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"
    identity = (status.st_dev, status.st_ino)
    version = (*identity, status.st_mtime_ns, status.st_ctime_ns)
    return Entry(path, kind, status.st_size, target, identity, version)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Flush a directory's names to the disk: a loss of power may undo a rename even if files are
    synced.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


LOCAL = LocalFiles()


# ---- stored models


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of stored model.

    Args:
        name: The name of the kind, for people.
        article: The article of the name.
        format: The name of the format in its manifest.
        parts: The entry of the manifest that has a line for each item.
        version: The latest version of the format; a reader refuses a later one.
        manifest_bytes: The most bytes of a manifest, so that reading a large file does not fill the
            memory.
        error: The class of its errors.
        written: The verb for the making of its files, for errors.
        fix: The advice for a damaged model.
        newer: The advice for a model of a later version.
        mistaken: The advice for a path to a model of the other kind.
        resumes: Whether training can resume from it.
    """

    name: str
    article: str
    format: str
    parts: str
    version: int
    manifest_bytes: int
    error: type[RecappError]
    written: str
    fix: str
    newer: str
    mistaken: str
    resumes: bool


CHECKPOINT = Kind(
    name="checkpoint",
    article="a",
    format="recapp",
    parts="blocks",
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
    resumes=True,
)
ARTEFACT = Kind(
    name="artefact",
    article="an",
    format="recapp-artefact",
    parts="tables",
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
    resumes=False,
)


_LEFT_BEHIND = re.compile(r".+\.ckpt\.(?:tmp|old|\d+(?:-\d+)?(?:\.tmp|\.old)?)")


def files_at(path: Path) -> Files:
    """Return the store of a path."""
    if leads_elsewhere(path):
        from recapp.stored.remote_files import REMOTE  # imports pyarrow

        return REMOTE
    return LOCAL


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
    entries = files_at(folder).entries(folder, inside=True)
    return [one for one in entries if one.path.suffix == ".ckpt"]


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
    """Give a file a second name. Return whether that is possible, which depends on the store and
    the file system.
    """
    with suppress(OSError):
        if files_at(file) is files_at(name) is LOCAL:
            name.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, name)
            return True
    return False


def new_version(path: Path, number: int) -> Path:
    """Return a free name for a directory, the future target of the link `path`.

    Args:
        path: The name of the link.
        number: The training step, a part of the new name.
    """
    suffixes = ("", *(f"-{i}" for i in range(1, 1000)))
    names = (beside(path, f"{number:06d}{suffix}") for suffix in suffixes)
    return next(name for name in names if entry_of(name) is None)


def clean_up(folder: Path) -> None:
    """Delete the remains of killed saves in a directory, and versions without a link."""
    store = files_at(folder)
    entries = [*store.entries(folder, inside=True)]
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
            return source.read(bytes_of(source) + 1)


class _StoredFile(io.FileIO):
    """An open file whose errors name it in one line, where the caller names the bytes to read."""

    def __init__(self, descriptor: int, path: Path, error: type[RecappError]) -> None:
        super().__init__(descriptor, "rb")
        self._path = path
        self._error = error

    def readinto(self, buffer: Any) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise self._error(f"{self._path} cannot be read: {error.strerror}") from error


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


HEAD_BYTES = 256  # of a manifest; they name its format


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path leads to a whole checkpoint; the remains of a killed save are not
    whole.
    """
    path = path_to(path)
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
    path = path_to(path)
    try:
        with (
            closing(Pinned(files_at(path).current(path))) as pinned,
            pinned.open(MANIFEST, ARTEFACT) as source,
        ):
            return ARTEFACT.format.encode() in source.read(HEAD_BYTES)
    except (RecappError, OSError):
        return False


def why_none(path: Path, kind: Kind) -> str:
    """Return the reason why a path is not a stored model, with the name of a similar one."""
    folder = files_at(path).current(path)
    entry = entry_of(folder)
    if kind is ARTEFACT:
        if entry is None or entry.kind != "folder":
            return f"{path}: there is no such directory: `recapp.export` writes artefacts"
        return f"{folder} is no artefact: {MANIFEST} is missing"
    if entry and entry.kind == "folder":
        hint = ""
        with suppress(OSError):
            for last in (folder / CHECKPOINTS / LAST, folder / LAST):
                if is_checkpoint(last):
                    hint = f"; that of this run is {last}"
        return (
            f"{path} is no checkpoint, or an incomplete one: it has no {MANIFEST}, which is "
            f"written last{hint}"
        )
    if entry and entry.kind == "file":
        return f"{path} is a file: a checkpoint of recapp is a directory with a {MANIFEST}"
    beside = [one.path.name for one in checkpoints_in(path.parent)]
    hint = f": {suggest(path.name, beside)}" if beside else ""
    return f"there is no checkpoint {path}{hint}"
