"""CSV and TSV logs: recapp reads Parquet; here are the three lines of Python that convert them.

Every column stays text, from which recapp reads ids, numbers and labels. Types that pyarrow would
guess change ids: "007" becomes 7, and hexadecimal words that happen to be of digits alone become
other numbers.

Delimiter and header are recognised by the first line. A header has no repeated name, no empty one
(but the first, of an index that pandas wrote) and no numbers, unless they are the 0, 1, 2, .. that
pandas gives to columns without names. Without a header pyarrow calls the columns f0, f1, ..
"""

import gzip
import zlib
from collections.abc import Sequence
from glob import glob
from pathlib import Path

TEXT_SUFFIXES = (".csv", ".tsv", ".gz")
_FIRST_BYTES = 65_536  # at the beginning of a file, in which its first line is sought


def conversion(files: Sequence[Path], pattern: str | None) -> list[str]:
    """Return the three lines that convert text files to Parquet beside them.

    Args:
        files: At least one file, all with the same suffix.
        pattern: A glob to show instead of their names, where it finds these files and no others;
            None for a file that was named itself.
    """
    options = _options(_first_line(files[0]))
    one = len(files) == 1 and pattern is None
    name = repr(str(files[0])) if one else "name"
    columns = f"csv.open_csv({name}{options}).schema.names"
    text = f"csv.ConvertOptions(column_types=dict.fromkeys({columns}, 'string'))"
    rows = f"csv.read_csv({name}{options}, convert_options={'text' if one else text})"
    if one:
        return [
            "from pyarrow import csv, parquet",
            f"text = {text}",
            f"parquet.write_table({rows}, {converted_name(files[0])!r})",
        ]
    exact = pattern is not None and {Path(found) for found in glob(pattern)} == set(files)
    names = f"glob({pattern!r})" if exact else repr([str(file) for file in files])
    return [
        f"{'from glob import glob; ' if exact else ''}from pyarrow import csv, parquet",
        f"for name in {names}:",
        f"    parquet.write_table({rows}, name.rpartition('.')[0] + '.parquet')",
    ]


def converted_name(file: Path) -> str:
    """Return the path of the Parquet file that is made of a text file."""
    return f"{str(file).rpartition('.')[0]}.parquet"


def _first_line(file: Path) -> str:
    """Return the first line of a text file, compressed or not; nothing where it cannot be read."""
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


def _options(line: str) -> str:
    """Return the arguments that `read_csv` needs for a file with this first line."""
    delimiter = "\t" if "\t" in line else ";" if line.count(";") > line.count(",") else ","
    names = [name.strip('"') for name in line.split(delimiter)]
    without_gaps = all(names[1:]) and len(set(names)) == len(names)
    named = any(not _is_number(name) for name in names) and not any(
        _is_number(name) for name in names
    )
    header = without_gaps and (named or names == [str(index) for index in range(len(names))])
    arguments = (
        "" if delimiter == "," else f", parse_options=csv.ParseOptions(delimiter={delimiter!r})"
    )
    return (
        arguments
        if header or not line
        else f"{arguments}, read_options=csv.ReadOptions(autogenerate_column_names=True)"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
