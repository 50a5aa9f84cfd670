"""Output on the console: tables, one JSON document, notes, progress.

Standard output carries the result and nothing else: a table for people, or with `format=json` one
document for machines. Everything else (progress, notes, errors) goes to standard error, so that
`recapp ... format=json | jq` works.

On a terminal rich draws tables; elsewhere the same table is plain aligned text, 80 columns wide (or
`COLUMNS`). Functions import rich when they draw, because the import would slow `--help` down.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from recapp.errors import ConfigError

FORMATS = ("text", "json")
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
MANY_ROWS = 100  # of tables, that a command shows of a model; nobody reads thousands
# The interval between lines of progress without a terminal; users see that the process is alive.
SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Args:
        key: The key of the entry that the column shows.
        title: The heading; a newline in the heading makes a narrow column.
        spec: A format specification for numbers, such as `,.1f`.
        scale: The divisor of numbers, such as `1e6` for MB.
        meaning: The explanation of the heading for a line below the table; empty for none.
    """

    key: str
    title: str
    spec: str = ""
    scale: float = 1.0
    meaning: str = ""

    def show(self, value: Any) -> str:
        """Return `value` as the text of a cell; None becomes a dash."""
        if value is None:
            return "-"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return str(value)
        if self.scale != 1.0:
            value = value / self.scale
        return format(value, self.spec or ("," if isinstance(value, int) else ".4g"))


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return a column for each key of the rows, in the order of their first appearance."""
    return [
        Column(key, key.replace("_", " "))
        for key in dict.fromkeys(key for row in rows for key in row)
    ]


def print_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[Column] | None = None,
    *,
    title: str | None = None,
    most: int | None = None,
    rest: str = "",
) -> None:
    """Print rows on standard output as a table, with explanations of headings below. Numbers are
    right-aligned; long texts wrap.

    Args:
        rows: A record for each line.
        columns: The columns to show; by default one for each key.
        title: A line above the table.
        most: The number of rows to show; None shows all. A line below counts the others.
        rest: Where that line says that the others are.
    """
    hidden = 0 if most is None else max(0, len(rows) - most)
    rows = rows[: len(rows) - hidden]
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    pretty = console.is_terminal
    # Two spaces between columns, or one if the table is too wide; a box itself adds one.
    apart, close = ((0, 1, 0, 0), (0, 0)) if pretty else ((0, 1), (0, 1, 0, 0))
    table = Table(
        box=box.SIMPLE_HEAD if pretty else None,
        show_edge=False,
        pad_edge=False,
        padding=apart,
        header_style="bold",
    )
    for column in (shown_columns := columns_of(rows) if columns is None else columns):
        numbers = all(isinstance(row.get(column.key), int | float | None) for row in rows)
        table.add_column(
            Text(readable(column.title)),
            justify="right" if numbers else "left",
            no_wrap=numbers,
            overflow="fold",
            vertical="top",
        )
    for row in rows:
        table.add_row(
            *(Text(readable(column.show(row.get(column.key)))) for column in shown_columns)
        )
    if (
        Measurement.get(console, console.options.update(width=sys.maxsize), table).maximum
        > console.width
    ):
        table.padding = close  # narrower columns before texts wrap
    if title:
        console.print(Text(readable(title), style="bold"), soft_wrap=True)
    if pretty:
        console.print(table)
    else:
        with console.capture() as captured:
            console.print(table)
        for line in captured.get().splitlines():
            print(line.rstrip())
    if hidden:
        print(f"and {hidden:,} more{rest}")
    for line in meanings(shown_columns):
        print(line)


def meanings(columns: Sequence[Column]) -> list[str]:
    """Return a line for each heading that has an explanation, after an empty line."""
    by_title = {
        column.title.replace("-\n", "").replace("\n", " "): column.meaning
        for column in columns
        if column.meaning
    }
    width = max(map(len, by_title), default=0)
    return (
        ["", *(f"{title:{width}}  {meaning}" for title, meaning in by_title.items())]
        if by_title
        else []
    )


def emit(
    rows: Sequence[Mapping[str, Any]],
    format: str = "text",
    columns: Sequence[Column] | None = None,
    *,
    title: str | None = None,
) -> None:
    """Print the result of a command on standard output.

    Args:
        rows: A flat record for each line of the table.
        format: `text`, a table for people, or `json`: `{"rows": [...]}` with every key of every
            record.
        columns: The columns of the table, as for `print_table`; JSON has all keys.
        title: A line above the table; JSON has none.

    Raises:
        ConfigError: `format` is neither `text` nor `json`.
    """
    if format not in FORMATS:
        raise ConfigError(f"format={format}: choose one of {', '.join(FORMATS)}")
    if format == "json":
        emit_document({"rows": rows})
    else:
        print_table(rows, columns, title=title)
        sys.stdout.flush()


def emit_document(document: Mapping[str, Any]) -> None:
    """Print one JSON document, as the result of a command that has more than rows."""
    print(json.dumps(json_value(document), allow_nan=False), flush=True)


def json_value(value: Any) -> Any:
    """Return a value in types of JSON: without NaN, infinity, paths and numpy scalars."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return json_value(value.item()) if hasattr(value, "item") else str(value)


def short_path(path: str | Path) -> str:
    """Return a path relative to the working directory, or unchanged if that is shorter, or if it
    is a URI.
    """
    if "://" in str(path):
        return str(path)
    return min(str(path), os.path.relpath(path), key=len)


def tracebacks_wanted() -> bool:
    """Return whether the user asks for tracebacks by `RECAPP_TRACEBACK=1`."""
    return os.environ.get("RECAPP_TRACEBACK") == "1"


def stop_printing() -> None:
    """Discard all further output, because the reader of standard output has ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def byte_unit(most: float) -> tuple[float, str]:
    """Return the scale and the name of the unit for numbers of bytes up to `most`:
    `(1e6, "MB")`.
    """
    return next((unit for unit in BYTE_UNITS if abs(most) >= unit[0]), (1.0, "B"))


def size(n: float) -> str:
    """Return a number of bytes as text: `308.5 MB`; whole bytes below 1 kB."""
    scale, name = byte_unit(n)
    return f"{n / scale:.{0 if scale == 1 else 1}f} {name}"


def readable(text: str) -> str:
    """Return a text for a screen, with `?` in place of control characters.

    Names in a file may have such characters, which would move the cursor, change colours or hide
    other output. Line breaks and tabs stay.
    """
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def note(text: str) -> None:
    """Print a line about the progress of a command on standard error."""
    print(readable(text), file=sys.stderr, flush=True)


@cache
def note_once(text: str) -> None:
    """Print a note on standard error at the first call only; a script may repeat the same step."""
    note(text)


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of some work on standard error.

    A terminal shows a bar; other outputs get a line every few seconds.

    Args:
        title: The name of the work.
        total: The number of its steps.

    Yields:
        `advance(n)`, which the caller calls after n more steps.
    """
    if not sys.stderr.isatty():
        yield _progress_in_lines(title, total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(readable(title), total=total)

    def advance(steps: int) -> None:
        bar.start()  # at the first step, so that work without steps shows no bar
        bar.advance(task, steps)

    try:
        yield advance
    finally:
        bar.stop()


def _progress_in_lines(title: str, total: int) -> Callable[[int], None]:
    """Return an `advance` that prints a line every few seconds."""
    done = 0
    last_line = time.monotonic()

    def advance(steps: int) -> None:
        nonlocal done, last_line
        done += steps
        now = time.monotonic()
        if done >= total > done - steps or now - last_line >= SECONDS_BETWEEN_LINES:
            last_line = now
            note(f"{title}: {done:,} of {total:,}")

    return advance
