"""What a store of stored models does, in seven operations: on disks `recapp/stored/store.py`, in
other places `recapp/stored/remote_files.py`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

MANIFEST = "manifest.json"  # of every stored model; written last
CHECKPOINTS = "checkpoints"  # their directory in the directory of a run
LAST = "last.ckpt"  # the link to the last checkpoint of a run
MOST_LINKS = 40  # that Linux follows
OLD = "old"
REPLACED = "recapp-replaced"
EXPORTED = "recapp-export"  # of an artefact while it is written
TMP = "tmp"


class Entry(NamedTuple):
    """What a store knows of a name.

    Args:
        path: The name.
        kind: `file` or `folder`, of what a link leads to; `other` without either.
        size: The size of a file in bytes.
        target: The path to which a link leads; None for other names.
        identity: Equal for names that lead to one directory.
        version: Equal while that directory is unchanged.
    """

    path: Path
    kind: str
    size: int
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

    def entries(self, path: Path, inside: bool = False) -> Iterator[Entry]:
        """Yield the entry of a path, if it exists; or the entries inside of a directory.

        Args:
            path: The path.
            inside: Whether to yield what is inside.
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


def beside(path: Path, suffix: str) -> Path:
    """Return the name of a directory while it is written ("tmp") or replaced ("old")."""
    return path.with_name(f"{path.name}.{suffix}")
