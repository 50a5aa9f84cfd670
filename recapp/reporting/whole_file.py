"""Writes files of which readers never see a half."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file; after a crash either the whole new file is there or the old one.

    Args:
        path: The file.
        text: What it holds, with the ends of lines as they are.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, newline="")
    os.replace(unfinished, path)
