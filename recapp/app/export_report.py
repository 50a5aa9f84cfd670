"""The report of an export: bytes of each table before and after, and metrics of each width on the
validation rows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from recapp import console
from recapp.inference.choose_storage import NE, storage_of
from recapp.inference.probe import Measured, Probe
from recapp.inference.storage import QUANTIZE, row_bytes
from recapp.tables.config import DataType, EmbeddingConfig

TABLE_COLUMNS = (
    console.Column("table", "table"),
    console.Column("rows", "rows", ","),
    console.Column("dim", "dim"),
    console.Column("trained", "trained"),
    console.Column("bytes_before", "MB", ",.2f", 1e6),
    console.Column("stored", "stored"),
    console.Column("bytes_after", "MB", ",.2f", 1e6),
)
WIDTH_COLUMNS = (
    console.Column("quantize", "quantize"),
    console.Column("bytes", "tables,\nMB", ",.1f", 1e6),
    console.Column("auc", "AUC", ".5f"),
    console.Column("log_loss", "log loss", ".6f"),
    console.Column(NE, "normalized\nentropy", ".6f"),
    console.Column("ne_change", "change\nof it", "+.6f"),
    console.Column("largest_change", "largest change\nof a probability", ".6f"),
)
EXPORTED = "exported"


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
        made.append({"quantize": name, "bytes": size, **_said(found, before)})
    return made


def _said(found: Measured, before: Measured) -> dict[str, Any]:
    """Return metrics and changes; numbers that JSON cannot hold become None."""
    said = {
        **found.metrics,
        "ne_change": found.metrics[NE] - before.metrics[NE],
        "largest_change": found.largest_change(before),
    }
    return {name: x if math.isfinite(x) else None for name, x in said.items()}


def print_report(report: Mapping[str, Any]) -> None:
    """Print the report of an export as tables."""
    console.print_table(report["tables"], TABLE_COLUMNS, title="Tables")
    before = sum(t["bytes_before"] for t in report["tables"])
    after = sum(t["bytes_after"] for t in report["tables"])
    print(f"\nall tables: {before / 1e6:,.1f} MB trained, {after / 1e6:,.1f} MB stored\n")
    if report["widths"]:
        title = f"On {report['validation_rows']:,} validation rows"
        console.print_table(report["widths"], WIDTH_COLUMNS, title=title)
        print()
