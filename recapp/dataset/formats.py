"""Choose the format of a file by its path, or by its first bytes. No other file chooses a reader.

parquet.py          Parquet
delimited_text.py   CSV, TSV and the like, plain or compressed by gzip, bz2 or zstd
json_lines.py       JSON lines, plain or compressed
arrow_files.py      Arrow's IPC files and streams, and Feather
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from recapp.dataset.arrow_files import Arrow
from recapp.dataset.data_file import Format
from recapp.dataset.data_settings import FileRules
from recapp.dataset.delimited_text import DelimitedText
from recapp.dataset.file_bytes import begin_of
from recapp.dataset.json_lines import JsonLines
from recapp.dataset.parquet import Parquet
from recapp.errors import ConfigError
from recapp.settings.records import TARGET, Constructor, find_constructor
from recapp.settings.values import check_arguments

COMPRESSED = (".gz", ".bz2", ".zst")
# suffixes that tell no format: none, numbers (part.0, part-0.c000) and names of compressions
_NO_FORMAT = re.compile(r"(\.[^a-z]*|\.c[0-9]+|\.(snappy|gz|gzip|zstd?|lz4|lzo|br|brotli))?")


class Formats(NamedTuple):
    """The formats of files.

    Args:
        known: The known formats. A file that none of them knows is read in the first one.
        only: The format of all files; None finds it out for each file.
    """

    known: tuple[Format, ...]
    only: Format | None = None

    def of(self, path: str) -> Format:
        """Return the format of a file: by the suffix of its name, else by its first bytes."""
        return self.only or self._by_suffix(path) or self._by_bytes(path) or self.known[0]

    def is_data(self, path: str) -> bool:
        """Return whether a file is in a known format, by its suffix; or by its first bytes, if its
        suffix tells no format.
        """
        no_format = _NO_FORMAT.fullmatch(Path(path).suffix.lower()) is not None
        return bool(self.only or self._by_suffix(path) or (no_format and self._by_bytes(path)))

    def in_directory(self, names: Iterable[str]) -> "Formats":
        """Return the formats of the files of a directory: where a suffix tells the only format of
        some, a file with a suffix of its own, such as a README.md, is in another one.
        """
        named = self.only and any(Formats((self.only,))._by_suffix(name) for name in names)
        return Formats((self.only,)) if self.only and named else self

    def _by_suffix(self, path: str) -> Format | None:
        plain = Path(path)
        plain = plain.with_suffix("") if plain.suffix.lower() in COMPRESSED else plain
        suffix = plain.suffix.lower()
        return next((format for format in self.known if suffix in format.suffixes), None)

    def _by_bytes(self, path: str) -> Format | None:
        begin, _ = begin_of(path)
        return next((format for format in self.known if format.knows(begin)), None)


def formats_of(rules: FileRules) -> Formats:
    """Return the formats of files that are read by some rules.

    Raises:
        ConfigError: The class of a format does not exist, or is none.
    """
    text = rules.text
    times = tuple((text.times or {}).items())
    delimited = DelimitedText(
        delimiter=text.delimiter,
        header=text.header,
        columns=text.columns,
        quote="" if text.quote == "none" else text.quote,
        encoding=text.encoding,
        bad_rows=rules.bad_rows,
        times=times,
    )
    named: dict[str, Format] = {
        "parquet": Parquet(),
        "csv": delimited,
        "json_lines": JsonLines(encoding=text.encoding, bad_rows=rules.bad_rows, times=times),
        "arrow": Arrow(),
    }
    known = tuple(named.values())
    if isinstance(rules.format, Constructor):
        return Formats(known, _own_format(rules.format))
    tabs = replace(delimited, delimiter=delimited.delimiter or "\t")
    return Formats(known, (named | {"tsv": tabs}).get(rules.format or ""))


def _own_format(settings: Constructor) -> Format:
    setting = "dataset.format"
    kind = find_constructor(settings.target, setting)
    if not isinstance(kind, type) or not issubclass(kind, Format):
        raise ConfigError(
            f"{setting}.{TARGET}={settings.target}: must be a class derived from "
            "recapp.dataset.data_file.Format"
        )
    check_arguments(kind, settings.arguments, setting)
    return kind(**settings.arguments)


FORMATS = formats_of(FileRules())
FORMAT_NAMES = ", ".join(each.name for each in FORMATS.known[:-1]) + f" or {FORMATS.known[-1].name}"
SUFFIXES = ", ".join(suffix for format in FORMATS.known for suffix in format.suffixes)
