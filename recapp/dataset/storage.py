"""Open files of data, and tell whether they have changed. No other file of the room opens one.

A file that is replaced, or appended to, has another stamp. Whoever has read facts of a file, such
as its numbers of rows, keeps the stamp with them.
"""

import errno
import os
from typing import NamedTuple

import pyarrow as pa


class Stamp(NamedTuple):
    """The size and modification time of a file, which reveal a later write.

    Args:
        size: The size in bytes.
        changed: The time of its last change, in nanoseconds.
    """

    size: int
    changed: int


def stamp_of(path: str) -> Stamp:
    """Return the current stamp of a file.

    Raises:
        OSError: The file does not exist or cannot be read.
    """
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns)


def open_file(path: str, *, mapped: bool = False) -> pa.NativeFile:
    """Open a file for reading, at any place of it.

    Args:
        path: The file.
        mapped: Whether to map it into memory, which saves a copy; a file that is cut short in the
            meantime then ends the process.

    Raises:
        OSError: The file does not exist or cannot be read.
    """
    try:
        return pa.memory_map(path) if mapped else pa.OSFile(path)
    except OSError as error:  # in Arrow's words, which name the file twice
        number = error.errno or errno.EISDIR
        raise OSError(number, os.strerror(number), path) from error
