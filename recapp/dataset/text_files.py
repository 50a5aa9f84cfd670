"""CSV and TSV logs: recapp reads Parquet; here are the three lines of Python that convert them.

Every column stays text, from which recapp reads ids, numbers and labels. Types that pyarrow would
guess change ids: "007" becomes 7, and hexadecimal words that happen to be of digits alone become
other numbers.

Delimiter and header are judged by the first line. A header has no repeated name, none that is empty
(but the first, of an index that pandas wrote) and no numbers, unless they are the 0, 1, 2, .. that
pandas gives to columns without names. Without a header pyarrow calls the columns f0, f1, ..
"""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

TEXT_SUFFIXES = (".csv", ".tsv", ".gz")
_FIRST_BYTES = 65_536  # of a file, in which its first line is looked for


def conversion(files: Sequence[Path], given: str) -> tuple[list[str], str]:
    """The three lines that convert text files to Parquet beside them, and the path to name then.

    files: at least one, all alike. given: the setting's value: one file, a glob or the directory
    that holds them.
    """
    options, one = _options(_first_line(files[0])), len(files) == 1 and Path(given) == files[0]
    if one:
        names, name, written = "", repr(str(files[0])), str(files[0].with_suffix(".parquet"))
    else:
        names, name = f"{given}/*{files[0].suffix}" if Path(given).is_dir() else given, "name"
        written = (
            given if Path(given).is_dir() else f"{given.removesuffix(files[0].suffix)}.parquet"
        )
    columns = f"csv.open_csv({name}{options}).schema.names"
    text = f"csv.ConvertOptions(column_types=dict.fromkeys({columns}, 'string'))"
    rows = f"csv.read_csv({name}{options}, convert_options={'text' if one else text})"
    if one:
        lines = [
            "from pyarrow import csv, parquet",
            f"text = {text}",
            f"parquet.write_table({rows}, {written!r})",
        ]
    else:
        lines = [
            "from glob import glob; from pyarrow import csv, parquet",
            f"for name in glob({names!r}):",
            f"    parquet.write_table({rows}, name.rpartition('.')[0] + '.parquet')",
        ]
    return lines, written


def _first_line(file: Path) -> str:
    """The first line of a text file, compressed or not; nothing where there is none to be had."""
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
    """What pyarrow has to be told about a file with this first line, as further arguments of
    `read_csv`.
    """
    delimiter = "\t" if "\t" in line else ";" if line.count(";") > line.count(",") else ","
    names = [name.strip('"') for name in line.split(delimiter)]
    without_gaps = all(names[1:]) and len(set(names)) == len(names)
    named = any(not _is_number(name) for name in names) and not any(
        _is_number(name) for name in names
    )
    header = without_gaps and (named or names == [str(index) for index in range(len(names))])
    told = "" if delimiter == "," else f", parse_options=csv.ParseOptions(delimiter={delimiter!r})"
    return (
        told
        if header or not line
        else f"{told}, read_options=csv.ReadOptions(autogenerate_column_names=True)"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
