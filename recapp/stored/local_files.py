"""The file system operations of stored models, for local disks.

    step_000020.ckpt/                a stored model: a directory that is whole
    last.ckpt -> step_000020.ckpt    a link to a model, replaced in one rename
    last.ckpt -> last.ckpt.000027    a link to a directory that has no other name
    a.ckpt.tmp                       a directory that is being written or deleted
    a.ckpt.old                       the earlier a.ckpt between two renames; readers look here, too

One rename cannot replace a directory. So a commit first renames the earlier directory, which is not
lost if the process is killed between the two renames.

Writers use `empty`, `create`, `write` and `commit`. Readers use `current` and `pin`; a pinned
version stays readable after another version takes its name. Another kind of store is a class with
these methods in a file of its own, and `files_at` returns it for its paths. The files that it opens
must be local (`fileno` works), because rows are mapped.
"""

import errno
import fcntl
import io
import os
import re
import resource
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from recapp.errors import RecappError
from recapp.stored.kinds import Kind

OLD = "old"
TMP = "tmp"
MOST_LINKS = 40  # that Linux follows
_LEFT_BEHIND = re.compile(r".+\.ckpt\.(?:tmp|old|\d+(?:-\d+)?(?:\.tmp|\.old)?)")


def beside(path: Path, suffix: str) -> Path:
    """Return the name of a directory while it is written ("tmp") or replaced ("old")."""
    return path.with_name(f"{path.name}.{suffix}")


class Files:
    """The files of stored models on local disks or shared file systems."""

    # ---- reading

    def current(self, path: Path, old: str = OLD) -> Path:
        """Return the path of a directory, even if its writer was killed between two renames.

        Args:
            path: The name of the directory.
            old: The suffix of its name between those renames.
        """
        named = [p for p in (Path(os.path.abspath(path)), Path(os.path.realpath(path))) if p.name]
        asides = [beside(p, old) for p in named]  # the path "." has a name only in absolute form
        return next((p for p in (path, *asides) if p.exists()), path)

    def pin(self, folder: Path) -> "Pinned":
        """Open a directory, so that its files can be opened even if its name leads to another one
        later.

        Raises:
            OSError: The directory does not exist.
        """
        return Pinned(folder, os.open(folder, os.O_RDONLY | os.O_DIRECTORY))

    def version(self, folder: Path) -> tuple[int, ...]:
        """Return numbers that stay equal while a name leads to the same unchanged directory."""
        with suppress(OSError):
            found = os.stat(folder)
            return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns
        return ()

    def taken(self, path: Path) -> bool:
        """Return whether the name exists, even as a link without a target."""
        return os.path.lexists(path)

    def is_link(self, path: Path) -> bool:
        """Return whether the name is a link."""
        return path.is_symlink()

    def is_folder(self, path: Path) -> bool:
        """Return whether the name leads to a directory."""
        return path.is_dir()

    def size(self, file: Path) -> int | None:
        """Return the size of a regular file in bytes; None if it does not exist."""
        return file.stat().st_size if file.is_file() else None

    def written(self, file: Path) -> int:
        """Return the time of the last write to a file, in nanoseconds."""
        return file.stat().st_mtime_ns

    def end_of_links(self, path: Path) -> Path:
        """Return the path to which a link leads; directories above it may be links still."""
        for _ in range(MOST_LINKS):
            if not path.is_symlink():
                break
            path = Path(os.path.abspath(path.parent / os.readlink(path)))
        return path

    def real(self, path: Path) -> Path:
        """Return the path of a name without links."""
        return Path(os.path.realpath(path))

    def checkpoints_in(self, folder: Path) -> list[Path]:
        """Return the names of checkpoints in a directory, links included."""
        return list(folder.glob("*.ckpt"))

    def links_to(self, path: Path) -> list[Path]:
        """Return the links to a directory from the same parent directory."""
        names = [p for p in self.checkpoints_in(path.parent) if p.is_symlink()]
        return [p for p in names if self.real(p) == self.real(path)]

    def below(self, folder: Path, levels: int, most: int) -> Iterator[Path]:
        """Yield the entries below a directory, level by level; skip the files inside of stored
        models.

        Args:
            folder: The directory.
            levels: The number of levels to list.
            most: The most entries to look at.
        """
        level = [folder]
        left = most
        for _ in range(levels):
            directories = []
            for directory in level:
                with suppress(OSError), os.scandir(directory) as entries:
                    for entry in islice(entries, left):
                        left -= 1
                        yield Path(entry)
                        if not entry.name.endswith(".ckpt") and entry.is_dir():
                            directories.append(Path(entry))
            level = directories

    # ---- writing

    def empty(self, folder: Path) -> None:
        """Make an empty directory; delete an earlier directory or file of this name."""
        self.remove(folder)
        folder.mkdir(parents=True)

    @contextmanager
    def create(self, file: Path) -> Iterator[BinaryIO]:
        """Yield a new file to write to; flush it to the disk when the `with` ends without an error.

        Make its directory if it is missing.
        """
        file.parent.mkdir(exist_ok=True)
        with open(file, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())

    def write(self, file: Path, content: bytes) -> dict[str, Any]:
        """Write a small file, and return its size and checksum as an entry of a manifest."""
        with self.create(file) as out:
            out.write(content)
        return {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}

    def replace(self, file: Path, content: bytes) -> None:
        """Write a small file, and put it in the place of an earlier one in one rename. If that
        fails, the earlier one is all that stays.
        """
        new = beside(file, TMP)
        try:
            self.write(new, content)
            new.replace(file)
        except OSError:
            self.remove(new)
            raise
        self.sync(file.parent)

    def share(self, file: Path, name: Path) -> bool:
        """Give a file a second name. Return whether that is possible, which depends on the file
        system.
        """
        with suppress(OSError):
            os.link(file, name)
            return True
        return False

    def commit(self, folder: Path, path: Path, old: str = OLD) -> None:
        """Rename a whole directory to its final name; then delete the earlier directory of this
        name.
        """
        self.sync(folder)
        self._take_name(folder, path, old)

    def link(self, path: Path, target: Path) -> None:
        """Make `path` a link to a directory of the same file system; replace an earlier link."""
        self.recover(path)
        new = beside(path, TMP)
        self.remove(new)
        new.symlink_to(os.path.relpath(target, path.parent))
        self._take_name(new, path, OLD)

    def _take_name(self, new: Path, path: Path, old: str) -> None:
        """Rename a directory or a link to `path`.

        A link replaces a link in one rename. An earlier directory is renamed first, then deleted.
        """
        aside = beside(path, old)
        if os.path.lexists(path) and not (path.is_symlink() and new.is_symlink()):
            path.rename(aside)
        new.rename(path)
        self.sync(path.parent)
        self.remove(aside)

    def recover(self, path: Path, old: str = OLD) -> None:
        """Undo the first rename of a killed writer; delete the earlier directory if its name is
        taken.
        """
        aside = beside(path, old)
        if not os.path.lexists(path) and os.path.lexists(aside):
            aside.rename(path)
        self.remove(aside)

    def new_version(self, path: Path, number: int) -> Path:
        """Return a free name for a directory, the future target of the link `path`.

        Args:
            path: The name of the link.
            number: The training step, a part of the new name.
        """
        again = ("", *(f"-{i}" for i in range(1, 1000)))
        names = (beside(path, f"{number:06d}{suffix}") for suffix in again)
        return next(name for name in names if not os.path.lexists(name))

    def clean_up(self, folder: Path) -> None:
        """Delete the remains of killed saves in a directory, and versions without a link."""
        for path in sorted(folder.glob("*.ckpt.old")):
            self.recover(path.with_suffix(""))
        needed = {self.real(p) for p in self.checkpoints_in(folder) if p.is_symlink()}
        for path in self.real(folder).glob("*.ckpt.*"):
            if _LEFT_BEHIND.fullmatch(path.name) and path not in needed:
                self.remove(path)

    def sync(self, folder: Path) -> None:
        """Flush a directory's names to the disk: a loss of power may undo a rename even if files
        are synced.
        """
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        """Delete a directory, a file or a link; do nothing if the name is free."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def delete(self, path: Path) -> None:
        """Delete a stored model; its name never leads to a part of it."""
        aside = beside(path, TMP)
        self.remove(aside)
        path.rename(aside)
        self.remove(aside)

    @contextmanager
    def locked(self, folder: Path) -> Iterator[bool]:
        """Make an empty directory and lock it for this process; yield False if another process has
        the lock.
        """
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = folder.exists() and os.path.samestat(os.fstat(held), folder.stat())
            except BlockingIOError:
                alone = False
            except OSError:  # some network file systems lack locks
                alone = True
            for path in folder.iterdir() if alone else ():
                self.remove(path)
            yield alone
        finally:
            os.close(held)


class Pinned:
    """An open directory: its files can be opened even after its name leads to another directory.

    Args:
        folder: The name of the directory, for messages.
        handle: The open directory, which `close` closes.
    """

    def __init__(self, folder: Path, handle: int) -> None:
        self.folder = folder
        self._handle = handle

    def close(self) -> None:
        """Close the directory; files opened from it stay open."""
        os.close(self._handle)

    def open(self, file: str, kind: Kind) -> BinaryIO:
        """Open a regular file; refuse a pipe, which would wait for a writer.

        Args:
            file: Its path in the directory.
            kind: The kind of stored model, for errors of this call and of later reads.

        Raises:
            FileNotFoundError: The file does not exist.
            RecappError: The file cannot be read; the class is that of `kind`.
        """
        name = self.folder / file
        try:
            descriptor = self._descriptor(file)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise kind.error(f"{name} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise kind.error(f"{name} is no file of {kind.article} {kind.name}")
        return io.BufferedReader(_StoredFile(descriptor, name, kind.error))

    def _descriptor(self, file: str) -> int:
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

    def read(self, file: str, kind: Kind) -> bytes:
        """Return the content of a manifest.

        Raises:
            FileNotFoundError: The file does not exist.
            RecappError: The file is larger than a manifest of `kind`, or cannot be read.
        """
        with self.open(file, kind) as source:
            if bytes_of(source) > kind.manifest_bytes:
                raise kind.error(f"{self.folder / file} is no file of {kind.article} {kind.name}")
            return source.read()

    def size(self, file: str) -> int | None:
        """Return the size of a regular file in bytes; None if it does not exist."""
        with suppress(OSError):
            found = os.stat(file, dir_fd=self._handle)
            return found.st_size if stat.S_ISREG(found.st_mode) else -1
        return None


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
    found = 0
    while raw := source.read(1 << 20):
        found = zlib.crc32(raw, found)
    return f"{found:08x}"


LOCAL = Files()


def files_at(path: Path) -> Files:
    """Return the store of a path."""
    return LOCAL
