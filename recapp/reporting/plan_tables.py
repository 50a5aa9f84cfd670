"""A plan as text: tables and sentences for a terminal of 80 columns, and a page with pictures."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from recapp.console import Column, print_table, readable, size
from recapp.reporting import page
from recapp.reporting.phases import PHASES
from recapp.reporting.plan_figures import plan_pictures
from recapp.reporting.run_record import KINDS, PlannedTable, PlanReport

MOST_TABLES = 60  # the most tables in a list; JSON and the page have all
OF_TABLES = [phase for phase in PHASES if phase != "dense"]  # this phase belongs to no table
TABLE = [
    Column("table", "table"),
    Column("size", "rows x dim"),
    Column("type", "type"),
    Column("on", "ranks"),
    Column("bytes", "MB", ",.1f", 1e6),
    Column("predicted_ms", "ms", ".3f"),
]
WHY = [
    Column("table", "table"),
    Column("type", "type"),
    Column("why", "why, and what the next best type would change"),
]
TIMES = [
    Column("table", "table"),
    *(Column(f"{phase}_ms", phase, ".3f") for phase in OF_TABLES),
    Column("predicted_ms", "all", ".3f"),
]
USES = [
    Column("table", "table"),
    Column("lookups", "lookups"),
    Column("rule", "rule"),
    Column("rows", "rows"),
]
RANK = [
    Column("rank", "rank"),
    Column("host", "host"),
    *(Column(key, f"{key}\nMB", ",.1f", 1e6) for key in KINDS),
    Column("capacity", "capacity\nMB", ",.1f", 1e6),
    *(Column(f"{phase}_ms", f"{phase}\nms", ".3f") for phase in PHASES),
]


def print_plan(report: PlanReport) -> None:
    """Print a plan: its step, tables, runner-ups, ranks and traffic."""
    for sentence in _sentences(report):
        _print_wrapped(sentence)
    more = (
        f" (the first {MOST_TABLES} of {len(report.rows):,}; format=json has all)"
        if len(report.rows) > MOST_TABLES
        else ""
    )
    for title, rows, columns in _tables(report, MOST_TABLES):
        _print_table(rows, columns, f"{title}{more}")
    _print_ranks(report)
    print()
    _print_wrapped(_traffic(report))


def _tables(
    report: PlanReport, most: int | None = None
) -> Iterator[tuple[str, Sequence[Mapping[str, Any]], Sequence[Column]]]:
    """Yield title, lines and columns of each table about the plan's first `most` tables."""
    rows = [_line(row, report.world_size) for row in report.rows[:most]]
    yield "Tables", rows, TABLE
    if uses := report.uses[:most]:
        # without columns that no record has
        columns = [column for column in USES if any(column.key in use for use in uses)]
        yield "Lookups and rules", uses, columns
    yield "Milliseconds by phase, each table as if it were alone", rows, TIMES
    if any(row["why"] for row in rows):
        yield "Reasons", rows, WHY


def _print_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str | None = None
) -> None:
    print()
    print_table(rows, columns, title=title)


def _print_wrapped(text: str) -> None:
    print(fill(readable(text), get_terminal_size((80, 24)).columns))


def _sentences(report: PlanReport) -> Iterator[str]:
    """Yield what stands above the tables: the step, free memory, notes."""
    hosts = f" of {len(report.hosts)} hosts" if len(report.hosts) > 1 else ""
    bound = ""
    if report.over_bound is not None:
        least = ", the least possible"
        above = f", at most {report.over_bound:.1%} above the least possible"
        bound = above if report.over_bound > 5e-4 else least
    yield (
        f"plan {report.name} on {_count(report.world_size, 'rank')}{hosts} ({report.hardware}), "
        f"{report.batch_per_rank:,} samples a rank: step {report.step_ms:.2f} ms predicted{bound}"
    )
    uses = ", ".join(f"{name} {size(n)}" for name, n in report.reserve.items() if n)
    named = f": {uses}" if len(report.reserve) > 1 else ""
    total = size(sum(rank.bytes for rank in report.ranks))
    types = Counter(row.type for row in report.rows).most_common()
    yield (
        f"{_count(len(report.rows), 'table')} ({', '.join(f'{n} {kind}' for kind, n in types)}): "
        f"{total} on all ranks, {size(report.sent_bytes)} between them in a step"
    )
    yield f"tables leave {size(sum(report.reserve.values()))} free on each rank{named}"
    yield from (f"note: {note}" for note in report.notes)


def _line(row: PlannedTable, world: int) -> dict[str, Any]:
    """Return a table of the plan as a line of a printed table."""
    mode = [] if row.mode in ("unique", "replicated") else [row.mode]
    mixed = ["mixed rows"] if row.row_order == "mixed" else []
    return vars(row) | {
        "size": f"{'~' * row.dynamic}{row.rows:,} x {row.dim}",
        "type": " ".join([row.type, *mode, *mixed]),
        "on": ranks_text(row.ranks, world),
    }


def ranks_text(ranks: Sequence[int], world: int) -> str:
    """Return ranks as text, neighbours as ranges: `0,2-5`, or `all`."""
    if len(ranks) == world:
        return "all"
    texts = []
    for _, pairs in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        neighbours = [rank for _, rank in pairs]
        last = f"-{neighbours[-1]}" if len(neighbours) > 1 else ""
        texts.append(f"{neighbours[0]}{last}")
    return ",".join(texts)


def _print_ranks(report: PlanReport) -> None:
    """Print bytes and time of each rank, of many ranks only of the ten slowest."""
    ranks = report.ranks
    few = len(ranks) <= MOST_TABLES
    slowest = sorted(ranks, key=lambda rank: -rank.predicted_ms)
    title = "Ranks" if few else f"The ten slowest of {len(ranks):,} ranks"
    columns = [column for column in RANK if column.key in ("rank", "host", *KINDS, "capacity")]
    columns.append(Column("predicted_ms", "ms", ".2f"))
    _print_table([*map(vars, ranks if few else slowest[:10])], columns, title)
    for text, values in (
        ("memory: the fullest rank has", [rank.bytes for rank in ranks]),
        ("time: the slowest rank takes", [rank.predicted_ms for rank in ranks]),
    ):
        if mean := sum(values) / len(values):
            print(f"{text} {max(values) / mean:.2f} times the mean")


def _traffic(report: PlanReport) -> str:
    """Return what ranks send each other in a step as a sentence."""
    sent = [pair.bytes for pair in report.between_ranks]
    if not sent:
        return "Nothing travels between ranks."
    of_rank = Counter(dict.fromkeys(range(report.world_size), 0))
    for pair in report.between_ranks:
        of_rank[pair.source] += pair.bytes
    (_, most), *_, (_, least) = of_rank.most_common()
    return (
        f"A step sends {size(report.sent_bytes)} between ranks, {size(most)} from the busiest and "
        f"{size(least)} from the idlest; largest pair {size(max(sent))}."
    )


# ---- a page


def plan_page(report: PlanReport, path: Path) -> Path:
    """Write a plan as one self-contained HTML page, and return its path.

    Args:
        report: The plan.
        path: The file of the page; its directory is made if it does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tables, *others = plan_pictures(report)
    nothing = [] if report.between_ranks else [page.paragraph(_traffic(report))]
    parts = [
        *map(page.paragraph, _sentences(report)),
        page.figure(tables),
        page.columns([*map(page.figure, others)], wide=True),
        *nothing,
        page.heading("In numbers"),
        *(page.table(rows, columns, title) for title, rows, columns in _tables(report)),
        page.table([*map(vars, report.ranks)], RANK, f"Ranks: all {report.world_size}"),
    ]
    return page.write_page(path, f"Sharding plan {report.name}", parts)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
