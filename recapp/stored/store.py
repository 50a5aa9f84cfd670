"""What a store of stored models does: seven operations.

    step_000020.ckpt/                a stored model: a directory that is whole
    last.ckpt -> step_000020.ckpt    a link to a model, replaced at once
    last.ckpt -> last.ckpt.000027    a link to a directory that has no other name
    a.ckpt.tmp                       a directory that is being written or deleted

`recapp/stored/local_files.py` does them on local disks and shared file systems. A store of objects,
which has neither renames nor links, is `tests/stored/object_store.py`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
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
