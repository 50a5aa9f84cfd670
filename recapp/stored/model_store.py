"""What the room does with the seven operations of a store (`recapp/stored/store.py`)."""

import io
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from recapp.errors import RecappError
from recapp.stored.kinds import Kind
from recapp.stored.local_files import LOCAL, LocalFiles, beside
from recapp.stored.store import Entry, Files, Folder

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
