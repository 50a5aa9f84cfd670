"""Make Python code that converts text and other files, which no format reads, to Parquet. The code
writes below the working directory, because the directory of the logs may be read-only.

`recapp/dataset/file_kinds.py` knows what the files are.
"""

import os
from collections.abc import Sequence
from glob import glob
from itertools import chain, count
from pathlib import Path

from recapp.dataset.file_kinds import TEXT, FileKind, first_bytes, is_printed, kind_of
from recapp.dataset.formats import format_names
from recapp.errors import DataError

TEXT_SUFFIXES = (".csv", ".tsv", ".jsonl", ".gz", ".bz2", ".zst")


def holds_text(file: Path) -> bool:
    """Return whether lines of Python convert a file, by its first bytes; if these are unknown, its
    suffix says so.
    """
    kind = kind_of(file)
    return bool(kind.reads) if kind else file.suffix.lower() in TEXT_SUFFIXES


def holds_rows(file: Path) -> bool:
    """Return whether lines of Python convert a file, and it is no page of text: its first two lines
    have equally many delimiters. Those of a README have not.
    """
    begin = first_bytes(file)
    if not is_printed(begin):
        return holds_text(file)
    first, second, *_ = [*begin.splitlines(), b"", b""]
    even = any(
        first.count(mark) and second.count(mark) == first.count(mark)
        for mark in (b"\t", b",", b";", b"|")
    )
    return holds_text(file) and (even or begin.lstrip()[:1] in (b"{", b"["))


def refuse_unknown(file: Path, beside: Path, setting: str) -> None:
    """Refuse a file without a suffix that lies beside data, unless it is a page of text.

    Args:
        file: The file.
        beside: A file of the data.
        setting: The setting's name, for the error.

    Raises:
        DataError: It is no page of text.
    """
    if is_printed(first_bytes(file)):
        return
    kind = kind_of(file)
    named = kind.name if kind else f"neither {format_names()} nor text"
    fix = kind.fix if kind and kind.fix else "write it again"
    raise DataError(
        f"{setting}={file.parent}: {file.name} is {named}, and lies beside {beside.name}: {fix}, "
        "or move it elsewhere"
    )


def layout(file: Path) -> FileKind:
    """Return what a file is; files that share it can be converted together."""
    return kind_of(file) or TEXT


def conversion(files: Sequence[Path], pattern: str | None, folder: Path) -> list[str]:
    """Return the lines of code that convert text files to Parquet.

    Args:
        files: At least one file, all with the same suffix.
        pattern: A glob to show instead of the names, if it matches exactly these files; None for a
            single file that the user named.
        folder: The directory for the Parquet files, with the same tree as the text files below
            `root_of(files)`.
    """
    exact = pattern is not None and {Path(found) for found in glob(pattern)} == set(files)
    names = f"glob({pattern!r})" if exact else repr([str(file) for file in files])
    root = repr(str(root_of(files)))
    kind = layout(files[0])
    return [
        *(["from glob import glob"] if exact else []),
        "from pathlib import Path",
        "from pyarrow import parquet",
        *kind.imports,
        f"folder = Path({str(folder)!r})  # where the Parquet files are written",
        f"for source in {names}:",
        *(f"    {line}" for line in kind.reads),
        f"    below = Path(source).absolute().relative_to({root})",
        "    target = (folder / below).with_suffix('.parquet')",
        "    target.parent.mkdir(parents=True, exist_ok=True)",
        "    parquet.write_table(table, target)",
    ]


def root_of(files: Sequence[Path]) -> Path:
    """Return the deepest directory that holds all files."""
    return Path(os.path.commonpath([file.parent.absolute() for file in files]))


def new_folder(name: str) -> Path:
    """Return a new directory name below the working directory's `data`.

    Args:
        name: The name of the directory; a number is appended if the name is taken.
    """
    numbered = (Path("data", f"{name}_{number}") for number in count(2))
    return next(folder for folder in chain([Path("data", name)], numbered) if not folder.exists())
