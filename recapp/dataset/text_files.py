"""Make Python code that converts CSV, TSV and other text, which no format reads, to Parquet. The
code writes below the working directory, because the directory of the logs may be read-only.

Every column stays text, from which recapp reads ids, numbers and labels. Types that pyarrow infers
would change ids: "007" becomes 7, and hexadecimal words that have only decimal digits become other
numbers.

The first line determines the delimiter and the header. A header has no repeated name, no empty name
(except the first, for an index from pandas) and no numbers, except the 0, 1, 2, .. of columns
without names in pandas. Without a header pyarrow names the columns f0, f1, ..
"""

import gzip
import os
import zlib
from collections.abc import Sequence
from glob import glob
from itertools import chain, count
from pathlib import Path

TEXT_SUFFIXES = (".csv", ".tsv", ".gz")
_FIRST_BYTES = 65_536  # at the beginning of a file, to search for its first line
# bytes of text in ASCII, UTF-8 or Latin-1
_PRINTED = b"\t\n\f\r" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))


def holds_text(file: Path) -> bool:
    """Return whether a file is text, by its suffix or its first bytes."""
    return file.suffix.lower() in TEXT_SUFFIXES or _is_printed(_first_bytes(file))


def holds_table(file: Path) -> bool:
    """Return whether a file is text, by its first bytes, whose first two lines have equally many
    delimiters. Those of a README have not.
    """
    begin = _first_bytes(file)
    first, second, *_ = [*begin.splitlines(), b"", b""]
    return _is_printed(begin) and any(
        first.count(mark) and second.count(mark) == first.count(mark)
        for mark in (b"\t", b",", b";", b"|")
    )


def _first_bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as content:
            return content.read(_FIRST_BYTES)
    except OSError:
        return b""


def _is_printed(begin: bytes) -> bool:
    return b"\n" in begin and not begin.translate(None, _PRINTED)


def layout(file: Path) -> dict[str, str]:
    """Return what `read_csv` must know of a file; files that share it can be converted together."""
    return _options(_first_line(file))


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
    return [
        *(["from glob import glob"] if exact else []),
        "from pathlib import Path",
        "from pyarrow import csv, parquet",
        f"folder = Path({str(folder)!r})  # where the Parquet files are written",
        "options = {}",
        *(
            f"options[{name!r}] = {value}"
            for name, value in _options(_first_line(files[0])).items()
        ),
        f"for source in {names}:",
        "    names = csv.open_csv(source, **options).schema.names",
        "    text = csv.ConvertOptions(column_types=dict.fromkeys(names, 'string'))",
        f"    below = Path(source).absolute().relative_to({root})",
        "    target = (folder / below).with_suffix('.parquet')",
        "    target.parent.mkdir(parents=True, exist_ok=True)",
        "    table = csv.read_csv(source, convert_options=text, **options)",
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


def _first_line(file: Path) -> str:
    """Return the first line of a text file, compressed or not; empty if it cannot be read."""
    try:
        with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as content:
            return (
                content.read(_FIRST_BYTES)
                .partition(b"\n")[0]
                .decode("utf-8", "replace")
                .rstrip("\r")
            )
    except (OSError, EOFError, zlib.error):
        return ""


def _options(line: str) -> dict[str, str]:
    """Return the arguments of `read_csv` for a file with this first line."""
    delimiter = "\t" if "\t" in line else max(",;|", key=line.count)
    names = [name.strip('"') for name in line.split(delimiter)]
    without_gaps = all(names[1:]) and len(set(names)) == len(names)
    named = any(not _is_number(name) for name in names) and not any(
        _is_number(name) for name in names
    )
    header = without_gaps and (named or names == [str(index) for index in range(len(names))])
    options = {}
    if delimiter != ",":
        options["parse_options"] = f"csv.ParseOptions(delimiter={delimiter!r})"
    if line and not header:
        options["read_options"] = "csv.ReadOptions(autogenerate_column_names=True)"
    return options


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
