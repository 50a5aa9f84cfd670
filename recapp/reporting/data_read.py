"""The rows that a run reads (`recapp/dataset/click_rows.py`), for the terminal and for reports.

Everything here reads the plain record, as `rows_read` of `metrics.json` has it.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from recapp.console import Column, print_table, readable

WIDTH = 80
LONGEST_NAME = 26
SPLITS = {"train": "train", "val": "validate", "test": "test", "input": "score"}


def print_rows_read(record: Mapping[str, Any]) -> None:
    """Print the files and rows of each split as a table, and lines of labels, times and what is
    left out below.
    """
    splits = record["splits"]
    files = [path for split in splits.values() for path in (split["first"], split["last"])]
    top = os.path.commonpath([Path(path).parent for path in files]) if files else ""
    rows = [
        {
            "what": SPLITS.get(name, name),
            "files": split["files"],
            "rows": split["rows"],
            **{f"share of {label}": share for label, share in split["positives"].items()},
            "first": _brief(os.path.relpath(split["first"], top)),
            "last": _brief(os.path.relpath(split["last"], top)) if split["files"] > 1 else "",
        }
        for name, split in splits.items()
    ]
    labels = dict.fromkeys(label for split in splits.values() for label in split["positives"])
    columns = [
        Column("what", "rows to"),
        Column("files", "files"),
        Column("rows", "rows"),
        *(Column(f"share of {label}", f"share of\n{label}", ".2%") for label in labels),
        Column("first", "first file"),
        Column("last", "last file"),
    ]
    print_table(rows, columns, title=f"Data in {top}")
    for name, text in _facts(record):
        line = f"{name.lower()}: {text}"
        for part in wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False):
            print(readable(part))


def _brief(name: str) -> str:
    """Return the begin and the end of a long name, such as those that Spark writes."""
    return name if len(name) <= LONGEST_NAME else f"{name[:10]}..{name[-14:]}"


def entries_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the record as texts by their name, for the foot of a page."""
    splits = record["splits"]
    files = [f"{files_of(split)} to {SPLITS.get(name, name)}" for name, split in splits.items()]
    shares = [
        f"{label} {share:.2%} of the rows to {SPLITS.get(name, name)}"
        for name, split in splits.items()
        for label, share in split["positives"].items()
    ]
    return {"Files": "; ".join(files), "Labels": ", ".join(shares), **dict(_facts(record))}


def files_of(split: Mapping[str, Any]) -> str:
    """Return the files of a split in words: `3 files, a.parquet to c.parquet`."""
    first, last = (Path(split[end]).name for end in ("first", "last"))
    return f"{split['files']:,} files, {first} to {last}" if split["files"] > 1 else first


def _facts(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the parts of a record that are no table, as a name and a text."""
    sampled = [
        f"{split['positives_of']:,} of the {split['rows']:,} rows to {SPLITS.get(name, name)}"
        for name, split in record["splits"].items()
        if split["positives"] and split["positives_of"] < split["rows"]
    ]
    if sampled:
        yield "Shares", f"counted on {', '.join(sampled)}, spread over all files"
    ends = [
        f"{name} {' to '.join(ends)} UTC" if ends else f"{name}: files do not tell"
        for name, ends in record["times"].items()
    ]
    if ends:
        yield "Times", ", ".join(ends)
    if out := left_out_of(record):
        yield "Left out", out


def left_out_of(record: Mapping[str, Any]) -> str:
    """Return what is left out in words: `hidden 2 (_SUCCESS, _metadata)`; empty for nothing."""
    return "; ".join(
        f"{one['why']} {one['count']:,} "
        f"({', '.join(one['names'])}{', ..' if one['count'] > len(one['names']) else ''})"
        for one in record["left_out"]
    )
