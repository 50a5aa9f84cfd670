"""Files that are read whole or in parts, whose errors of reading name them: a disk that fails in
the middle of a checkpoint is one line as a file that is missing.
"""

import io
from pathlib import Path
from typing import Any, BinaryIO

from recapp.errors import RecappError


class _StoredFile(io.FileIO):
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


def stored_file(descriptor: int, path: Path, error: type[RecappError]) -> BinaryIO:
    """Return an open file for reading, which closes its descriptor.

    Args:
        descriptor: The open file.
        path: Its name, for people.
        error: What is raised where its bytes cannot be read.
    """
    return io.BufferedReader(_StoredFile(descriptor, path, error))
