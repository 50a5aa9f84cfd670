"""The page of a plan: its predicted cost, its pictures, and the numbers of every table and rank."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recapp.console import Column
from recapp.reporting import page
from recapp.reporting.drawing import size
from recapp.reporting.phases import PHASES
from recapp.reporting.plan_figures import Explained, plan_pictures
from recapp.reporting.plan_tables import uses_columns

_PHASES = [Column(f"{phase}_ms", f"{phase}\nms", ".3f") for phase in PHASES]
TABLE = [
    Column("table", "table"),
    Column("rows", "rows"),
    Column("dim", "dim"),
    Column("type", "type"),
    Column("mode", "mode"),
    Column("ranks", "ranks"),
    Column("bytes", "MB", ",.1f", 1e6),
    Column("predicted_ms", "predicted\nms", ".3f"),
    *(
        column for column in _PHASES if column.key != "dense_ms"
    ),  # the dense phase belongs to no table
    Column("runner_up", "runner-up"),
    Column("runner_up_ms", "its\nms", ".3f"),
    Column("why", "why"),
]
RANK = [
    Column("rank", "rank"),
    Column("host", "host"),
    Column("bytes", "MB", ",.1f", 1e6),
    Column("weights", "weights\nMB", ",.1f", 1e6),
    Column("state", "state\nMB", ",.1f", 1e6),
    Column("buffers", "buffers\nMB", ",.1f", 1e6),
    Column("capacity", "capacity\nMB", ",.1f", 1e6),
    Column("predicted_ms", "predicted\nms", ".3f"),
    *_PHASES,
]


def plan_page(explained: Explained, path: Path) -> Path:
    """Write a plan as one self-contained HTML page.

    Args:
        explained: The plan as `recapp.reporting.plan_explanation.explained` returns it.
        path: The file of the page; its directory is made if it does not exist.

    Returns:
        The path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    travel = page.heading("Bytes between ranks") + page.paragraph("Nothing travels between ranks.")
    alone = [] if explained["between_ranks"] else [travel]
    tables, *others = plan_pictures(explained)
    rows = [
        {**row, "ranks": _ranks(row["ranks"], explained["world_size"])} for row in explained["rows"]
    ]
    return page.write_page(
        path,
        f"Sharding plan {explained['name']}",
        [
            page.paragraph(_summary(explained)),
            page.figure(tables),
            page.columns([*map(page.figure, others), *alone], wide=True),
            page.heading("In numbers"),
            page.table(rows, TABLE, f"Tables: all {len(rows)}"),
            *_uses(explained.get("uses") or []),
            page.table(explained["ranks"], RANK, f"Ranks: all {explained['world_size']}"),
        ],
    )


def _uses(uses: Sequence[Mapping[str, Any]]) -> list[str]:
    title = f"Lookups and rules: all {len(uses)}"
    return [page.table(list(uses), uses_columns(uses), title)] if uses else []


def _summary(explained: Explained) -> str:
    types = ", ".join(
        f"{n} {kind}" for kind, n in Counter(row["type"] for row in explained["rows"]).most_common()
    )
    held = sum(rank["bytes"] for rank in explained["ranks"])
    sent = sum(pair["bytes"] for pair in explained["between_ranks"])
    bound = explained.get("lower_bound_ms")
    near = (
        f", at most {100 * (explained['step_ms'] / bound - 1):.1f} % above the best possible"
        if bound
        else ""
    )
    world = explained["world_size"]
    hosts = len(explained["hosts"])
    return (
        f"{_count(len(explained['rows']), 'table')} ({types}) on {_count(world, 'rank')} of "
        f"{_count(hosts, 'host')}, {explained['batch_per_rank']:,} samples a rank. "
        f"Predicted step: {explained['step_ms']:.3g} ms{near}. "
        f"{size(held)} on all ranks, {size(sent)} between them per step."
    )


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _ranks(ranks: list[int], world: int) -> str:
    """Return ranks as text: `0, 3, 5`, `0-7` for neighbours, or `all`."""
    if len(ranks) == world > 1:
        return "all"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)
