"""What a store of stored models does, in seven operations, and the store of local disks and shared
file systems.

    step_000020.ckpt/                a stored model: a directory that is whole
    last.ckpt -> step_000020.ckpt    a link to a model, replaced at once
    last.ckpt -> last.ckpt.000027    a link to a directory that has no other name
    a.ckpt.tmp                       a directory that is being written or deleted
    a.ckpt.old                       the earlier a.ckpt between two renames
    served.recapp-replaced           the earlier artefact; users name their own copies served.old

One rename cannot replace a directory. So `publish` of local disks first renames the earlier one,
which is not lost if the process is killed between the two renames: readers look there, too.

A store of objects, which has neither renames nor links, is `tests/stored/object_store.py`.
"""

import errno
import fcntl
import os
import resource
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol


class Entry(NamedTuple):
    """What a store knows of a name.

    Args:
        path: The name.
        kind: `file` or `folder`, of what a link leads to; `other` without either.
        size: The size of a file in bytes.
        written: The time of the last write, in nanoseconds.
        target: The path to which a link leads; None for other names.
        identity: Equal for names that lead to one directory.
        version: Equal while that directory is unchanged.
    """

    path: Path
    kind: str
    size: int
    written: int
    target: Path | None
    identity: tuple[int, ...]
    version: tuple[int, ...]


class Folder(Protocol):
    """An open directory: its files can be opened even after its name leads to another directory."""

    def descriptor(self, file: str) -> int:
        """Return a descriptor of a file, which must be local, because rows are mapped.

        Raises:
            FileNotFoundError: The file does not exist.
        """

    def size(self, file: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist, -1 if it is no file."""

    def close(self) -> None:
        """Close the directory; files opened from it stay open."""


class Files(Protocol):
    """The files of a store."""

    def entries(self, path: Path, levels: int = 0) -> Iterator[Entry]:
        """Yield the entry of a path, if it exists, then those below it, level by level, but not
        those inside of checkpoints.

        Args:
            path: The path.
            levels: The number of levels below it.
        """

    def current(self, name: Path) -> Path:
        """Return the directory to which a name leads, even if a writer was killed meanwhile."""

    def open_folder(self, folder: Path) -> Folder:
        """Open a directory for reading.

        Raises:
            OSError: The directory does not exist.
        """

    def create(self, file: Path) -> AbstractContextManager[BinaryIO]:
        """Return a new file to write to. When the `with` ends without an error, the file is safe,
        and in the place of an earlier one; else nothing changes.
        """

    def publish(self, folder: Path, name: Path, *, link: bool = False) -> None:
        """Make a name lead to a whole directory, at once; then delete the earlier directory of that
        name.

        Args:
            folder: The directory.
            name: The name.
            link: Whether the directory keeps its own name, too; else it is renamed.
        """

    def remove(self, path: Path) -> None:
        """Delete a directory, a file or a link; do nothing if the name is free. The name of a
        checkpoint never leads to a part of it.
        """

    def locked(self, folder: Path) -> AbstractContextManager[bool]:
        """Make an empty directory and lock it for this process; yield False if another process has
        the lock.
        """


OLD = "old"
REPLACED = "recapp-replaced"
TMP = "tmp"


def beside(path: Path, suffix: str) -> Path:
    """Return the name of a directory while it is written ("tmp") or replaced ("old")."""
    return path.with_name(f"{path.name}.{suffix}")


def _aside(path: Path) -> Path:
    """Return the name of an earlier directory while another takes its name."""
    return beside(path, OLD if path.suffix == ".ckpt" else REPLACED)


class LocalFiles:
    """The files below a directory of this machine (a `recapp.stored.store.Files`)."""

    def entries(self, path: Path, levels: int = 0) -> Iterator[Entry]:
        """Yield the entry of a path, then those below it, level by level."""
        if top := _entry(path) or _entry(self.current(path)):
            yield top._replace(path=path)
        level = [path]
        for _ in range(levels):
            directories: list[Path] = []
            for directory in level:
                with suppress(OSError), os.scandir(directory) as inside:
                    for entry in filter(None, (_entry(Path(each)) for each in inside)):
                        yield entry
                        if entry.kind == "folder" and entry.path.suffix != ".ckpt":
                            directories.append(entry.path)
            level = directories

    def current(self, name: Path) -> Path:
        """Return the path of a directory, even if its writer was killed between two renames."""
        named = [p for p in (Path(os.path.abspath(name)), Path(os.path.realpath(name))) if p.name]
        asides = map(_aside, named)  # the path "." has a name only in absolute form
        return next((path for path in (name, *asides) if path.exists()), name)

    def open_folder(self, folder: Path) -> "_Folder":
        """Open a directory, so that its files can be opened even if its name leads to another one
        later.
        """
        return _Folder(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))

    @contextmanager
    def create(self, file: Path) -> Iterator[BinaryIO]:
        """Yield a new file to write to; flush it to the disk and give it its name when the `with`
        ends without an error. Make its directory if it is missing.
        """
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

    def share(self, file: Path, name: Path) -> bool:
        """Give a file a second name. Return whether that is possible, which depends on the file
        system.
        """
        with suppress(OSError):
            name.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, name)
            return True
        return False

    def publish(self, folder: Path, name: Path, *, link: bool = False) -> None:
        """Rename a directory, or a link to it, to its final name. A link replaces a link in one
        rename.
        """
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

    def remove(self, path: Path) -> None:
        """Delete a directory, a file or a link; do nothing if the name is free."""
        for name in (_aside(path), path):
            if path.suffix == ".ckpt" and name.is_dir() and not name.is_symlink():
                _delete(beside(path, TMP))
                name = name.rename(beside(path, TMP))
            _delete(name)

    @contextmanager
    def locked(self, folder: Path) -> Iterator[bool]:
        """Make an empty directory and lock it for this process; yield False if another process has
        the lock.
        """
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


class _Folder:
    """An open directory.

    Args:
        handle: Its descriptor, which `close` closes.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def close(self) -> None:
        """Close the directory; files opened from it stay open."""
        os.close(self._handle)

    def size(self, file: str) -> int | None:
        """Return the size of a regular file in bytes."""
        with suppress(OSError):
            status = os.stat(file, dir_fd=self._handle)
            return status.st_size if stat.S_ISREG(status.st_mode) else -1
        return None

    def descriptor(self, file: str) -> int:
        """Return a descriptor of a file; a pipe does not wait for a writer."""
        flags = os.O_RDONLY | os.O_NONBLOCK
        try:
            return os.open(file, flags, dir_fd=self._handle)
        except OSError as error:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if error.errno != errno.EMFILE or soft == hard:
                raise
        # a checkpoint has a file for each rank that saved it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return os.open(file, flags, dir_fd=self._handle)


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
    return Entry(path, kind, status.st_size, status.st_mtime_ns, target, identity, version)


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
