"""`recapp.data inspect`: read raw logs once, say what they hold, and write settings that train on
them.

    path -> files, columns, rows           no setting names a column yet
         -> facts of each column           one pass, bounded memory
         -> a table; OUT/NAME.html         facts, drift, the label over time
         -> OUT/dataset/NAME.yaml          recapp.train --config-dir OUT dataset=NAME
"""

import re
import shlex
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa

from recapp import console
from recapp.console import Column
from recapp.dataset.files import given_paths
from recapp.dataset.source import Source, arrow_chunks, open_raw
from recapp.errors import ConfigError
from recapp.logs.column_facts import PARTS, ColumnCounter, ColumnFacts
from recapp.logs.inspection_page import write_inspection
from recapp.logs.suggestion import Suggestion, as_yaml, suggest_settings
from recapp.run.recipe import Inspect
from recapp.settings.uris import is_uri
from recapp.settings.whole_file import write_whole

LETTERS = 24  # of a value in the table

COLUMNS = [
    Column("column", "column"),
    Column("use", "use", meaning="suggested for training; the file of settings says why"),
    Column("type", "type"),
    Column("missing_share", "miss-\ning", ".1%", meaning="nulls and empty texts"),
    Column("distinct", "distinct", meaning="values; ~ where estimated from a sample"),
    Column("most_frequent", "most frequent"),
    Column("top10_share", "top 10", ".0%", meaning="the share of the ten most frequent values"),
    Column("drift", "drift", ".2f", meaning="0 to 1: first against last tenth of the rows"),
    Column("new_share", "new", ".0%", meaning="of the last tenth, not in the first"),
]


def inspect(settings: Inspect) -> None:
    """Inspect raw logs: print their facts, and write a file of settings and a page.

    Raises:
        ConfigError: No path is given, or the settings cannot be written.
        DataError: The logs cannot be read.
    """
    if not settings.path:
        raise ConfigError("path must be given: python -m recapp.data inspect PATH")
    paths = settings.path
    source = open_raw(paths, settings.rules, setting="path")
    rows = source.rows if settings.rows is None else min(settings.rows, source.rows)
    columns = facts_of_columns(source.slice(0, rows))
    suggestion = suggest_settings(columns, source.types, settings.file_settings)
    records = [record_of(facts, suggestion) for facts in columns]
    name = settings.name or name_of(given_paths(paths)[0])
    head = [
        f"Suggested by recapp.data inspect on {date.today()}, by {rows:,} of {source.rows:,} rows.",
        "Uses of columns are guesses: change what is wrong.",
    ]
    absolute = [
        path if is_uri(path) else str(Path(path).expanduser().absolute())
        for path in given_paths(paths)
    ]
    text = as_yaml(absolute[0] if isinstance(paths, str) else absolute, suggestion, head)
    folder = Path(settings.out).expanduser()
    try:
        file = _write_settings(folder / "dataset" / f"{name}.yaml", text, settings.overwrite)
        page = write_inspection(folder / f"{name}.html", name, columns, records, suggestion, text)
    except OSError as error:
        raise ConfigError(
            f"out={settings.out}: {error.filename} cannot be written ({error.strerror})"
        ) from error
    command = shlex.join(
        ["python", "-m", "recapp.train", "--config-dir", str(folder), f"dataset={name}"]
    )
    command = " ".join([command, *suggestion.command])
    if settings.format == "json":
        console.emit_document(
            {
                "rows": records,
                "rows_read": rows,
                "rows_in_all": source.rows,
                "files": len(source.files),
                "dataset": suggestion.settings,
                "settings": str(file),
                "page": str(page),
                "train": command,
            }
        )
        return
    title = f"{len(source.files):,} file(s), {source.rows:,} rows" + (
        f", the first {rows:,} of which were read" if rows < source.rows else ""
    )
    shown = [
        record | {"distinct": ("~" if record["counted"] == "sample" else "") + f"{distinct:,}"}
        if (distinct := record["distinct"]) is not None
        else record
        for record in records
    ]
    console.emit(shown, "text", COLUMNS, title=title)
    print(f"\nsettings  {console.short_path(file)}\npage      {console.short_path(page)}")
    for remark in suggestion.notes:
        print(f"note: {remark}")
    print(f"\nTrain on it:\n    {command}")


def facts_of_columns(source: Source) -> list[ColumnFacts]:
    """Return the facts of all columns of some rows, in the order of the files' columns."""
    types = source.types
    counters = [ColumnCounter(name, types.field(name).type) for name in types.names]
    with console.progress("Rows", source.rows) as advance:
        for part, chunk in _parts(source):
            for counter in counters:
                counter.add(chunk.column(counter.name), part)
            advance(chunk.num_rows)
    return [counter.facts() for counter in counters]


def _parts(source: Source) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a source chunk by chunk, cut at the ends of the `PARTS` of the rows."""
    done = 0
    for _, _, chunk in arrow_chunks(source):
        while chunk.num_rows:
            part = done * PARTS // source.rows
            end = -(-(part + 1) * source.rows // PARTS)  # the first row behind this part
            taken = chunk.slice(0, end - done)
            yield part, taken
            chunk = chunk.slice(taken.num_rows)
            done += taken.num_rows


def record_of(facts: ColumnFacts, suggestion: Suggestion) -> dict[str, Any]:
    """Return the facts of a column as a record of plain values, with its suggested use."""
    use, reason = suggestion.uses[facts.name]
    least, low, middle, high, most = facts.numbers or (None,) * 5
    return {
        "column": facts.name,
        "use": use,
        "reason": reason,
        "type": str(facts.type),
        "rows": facts.rows,
        "missing": facts.missing,
        "missing_share": facts.missing / max(facts.rows, 1),
        "distinct": facts.distinct,
        "counted": facts.counted,
        "singles_share": facts.singles,
        "most_frequent": facts.top[0][0][:LETTERS] if facts.top else None,
        "top": [list(pair) for pair in facts.top],
        "top1_share": facts.tops[0],
        "top10_share": facts.tops[1],
        "top100_share": facts.tops[2],
        "drift": facts.drift,
        "new_share": facts.new,
        "least": least,
        "quartile1": low,
        "median": middle,
        "quartile3": high,
        "most": most,
        "means": list(facts.means) or None,
        "ids_per_row": facts.ids_per_row,
    }


def name_of(path: str) -> str:
    """Return the name of an option for a path: that of its file or directory, without suffixes."""
    plain = Path(re.split(r"[*?\[]", path)[0].rstrip("/"))
    stem = plain.name.partition(".")[0] or plain.parent.name
    return re.sub(r"\W+", "_", stem).strip("_") or "logs"


def _write_settings(file: Path, text: str, overwrite: bool) -> Path:
    """Write the file of settings; one with other content stays, unless it may be overwritten."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and not overwrite and _without_head(file.read_text()) != _without_head(text):
        raise ConfigError(
            f"{file} has other settings, perhaps changed by hand: set name=OTHER, or overwrite=true"
        )
    write_whole(file, text)
    return file


def _without_head(text: str) -> str:
    return text[text.find("defaults:") :]
