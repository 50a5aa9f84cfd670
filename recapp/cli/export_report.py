"""The report of an export: bytes of each table before and after, and metrics of each width on the
validation rows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from recapp import console
from recapp.inference.choose_storage import storage_of
from recapp.inference.probe import Measured, Probe
from recapp.inference.storage import QUANTIZE, row_bytes
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tasks.task import Task

TABLE_COLUMNS = (
    console.Column("table", "table"),
    console.Column("rows", "rows", ","),
    console.Column("dim", "dim"),
    console.Column("trained", "trained"),
    console.Column("bytes_before", "MB", ",.2f", 1e6),
    console.Column("stored", "stored"),
    console.Column("bytes_after", "MB", ",.2f", 1e6),
)
EXPORTED = "exported"
LONG_TITLE = 12  # letters
CHANGES = {"normalized_entropy": "ne_change"}
"""The names of the changes of metrics in a report; the others are `<metric>_change`."""


def table_rows(
    tables: Sequence[EmbeddingConfig], rows: Mapping[str, int], chosen: Mapping[str, DataType]
) -> list[dict[str, Any]]:
    """Return a record for each table.

    Args:
        tables: The tables, as they were trained.
        rows: The number of rows of each table.
        chosen: The storage type of each table.
    """
    made = []
    for t in tables:
        before = rows[t.name] * row_bytes(t.data_type, t.embedding_dim)
        after = rows[t.name] * row_bytes(chosen[t.name], t.embedding_dim)
        made.append(
            {
                "table": t.name,
                "rows": rows[t.name],
                "dim": t.embedding_dim,
                "trained": str(t.data_type),
                "bytes_before": before,
                "stored": str(chosen[t.name]),
                "bytes_after": after,
            }
        )
    return made


def width_rows(
    tables: Sequence[EmbeddingConfig],
    rows: Mapping[str, int],
    chosen: Mapping[str, DataType],
    probe: Probe,
) -> list[dict[str, Any]]:
    """Measure each width and the chosen storage, and return a record for each."""
    ways = {width: {t.name: storage_of(t, width) for t in tables} for width in QUANTIZE}
    ways[EXPORTED] = dict(chosen)
    before = probe.measure({})
    made = []
    for name, data_types in ways.items():
        size = sum(rows[t.name] * row_bytes(data_types[t.name], t.embedding_dim) for t in tables)
        try:
            found = probe.measure(data_types)
        except ValueError as error:
            console.note(f"quantize={name} is not measured: {error}")
            continue
        made.append({"quantize": name, "bytes": size, **_said(found, before, probe.task)})
    return made


def _said(found: Measured, before: Measured, task: Task) -> dict[str, Any]:
    """Return metrics and changes; numbers that JSON cannot hold become None."""
    last = task.storage_measures[-1].name
    said = {
        **found.metrics,
        change_of(last): found.metrics[last] - before.metrics[last],
        "largest_change": found.largest_change(before),
    }
    return {name: x if math.isfinite(x) else None for name, x in said.items()}


def change_of(metric: str) -> str:
    """Return the name of the change of a metric in a report."""
    return CHANGES.get(metric, f"{metric}_change")


def width_columns(task: Task) -> tuple[console.Column, ...]:
    """Return the columns of the table of widths: bytes, the metrics of a task, and changes."""
    measures = task.storage_measures
    return (
        console.Column("quantize", "quantize"),
        console.Column("bytes", "tables,\nMB", ",.1f", 1e6),
        *(
            console.Column(one.name, _title(one.title), ".5f" if one.better == "max" else ".6f")
            for one in measures
        ),
        console.Column(change_of(measures[-1].name), "change\nof it", "+.6f"),
        console.Column("largest_change", "largest change\nof a score", ".6f"),
    )


def _title(title: str) -> str:
    """Return the title of a metric, in two lines if it is long."""
    return title.replace(" ", "\n", 1) if len(title) > LONG_TITLE else title


def print_report(report: Mapping[str, Any], task: Task) -> None:
    """Print the report of an export as tables.

    Args:
        report: The report.
        task: The task of the model.
    """
    console.print_table(
        *(report["tables"], TABLE_COLUMNS),
        title="Tables",
        most=console.MANY_ROWS,
        rest=": report, tables in manifest.json",
    )
    before = sum(t["bytes_before"] for t in report["tables"])
    after = sum(t["bytes_after"] for t in report["tables"])
    print(f"\nall tables: {before / 1e6:,.1f} MB trained, {after / 1e6:,.1f} MB stored\n")
    if report["widths"]:
        title = f"On {report['validation_rows']:,} validation rows"
        console.print_table(report["widths"], width_columns(task), title=title)
        print()
