"""The page of an inspection: facts of columns as a table and as pictures, and the suggested
settings.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from recapp.console import Column
from recapp.logs.column_facts import PARTS, ColumnFacts
from recapp.logs.suggestion import Suggestion
from recapp.reporting.drawing import (
    BAR,
    COLUMN,
    Picture,
    bars_with_whiskers,
    horizontal_bars,
    sheet,
)
from recapp.reporting.page import paragraph, part, table, write_page

MOST_BARS = 60  # of a picture; nobody reads more

_FACTS = [
    Column("column", "column"),
    Column("use", "suggested\nuse"),
    Column("reason", "why"),
    Column("type", "type"),
    Column("missing_share", "missing", ".1%"),
    Column("distinct", "distinct\nvalues"),
    Column("counted", "counted"),
    Column("singles_share", "occur\nonce", ".0%"),
    Column("most_frequent", "most\nfrequent"),
    Column("top1_share", "top 1", ".1%"),
    Column("top10_share", "top 10", ".1%"),
    Column("top100_share", "top 100", ".1%"),
    Column("ids_per_row", "ids\na row", ".3g"),
    Column("least", "least", ",.6g"),
    Column("median", "median", ",.6g"),
    Column("most", "largest", ",.6g"),
    Column("drift", "drift", ".2f"),
    Column("new_share", "new in\nlast tenth", ".1%"),
]


def write_inspection(
    path: Path,
    name: str,
    columns: Sequence[ColumnFacts],
    records: Sequence[Mapping[str, Any]],
    suggestion: Suggestion,
    settings: str,
) -> Path:
    """Write the page of an inspection, and return its file.

    Args:
        path: The file.
        name: The name of the data set.
        columns: The facts of its columns.
        records: The same as records of plain values.
        suggestion: The suggested uses.
        settings: The text of the suggested settings.
    """
    rows = columns[0].rows if columns else 0
    lead = f"{rows:,} rows, {len(columns):,} columns"
    parts = [
        paragraph(lead, "lead"),
        *(paragraph(f"{remark}.", "failed") for remark in suggestion.notes),
        *part("Columns", [_COUNTED], []),
        table(records, _FACTS),
        *part("Pictures", [], list(_pictures(columns, suggestion))),
        *part("Suggested settings", [_SETTINGS], []),
        f"<pre>{escape(settings)}</pre>",
    ]
    return write_page(path, f"Inspection of {name}", parts)


_COUNTED = (
    "Missing values are nulls and empty texts. Distinct values are counted exactly, or estimated "
    "from a sample of them where there are too many for memory (within about 1 %). Drift is the "
    "total variation between the first and the last tenth of the rows: 0 for the same "
    "distribution, 1 for values that have nothing in common; some of it is chance where rows are "
    "few."
)
_SETTINGS = "Uses of columns are guesses: change what is wrong before training."


def _pictures(columns: Sequence[ColumnFacts], suggestion: Suggestion) -> Iterator[Picture | str]:
    label = next((one for one in columns if suggestion.uses[one.name][0] == "label"), None)
    yield (
        _label_over_time(label) if label and label.means else "the label over time: no label found"
    )
    ids = [one for one in columns if suggestion.uses[one.name][0] in ("id", "list")]
    if ids:
        yield _bars(
            "top10",
            "How much the ten most frequent ids take",
            [(one.name, one.tops[1], f"{one.tops[1]:.0%}") for one in ids],
            "A long bar: few ids take most rows, so that their rows of a table train on many "
            "samples, and others on few.",
        )
        yield _bars(
            "distinct",
            "Distinct ids",
            [
                (one.name, math.log10(max(one.distinct or 1, 1)), f"{one.distinct or 0:,}")
                for one in ids
            ],
            "Lengths are powers of ten: 3 is a thousand ids. They decide the sizes of tables.",
        )
    drifting = sorted(
        ((one.name, one.drift, f"{one.drift:.2f}") for one in columns if one.drift is not None),
        key=lambda bar: -bar[1],
    )
    if drifting:
        yield _bars(
            "drift",
            "Drift from the first to the last tenth of the rows",
            drifting,
            "0: the same distribution; 1: nothing in common. Long bars on top: a model that "
            "memorises these columns forgets fast.",
        )
    missing = [
        (one.name, share, f"{share:.1%}")
        for one in columns
        if (share := one.missing / max(one.rows, 1)) > 0
    ]
    if missing:
        yield _bars(
            "missing", "Missing values", missing, "The share of rows with a null or an empty text."
        )


def _label_over_time(label: ColumnFacts) -> Picture:
    shares = [(index, mean) for index, mean in enumerate(label.means) if not math.isnan(mean)]
    with sheet(COLUMN, 2.4) as s:
        axes = s.axes[0]
        axes.plot([(n + 0.5) / PARTS for n, _ in shares], [m for _, m in shares], "o-", color=BAR)
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        axes.grid(True, axis="y")
        axes.set_xlabel("share of the rows, in file order")
        axes.set_ylabel(f"mean of {label.name}")
        least = min(m for _, m in shares)
        most = max(m for _, m in shares)
        return s.finish(
            "label",
            "The label over time",
            f"The mean of {label.name} in twentieths of the rows lies between {least:.3g} and "
            f"{most:.3g}.",
            "The mean of the label in each twentieth of the rows, in file order. A level that "
            "moves says that the last rows, which validate, are unlike the first.",
        )


def _bars(name: str, title: str, bars: Sequence[tuple[str, float, str]], caption: str) -> Picture:
    shown = bars[:MOST_BARS]
    if len(shown) < len(bars):
        caption = f"{caption} The first {len(shown)} of {len(bars)} columns."
    with horizontal_bars([one for one, _, _ in shown], [text for _, _, text in shown]) as s:
        bars_with_whiskers(s, [length for _, length, _ in shown])
        alt = ", ".join(f"{one} {text}" for one, _, text in shown[:10])
        return s.finish(name, title, f"{title}: {alt}.", caption)
