"""A plan as text: tables and sentences for a terminal of 80 columns, and a page with pictures. They
show the result of `recapp.reporting.plan_explanation.explained`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from recapp.console import Column, print_table, readable, size
from recapp.reporting import page
from recapp.reporting.phases import PHASES
from recapp.reporting.plan_figures import Explained, plan_pictures
from recapp.sharding.sharding_types import SHARDING_TYPES

BAR = "█"
BAR_WIDTH = 12  # characters of the longest bar
MATRIX_RANKS = 8  # the most ranks for which every pair is shown
MOST_TABLES = 60  # the most tables in a list; JSON and the page have all


def print_plan(explained: Explained) -> None:
    """Print a plan: its step, tables, runner-ups, ranks, traffic and sharding types.

    Args:
        explained: The plan, as `recapp.reporting.plan_explanation.explained` returns it.
    """
    _print_wrapped(_headline(explained))
    _print_wrapped(_left_free(explained["reserve"]))
    for note in explained["notes"]:
        _print_wrapped(f"note: {note}")
    rows = explained["rows"][:MOST_TABLES]
    more = (
        f" (the first {MOST_TABLES} of {len(explained['rows']):,}; format=json has all)"
        if len(explained["rows"]) > MOST_TABLES
        else ""
    )
    print()
    print_table(
        [_table_line(r, explained["world_size"]) for r in rows], _TABLE, title=f"Tables{more}"
    )
    if explained.get("uses"):
        print()
        uses = explained["uses"][:MOST_TABLES]
        print_table(uses, uses_columns(uses), title=f"Lookups and rules{more}")
    print()
    print_table(rows, _TIMES, title="Milliseconds by phase, each table as if it were alone")
    if any(r["runner_up"] or r["why"] for r in rows):
        print()
        print_table(
            [{"table": r["table"], "type": r["type"], "why": r["why"]} for r in rows],
            [
                Column("table", "table"),
                Column("type", "type"),
                Column("why", "why, and what the next best type would change"),
            ],
        )
    print()
    _print_ranks(explained)
    print()
    _print_traffic(explained)
    print()
    _print_types(explained)


USES = [
    Column("table", "table"),
    Column("lookups", "lookups"),
    Column("rule", "rule"),
    Column("rows", "rows"),
]

_TABLE = [
    Column("table", "table"),
    Column("size", "rows x dim"),
    Column("type", "type"),
    Column("ranks", "ranks"),
    Column("bytes", "bytes"),
    Column("predicted_ms", "ms", ".3f"),
]
_TIMES = [
    Column("table", "table"),
    *(Column(f"{p}_ms", p, ".3f") for p in PHASES if p != "dense"),
    Column("predicted_ms", "all", ".3f"),
]


def uses_columns(uses: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the columns of the table of lookups and rules, without columns that no record has."""
    return [column for column in USES if any(column.key in row for row in uses)]


def _print_wrapped(text: str, after: str = "") -> None:
    """Print a sentence, wrapped to the width of the terminal."""
    print(fill(readable(text), get_terminal_size((80, 24)).columns, subsequent_indent=after))


def _left_free(reserve: Mapping[str, int]) -> str:
    parts = ", ".join(f"{name} {size(n)}" for name, n in reserve.items() if n)
    named = f": {parts}" if len(reserve) > 1 else ""
    return f"tables leave {size(sum(reserve.values()))} free on each rank{named}"


def _headline(explained: Explained) -> str:
    world = explained["world_size"]
    hosts = len(explained["hosts"])
    said = (
        f"plan {explained['name']} on {world} "
        f"rank{'s' if world > 1 else ''}{f' of {hosts} hosts' if hosts > 1 else ''} "
        f"({explained['hardware']}), {explained['batch_per_rank']:,} samples a rank: step "
        f"{explained['step_ms']:.2f} ms predicted"
    )
    if explained["lower_bound_ms"]:
        gap = explained["step_ms"] / explained["lower_bound_ms"] - 1
        said += (
            f", at most {gap:.1%} above the least possible"
            if gap > 5e-4
            else ", the least possible"
        )
    return said


def _table_line(row: Mapping[str, Any], world: int) -> dict[str, Any]:
    kind = [row["type"]]
    if row["mode"] not in ("unique", "replicated"):
        kind.append(row["mode"])
    if row.get("row_order") == "mixed":  # records of early runs have no row order
        kind.append("mixed rows")
    return {
        **row,
        "size": f"{'~' * bool(row.get('dynamic'))}{row['rows']:,} x {row['dim']}",
        "type": " ".join(kind),
        "ranks": ranks_text(row["ranks"], world),
        "bytes": size(row["bytes"]),
    }


def ranks_text(ranks: Sequence[int], world: int) -> str:
    """Return ranks as text, with runs as ranges: `0,2-5`, or `all`."""
    return "all" if len(ranks) == world else ",".join(_runs(ranks))


def _runs(ranks: Sequence[int]) -> list[str]:
    """Return ranks as texts, each a rank or a range of successive ranks."""
    found = []
    for _, pairs in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        found.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return found


def _print_ranks(explained: Explained) -> None:
    ranks = explained["ranks"]
    most_bytes = max(r["bytes"] for r in ranks) or 1
    most_ms = max(r["predicted_ms"] for r in ranks) or 1
    shown = (
        ranks if len(ranks) <= MOST_TABLES else sorted(ranks, key=lambda r: -r["predicted_ms"])[:10]
    )
    lines = [
        {
            "rank": r["rank"],
            "bytes": size(r["bytes"]),
            "memory": BAR * max(1, round(BAR_WIDTH * r["bytes"] / most_bytes)),
            "ms": r["predicted_ms"],
            "time": BAR * max(1, round(BAR_WIDTH * r["predicted_ms"] / most_ms)),
        }
        for r in shown
    ]
    title = "Ranks" if shown is ranks else f"The ten slowest of {len(ranks):,} ranks"
    print_table(
        lines,
        [
            Column("rank", "rank"),
            Column("bytes", "bytes"),
            Column("memory", ""),
            Column("ms", "ms", ".2f"),
            Column("time", ""),
        ],
        title=title,
    )
    for text, key in (
        ("memory: the fullest rank has", "bytes"),
        ("time: the slowest rank takes", "predicted_ms"),
    ):
        values = [r[key] for r in ranks]
        if mean := sum(values) / len(values):
            print(f"{text} {max(values) / mean:.2f} times the mean")


def _print_traffic(explained: Explained) -> None:
    world = explained["world_size"]
    sent = {(b["source"], b["target"]): b["bytes"] for b in explained["between_ranks"]}
    if not sent:
        print("Nothing travels between ranks.")
    elif world <= MATRIX_RANKS:
        lines = [
            {
                "from": a,
                **{str(b): "-" if a == b else size(sent.get((a, b), 0)) for b in range(world)},
            }
            for a in range(world)
        ]
        print_table(
            lines,
            [Column("from", "from \\ to"), *(Column(str(b), str(b)) for b in range(world))],
            title="Bytes of a step",
        )
    else:
        out = Counter[int]()
        for (a, _), n in sent.items():
            out[a] += n
        _print_wrapped(
            f"A step sends {size(sum(out.values()))} between ranks, {size(max(out.values()))} "
            "from the busiest and "
            f"{size(min(out[a] for a in range(world)))} from the idlest; largest pair "
            f"{size(max(sent.values()))}."
        )


def _print_types(explained: Explained) -> None:
    counts = Counter(r["type"] for r in explained["rows"])
    for name, record in SHARDING_TYPES.items():
        if counts[name]:
            _print_wrapped(
                f"{counts[name]} x {name}: {record.description}. + {record.pros}. - {record.cons}.",
                "  ",
            )
    for other in sorted(counts.keys() - SHARDING_TYPES.keys()):
        print(f"{counts[other]} x {other}: rectangles that no named type makes")


# ---- two plans


def difference(a: Explained, b: Explained) -> list[dict[str, Any]]:
    """Return a record for each table that two plans shard differently: type, mode and ranks in each
    plan, and the change of the table's own time.
    """
    others = {r["table"]: r for r in b["rows"]}
    keys = ("type", "mode", "ranks", "bytes", "predicted_ms")
    return [
        {
            "table": mine["table"],
            **{f"a_{key}": mine[key] for key in keys},
            **{f"b_{key}": theirs[key] for key in keys},
            "change_ms": theirs["predicted_ms"] - mine["predicted_ms"],
        }
        for mine in a["rows"]
        if (theirs := others[mine["table"]])["shards"] != mine["shards"]
        or theirs["mode"] != mine["mode"]
    ]


def print_difference(a: Explained, b: Explained, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables that two plans shard differently, then phases and ranks side by side.

    Args:
        a: A plan, as `recapp.reporting.plan_explanation.explained` returns it.
        b: Another plan of the same tables.
        rows: The records of `difference` for these plans.
    """
    world = a["world_size"]
    _print_wrapped(
        f"a = {a['name']}: {a['step_ms']:.2f} ms; b = {b['name']}: {b['step_ms']:.2f} ms; "
        f"{len(rows)} of {len(a['rows'])} tables differ"
    )
    print()
    if rows:
        lines = [
            {
                **r,
                "a": f"{r['a_type']} {ranks_text(r['a_ranks'], world)}",
                "b": f"{r['b_type']} {ranks_text(r['b_ranks'], world)}",
            }
            for r in rows[:MOST_TABLES]
        ]
        print_table(
            lines,
            [
                Column("table", "table"),
                Column("a", "a"),
                Column("b", "b"),
                Column("a_predicted_ms", "a ms", ".3f"),
                Column("b_predicted_ms", "b ms", ".3f"),
                Column("change_ms", "b - a", "+.3f"),
            ],
        )
        print()
    phases = [
        {
            "phase": p,
            "a": max(r[f"{p}_ms"] for r in a["ranks"]),
            "b": max(r[f"{p}_ms"] for r in b["ranks"]),
        }
        for p in PHASES
    ]
    print_table(
        [
            {**r, "change": r["b"] - r["a"]}
            for r in [*phases, {"phase": "step", "a": a["step_ms"], "b": b["step_ms"]}]
        ],
        [
            Column("phase", "phase, ms"),
            Column("a", "a", ".3f"),
            Column("b", "b", ".3f"),
            Column("change", "b - a", "+.3f"),
        ],
    )
    fullest = [max(r["bytes"] for r in x["ranks"]) for x in (a, b)]
    sent = [sum(r["bytes"] for r in x["between_ranks"]) for x in (a, b)]
    print()
    _print_wrapped(
        f"fullest rank {size(fullest[0])} and {size(fullest[1])}; sent in a step "
        f"{size(sent[0])} and {size(sent[1])}"
    )


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
    uses = explained.get("uses") or []
    return page.write_page(
        path,
        f"Sharding plan {explained['name']}",
        [
            page.paragraph(_summary(explained)),
            page.figure(tables),
            page.columns([*map(page.figure, others), *alone], wide=True),
            page.heading("In numbers"),
            page.table(rows, TABLE, f"Tables: all {len(rows)}"),
            *(
                [page.table(uses, uses_columns(uses), f"Lookups and rules: all {len(uses)}")]
                if uses
                else []
            ),
            page.table(explained["ranks"], RANK, f"Ranks: all {explained['world_size']}"),
        ],
    )


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
    """Return ranks as text: `0, 3, 5`, `0-7` for neighbours, or `all` of several."""
    return "all" if len(ranks) == world > 1 else ", ".join(_runs(ranks))
