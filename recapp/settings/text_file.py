"""Read small files that settings name.

The settings may come from another person's file. So a device, a pipe or an endless file is refused
before it is read.
"""

import os
import stat
from pathlib import Path


def read_text(path: str | Path, most: int) -> str:
    """Return the text of a regular file.

    Args:
        path: The file.
        most: The largest size that is allowed, in bytes.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not regular, is larger, or is not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    with os.fdopen(descriptor, "rb", closefd=True) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no file of text")
        if found.st_size > most:
            raise ValueError(f"it has {found.st_size:,} bytes, and {most:,} are allowed")
        return file.read(most).decode()
