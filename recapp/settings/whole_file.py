"""Small files that are whole or not there: after a crash, a full disk or beside another process a
file is the old one or the new one.
"""

import os
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Write a file beside its name, and rename the file when it is whole.

    A link is followed, and what is no regular file (`/dev/stdout`, a pipe) is written as it is.

    Args:
        path: The file.
        text: The content; line ends are written unchanged.

    Raises:
        OSError: The disk is full, or there is no permission; nothing is left of the new file.
            The error names a file.
    """
    special = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    file = Path(path) if special else Path(os.path.realpath(path))
    unfinished = file if special else file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, newline="", encoding="utf-8")
        if unfinished != file:
            os.replace(unfinished, file)
    except OSError as error:
        if unfinished != file:
            unfinished.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise
