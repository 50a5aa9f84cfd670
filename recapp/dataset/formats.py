"""Choose the format of a file by its path. No other file chooses a reader."""

from pathlib import Path

from recapp.dataset.data_file import Format
from recapp.dataset.parquet import Parquet

FORMATS: tuple[Format, ...] = (Parquet(),)
"""The known formats. A file with another suffix is read in the first format."""

_FIRST_BYTES = 16


def format_of(path: str) -> Format:
    """Return the format of a file, by the suffix of its name."""
    return next((format for format in FORMATS if _suffix(path) in format.suffixes), FORMATS[0])


def is_data(path: str) -> bool:
    """Return whether the name of a file has the suffix of a known format."""
    return any(_suffix(path) in format.suffixes for format in FORMATS)


def begins_as_data(path: str | Path) -> bool:
    """Return whether the first bytes of a file are those of a known format."""
    try:
        with open(path, "rb") as file:
            first = file.read(_FIRST_BYTES)
    except OSError:
        return False
    return any(format.magic and first.startswith(format.magic) for format in FORMATS)


def format_names() -> str:
    """Return the names of the formats, for messages."""
    return " or ".join(format.name for format in FORMATS)


def all_suffixes() -> str:
    """Return the suffixes of all formats, for messages."""
    return ", ".join(suffix for format in FORMATS for suffix in format.suffixes)


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()
