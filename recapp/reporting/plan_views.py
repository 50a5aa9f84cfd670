"""A plan as text, tables and sentences for a terminal of 80 columns; as pictures of its tables with
the ranks that hold them, of each rank's memory and time, and of the bytes between ranks; and as a
page of both.

    PlanReport -> text; PlanReport -> Pictures -> SVG, HTML

The pictures work for two ranks and for a thousand, for one table and for thousands of tables, of
which they show those with the most rows.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any

from recapp.console import Column, byte_unit, print_table, readable, size
from recapp.reporting import drawing, page
from recapp.reporting.drawing import INK, QUIET, Picture, sheet
from recapp.reporting.phases import PHASES
from recapp.reporting.plan_report import ranks_text
from recapp.reporting.run_record import KINDS, PlannedTable, PlanReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_TABLES = 60  # the most tables in a list and in a picture; JSON and the page's list have all
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
    *(Column(key, f"{key}\nMB", ",.1f", 1e6) for key in (*KINDS, "capacity")),
    Column("predicted_ms", "ms", ".2f"),
]
LINEAR_UP_TO = 8  # the scale is linear if the longest side is at most 8 times the shortest
REPLICATED = "#e6e6e6"
HATCH = "#8c8c8c"
WIDTH = 12.0  # inches, of a picture as wide as the page
SHELF = 9  # tables side by side
LEFT = 0.15  # inches left of them
TEXT = 0.64  # inches, of the text below a table
MOST_TICKS = 16  # of ranks
FEW_RANKS = 4  # up to this number of ranks, a picture of few tables is as narrow as the tables
MANY_SHARDS = 4000  # more shards are drawn as pixels in the SVG: as shapes they would be megabytes


# left, bottom, width and height of a rectangle, in inches
Box = tuple[float, float, float, float]


def print_plan(report: PlanReport) -> None:
    """Print a plan: its step, tables, runner-ups, ranks and traffic."""
    for sentence in _sentences(report):
        _print_wrapped(sentence)
    for title, rows, columns in _tables(report):
        more = f" (the first {MOST_TABLES} of {len(rows):,}; format=json has all)"
        print()
        shown = f"{title}{more if len(rows) > MOST_TABLES else ''}"
        print_table(rows[:MOST_TABLES], columns, title=shown)
    print()
    _print_wrapped(_traffic(report))


def _tables(
    report: PlanReport,
) -> Iterator[tuple[str, Sequence[Mapping[str, Any]], Sequence[Column]]]:
    """Yield title, lines and columns of each table about a plan."""
    rows = [_line(row, report.world_size) for row in report.rows]
    yield "Tables", rows, TABLE
    if report.uses:
        # without columns that no record has
        columns = [column for column in USES if any(column.key in use for use in report.uses)]
        yield "Lookups and rules", report.uses, columns
    yield "Milliseconds by phase, each table as if it were alone", rows, TIMES
    if any(row["why"] for row in rows):
        yield "Reasons", rows, WHY
    yield "Ranks", [*map(vars, report.ranks)], RANK


def _print_wrapped(text: str) -> None:
    print(fill(readable(text), get_terminal_size((80, 24)).columns))


def _sentences(report: PlanReport) -> Iterator[str]:
    hosts = f" of {len(report.hosts)} hosts" if len(report.hosts) > 1 else ""
    bound = ""
    if report.lower_bound_ms:
        over = report.step_ms / report.lower_bound_ms - 1
        above = f", at most {over:.1%} above the least possible"
        bound = above if over > 5e-4 else ", the least possible"
    yield (
        f"plan {report.name} on {_count(report.world_size, 'rank')}{hosts} ({report.hardware}), "
        f"{report.batch_per_rank:,} samples a rank: step {report.step_ms:.2f} ms predicted{bound}"
    )
    uses = ", ".join(f"{name} {size(n)}" for name, n in report.reserve.items() if n)
    named = f": {uses}" if len(report.reserve) > 1 else ""
    total = size(sum(rank.bytes for rank in report.ranks))
    yield (
        f"{_count(len(report.rows), 'table')} ({_types(report)}): "
        f"{total} on all ranks, {size(report.sent_bytes)} between them in a step"
    )
    yield f"tables leave {size(sum(report.reserve.values()))} free on each rank{named}"
    bytes_W, ms_W = ([getattr(r, key) for r in report.ranks] for key in ("bytes", "predicted_ms"))
    yield (
        f"memory: the fullest rank has {_over_mean(bytes_W)}; time: the slowest rank takes "
        f"{_over_mean(ms_W)}"
    )
    yield from (f"note: {note}" for note in report.notes)


def _types(report: PlanReport) -> str:
    types = Counter(row.type for row in report.rows).most_common()
    return ", ".join(f"{n} {kind}" for kind, n in types)


def _line(row: PlannedTable, world: int) -> dict[str, Any]:
    mode = [] if row.mode in ("unique", "replicated") else [row.mode]
    mixed = ["mixed rows"] if row.row_order == "mixed" else []
    return vars(row) | {
        "size": f"{'~' * row.dynamic}{row.rows:,} x {row.dim}",
        "type": " ".join([row.type, *mode, *mixed]),
        "on": ranks_text(row.ranks, world),
    }


def _traffic(report: PlanReport) -> str:
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
    ]
    return page.write_page(path, f"Sharding plan {report.name}", parts)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


# ---- pictures


def plan_pictures(report: PlanReport) -> list[Picture]:
    """Return the pictures of a plan, in the order in which a page shows them: `plan_tables`,
    `plan_ranks` and, if ranks send any bytes, `plan_traffic`.
    """
    drawn = [tables_picture(report), ranks_picture(report)]
    return [*drawn, traffic_picture(report)] if report.between_ranks else drawn


# ---- tables


def tables_picture(report: PlanReport) -> Picture:
    """Draw every table as a rectangle of rows by columns.

    The shards lie inside the rectangle as they lie in the table, in the colours of their ranks.
    """
    every = sorted(report.rows, key=lambda row: (-row.rows, -row.dim, row.table))
    rows = every[:MOST_TABLES]
    longest = rows[0]
    high_of, tall = _scale([row.rows for row in rows], 1.4)
    wide_of, broad = _scale([row.dim for row in rows], 1.0)
    shelves = [rows[i : i + SHELF] for i in range(0, len(rows), SHELF)]
    heights = [high_of(shelf[0].rows) + TEXT for shelf in shelves]
    floor = sum(heights)
    colors = drawing.rank_colors(report.world_size)
    step = (WIDTH - LEFT - 0.1) / SHELF
    few = len(colors) <= FEW_RANKS  # the legend is narrow enough
    width = max(drawing.COLUMN, LEFT + step * len(shelves[0]) + 0.1) if few else WIDTH
    with sheet(width, floor + 0.55, rows=0) as s:
        axes = s.axes[0]
        tables: list[tuple[PlannedTable, Box]] = []
        _ranks_legend(s, colors, floor + 0.25)
        for shelf, high in zip(shelves, heights, strict=True):
            floor -= high
            for i, row in enumerate(shelf):
                left = LEFT + i * step
                box = (left, floor + TEXT, wide_of(row.dim), high_of(row.rows))
                tables.append((row, box))
                _name(axes, row, left, floor + TEXT - 0.05)
        _draw_shards(axes, tables, colors)
        more = f" Of {len(every):,} tables these are the {MOST_TABLES} with the most rows."
        return s.finish(
            "plan_tables",
            "Tables and their shards",
            f"{len(every)} tables as rectangles; the longest is {longest.table} with "
            f"{longest.rows:,} rows; {_types(report)}.",
            f"A rectangle is a table: height is its rows ({tall}), width its columns ({broad}). "
            "Inside, shards lie as they do in the table and with their true shares, coloured by "
            "the rank that holds them; hatched tables are held by all ranks."
            f"{more if len(every) > MOST_TABLES else ''}",
        )


def _scale(lengths: Sequence[int], longest: float) -> tuple[Callable[[int], float], str]:
    """Return a function from lengths to inches, and the name of its scale.

    The scale is linear, or logarithmic if lengths differ by more than a factor of `LINEAR_UP_TO`.

    Args:
        lengths: The lengths to draw: rows or columns of tables.
        longest: The inches of the longest length.
    """
    most = max(lengths)
    if most <= LINEAR_UP_TO * min(lengths):
        return lambda n: longest * n / most, "linear scale"
    return lambda n: longest * math.log(1 + n) / math.log(1 + most), "log scale"


def _draw_shards(
    axes: "Axes",
    tables: Sequence[tuple[PlannedTable, Box]],
    colors: Sequence[str],
) -> None:
    """Draw the shards of all tables, with the numbers of their ranks where there is room; a table's
    first rows are at the top.

    Thin shards have no white line around them, because the line would cover them.

    Args:
        axes: Axes whose units are inches.
        tables: The tables, each with its rectangle.
        colors: The colour of each rank.
    """
    from matplotlib.collections import PolyCollection

    frames = [box for _, box in tables]
    everywhere = [box for row, box in tables if row.mode == "replicated" and len(row.ranks) > 1]
    shards = [
        (
            rank,
            (
                x + wide * c0 / row.dim,
                y + high * (1 - r1 / row.plan_rows),
                wide * (c1 - c0) / row.dim,
                high * (r1 - r0) / row.plan_rows,
            ),
        )
        for row, (x, y, wide, high) in tables
        if row.mode != "replicated" or len(row.ranks) == 1
        for rank, r0, r1, c0, c1 in row.shards
        if r1 > r0 and c1 > c0
    ]
    thin = [shard for shard in shards if min(shard[1][2:]) < 0.06]
    thick = [shard for shard in shards if min(shard[1][2:]) >= 0.06]
    lines: Any = {"edgecolors": "white", "linewidths": 0.5}
    for some, edges in (thin, {"linewidths": 0, "antialiaseds": False}), (thick, lines):
        style: Any = {"facecolors": [colors[rank] for rank, _ in some], **edges}
        corners = _corners([box for _, box in some])
        many = len(shards) > MANY_SHARDS
        axes.add_collection(PolyCollection(corners, rasterized=many, **style))
    hatched: Any = {"facecolors": REPLICATED, "edgecolors": HATCH, "linewidths": 0, "hatch": "////"}
    axes.add_collection(PolyCollection(_corners(everywhere), **hatched))
    frame: Any = {"facecolors": "none", "edgecolors": QUIET, "linewidths": 0.4}
    axes.add_collection(PolyCollection(_corners(frames), **frame))
    for rank, (x, y, wide, high) in shards:
        if high > 0.13 and wide > 0.09 * len(str(rank)) + 0.04:
            middle: Any = {"ha": "center", "va": "center_baseline", "fontsize": 7}
            ink = drawing.ink_on(colors[rank])
            axes.text(x + wide / 2, y + high / 2, str(rank), color=ink, **middle)


def _corners(boxes: Sequence[Box]) -> list[list[tuple[float, float]]]:
    return [
        [(x, y), (x + wide, y), (x + wide, y + high), (x, y + high)] for x, y, wide, high in boxes
    ]


def _name(axes: "Axes", row: PlannedTable, x: float, y: float) -> None:
    # the middle of a long name is cut, because ends differ most
    name = row.table if len(row.table) <= 17 else f"{row.table[:11]}…{row.table[-5:]}"
    axes.text(x, y, name, fontsize=8, weight="bold", va="top")
    text = f"{row.rows:,} x {row.dim}\n{row.type}"
    style: dict[str, Any] = {"fontsize": 7.5, "va": "top", "color": INK, "linespacing": 1.3}
    axes.text(x, y - 0.155, text, **style)


# ---- ranks


def ranks_picture(report: PlanReport) -> Picture:
    """Draw memory and predicted time of each rank as stacked bars."""
    ranks = report.ranks
    positions = [rank.rank for rank in ranks]
    with sheet(min(WIDTH, 7.6 + 0.2 * len(ranks)), 6.2, rows=2) as s:
        memory, spent = s.axes
        kinds = {
            name: [getattr(rank, kind) for rank in ranks]
            for kind, name in zip(KINDS, drawing.MEMORY_COLORS, strict=True)
        }
        total_bytes = drawing.stacked(memory, positions, kinds, drawing.MEMORY_COLORS)
        capacity = [rank.capacity for rank in ranks if rank.capacity is not None]
        if len(capacity) == len(ranks):
            memory.hlines(
                capacity,
                [p - 0.45 for p in positions],
                [p + 0.45 for p in positions],
                color=INK,
                linewidth=1.2,
                label="capacity",
            )
        drawing.byte_axis(memory.yaxis)
        memory.set(
            title=f"Memory: fullest rank {size(max(total_bytes))}, {_over_mean(total_bytes)}",
            ylabel="bytes",
        )
        phases: dict[str, Sequence[float]] = {
            phase: [rank.ms(phase) for rank in ranks] for phase in PHASES
        }
        times = drawing.stacked(spent, positions, phases, drawing.PHASE_COLORS)
        spent.axhline(
            report.step_ms, color=INK, linewidth=1, linestyle="--", label="step, predicted"
        )
        if report.lower_bound_ms is not None:
            spent.axhline(
                report.lower_bound_ms,
                color=INK,
                linewidth=1,
                linestyle=":",
                label="no plan can be faster",
            )
        spent.set(
            title=(
                f"Predicted time: step {report.step_ms:.3g} ms; slowest rank "
                f"{max(times):.3g} ms, {_over_mean(times)}"
            ),
            xlabel="rank",
            ylabel="ms per step",
        )
        for axes in s.axes:
            beside = max(0.0, (5 - len(ranks)) / 2)  # bars are at most as wide as for five ranks
            axes.set_xlim(-0.6 - beside, len(ranks) - 0.4 + beside)
            axes.set_xticks(range(0, len(ranks), -(-len(ranks) // MOST_TICKS)))
            axes.grid(True, axis="y")
            # beside the axes it covers no data, and lists the parts of a bar from top to bottom
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True, handlelength=1.2)
        return s.finish(
            "plan_ranks",
            "What each rank carries",
            f"Bars of {len(ranks)} ranks: the fullest holds {size(max(total_bytes))}, "
            f"{_over_mean(total_bytes)}; the slowest is busy for {max(times):.3g} ms "
            f"of a step, {_over_mean(times)}.",
            "Above, bytes of each rank; below, its milliseconds of a step by phase, as predicted.",
        )


def _ranks_legend(s: drawing.Sheet, colors: Sequence[str], y: float) -> None:
    """Draw the legend of the ranks' colours at the height `y`; of many ranks it names some."""
    from matplotlib.patches import Patch

    shown = range(0, len(colors), -(-len(colors) // len(drawing.SERIES_COLORS)))
    handles = [Patch(facecolor=colors[rank], label=f"rank {rank}") for rank in shown]
    if len(colors) > 1:
        everywhere: Any = {"facecolor": REPLICATED, "edgecolor": HATCH, "hatch": "////"}
        handles.append(Patch(label="all ranks", **everywhere))
    place: Any = {"loc": "center left", "bbox_to_anchor": (0.1, y + 0.08), "borderpad": 0}
    look: Any = {"ncols": 9, "handlelength": 1.6, "columnspacing": 1.2}
    axes = s.axes[0]
    axes.legend(handles=handles, bbox_transform=axes.transData, **place, **look)


def _over_mean(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    return f"{max(values) / mean:.2f} times the mean" if mean else "nothing"


# ---- traffic


def traffic_picture(report: PlanReport) -> Picture:
    """Draw the bytes that ranks send each other in a step as a matrix; pairs without traffic are
    white.
    """
    import numpy as np
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import EngFormatter

    world = report.world_size
    pairs = report.between_ranks
    sent_WW = np.full((world, world), np.nan)
    for pair in pairs:
        sent_WW[pair.source, pair.target] = pair.bytes
    least = float(np.nanmin(sent_WW))
    most = float(np.nanmax(sent_WW))
    total = float(np.nansum(sent_WW))
    side = min(9.0, 3.6 + 0.42 * world)
    with sheet(side + 1.6, side, rows=1) as s:
        axes = s.axes[0]
        norm = LogNorm(least, most) if most > 30 * least else Normalize(0, most)
        image = axes.imshow(sent_WW, cmap="cividis_r", norm=norm, interpolation="nearest")
        bar = s.figure.colorbar(image, ax=axes, format=EngFormatter("B"), shrink=0.8)
        bar.outline.set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(0, world, -(-world // MOST_TICKS)))
        scale, unit = byte_unit(most)
        spec = drawing.spec_of(pair.bytes / scale for pair in pairs)
        written = pairs if world <= 10 else []
        for pair in written:
            shade = image.cmap(image.norm(np.array(pair.bytes)))
            axes.text(
                pair.target,
                pair.source,
                format(pair.bytes / scale, spec),
                ha="center",
                va="center",
                fontsize=7.5,
                color=drawing.ink_on(shade),
            )
        cells = f", cells in {unit}" if written else ""
        axes.set(
            title=f"Bytes per step: {size(total)} in all{cells}",
            xlabel="to rank",
            ylabel="from rank",
        )
        return s.finish(
            "plan_traffic",
            "Bytes between ranks",
            f"A matrix of {world} by {world} ranks: {size(total)} travel in a step, "
            f"at most {size(most)} from one to one.",
            "Who sends how many bytes to whom in a step: ids and vectors forward, "
            "gradients backward; white is nothing.",
        )
