"""Writes files so that readers never see an incomplete file."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file. After a crash the file is either the old one or the whole new one.

    Args:
        path: The file.
        text: The content; line ends are written unchanged.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, newline="")
    os.replace(unfinished, path)
