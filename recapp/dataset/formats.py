"""Choose the format of a file by its path, or by its first bytes. No other file chooses a reader.

parquet.py          Parquet
delimited_text.py   CSV, TSV and the like, plain or compressed by gzip, bz2 or zstd
json_lines.py       JSON lines, plain or compressed
arrow_files.py      Arrow's IPC files and streams, and Feather
"""

import re
from pathlib import Path

from recapp.dataset.arrow_files import Arrow
from recapp.dataset.data_file import Format
from recapp.dataset.delimited_text import DelimitedText
from recapp.dataset.file_bytes import begin_of
from recapp.dataset.json_lines import JsonLines
from recapp.dataset.parquet import Parquet

# The known formats. A file that none of them knows is read in the first format.
FORMATS: tuple[Format, ...] = (Parquet(), DelimitedText(), JsonLines(), Arrow())
FORMAT_NAMES = ", ".join(format.name for format in FORMATS[:-1]) + f" or {FORMATS[-1].name}"
SUFFIXES = ", ".join(suffix for format in FORMATS for suffix in format.suffixes)

COMPRESSED = (".gz", ".bz2", ".zst")
# suffixes that tell no format: none, numbers (part.0, part-0.c000) and names of compressions
_NO_FORMAT = re.compile(r"(\.[^a-z]*|\.c[0-9]+|\.(snappy|gz|gzip|zstd?|lz4|lzo|br|brotli))?")


def format_of(path: str) -> Format:
    """Return the format of a file: by the suffix of its name, else by its first bytes."""
    return _known(path) or _by_bytes(path) or FORMATS[0]


def is_data(path: str) -> bool:
    """Return whether a file is in a known format, by its suffix; or by its first bytes, if its
    suffix tells no format.
    """
    no_format = _NO_FORMAT.fullmatch(Path(path).suffix.lower()) is not None
    return bool(_known(path) or (no_format and _by_bytes(path)))


def _known(path: str) -> Format | None:
    plain = Path(path).with_suffix("") if Path(path).suffix.lower() in COMPRESSED else Path(path)
    suffix = plain.suffix.lower()
    return next((format for format in FORMATS if suffix in format.suffixes), None)


def _by_bytes(path: str) -> Format | None:
    begin, _ = begin_of(path)
    return next((format for format in FORMATS if format.knows(begin)), None)
