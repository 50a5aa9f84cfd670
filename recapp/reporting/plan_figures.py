"""Pictures of a plan: its tables and the ranks that hold them, memory and time of each rank, bytes
between ranks.

    PlanReport -> Pictures -> SVG

The pictures work for two ranks and for a thousand, for one table and for thousands of tables, of
which they show the longest.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recapp.console import byte_unit, size
from recapp.reporting import drawing
from recapp.reporting.drawing import INK, QUIET, Picture, sheet
from recapp.reporting.phases import PHASES
from recapp.reporting.run_record import PlannedTable, PlanReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINEAR_UP_TO = 8  # the scale is linear if the longest side is at most 8 times the shortest
REPLICATED = "#e6e6e6"
HATCH = "#8c8c8c"
WIDTH = 12.0  # inches, of a picture as wide as the page
MOST_TABLES = 60  # that a picture shows
SHELF = 9  # tables side by side
LEFT = 0.15  # inches left of them
TEXT = 0.64  # inches, of the text below a table
FEW_RANKS = 4  # up to this number of ranks, a picture of few tables is as narrow as the tables
MANY_SHARDS = 4000  # more shards are drawn as pixels in the SVG: as shapes they would be megabytes


Box = tuple[float, float, float, float]
"""Left, bottom, width and height of a rectangle, in inches."""


def draw_plan(report: PlanReport, folder: Path) -> list[Path]:
    """Draw a plan into a directory, which is made if it does not exist.

    Returns:
        The files: `plan_tables.svg`, `plan_ranks.svg` and, if ranks send any bytes,
        `plan_traffic.svg`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [picture.write(folder) for picture in plan_pictures(report)]


def plan_pictures(report: PlanReport) -> list[Picture]:
    """Return the pictures of a plan, in the order in which a page shows them."""
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
            f"{longest.rows:,} rows; {_counts(report)}.",
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
    axes.text(x, y, _cut(row.table, 17), fontsize=8, weight="bold", va="top")
    text = f"{_short(row.rows)} x {row.dim}\n{row.type}"
    style: dict[str, Any] = {"fontsize": 7.5, "va": "top", "color": INK, "linespacing": 1.3}
    axes.text(x, y - 0.155, text, **style)


def _cut(name: str, length: int) -> str:
    """Return a name of at most `length` letters: cut the middle, because ends differ most."""
    return name if len(name) <= length else f"{name[: length - 6]}…{name[-5:]}"


def _short(n: int) -> str:
    """Return a number of rows in about six characters: `41.3 M`."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= 10 * unit or (n >= unit and unit > 1e3):
            return f"{n / unit:,.1f} {name}" if n < 100 * unit else f"{n / unit:,.0f} {name}"
    return f"{n:,}"


def _ranks_legend(s: drawing.Sheet, colors: Sequence[str], y: float) -> None:
    """Draw the legend of the ranks' colours at the height `y`: one by one, or as a scale."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Patch

    axes = s.axes[0]
    everywhere = Patch(facecolor=REPLICATED, edgecolor=HATCH, hatch="////", label="all ranks")
    handles = [everywhere] if len(colors) > 1 else []
    left = 0.1
    if len(colors) <= len(drawing.SERIES_COLORS):
        ranks = [Patch(facecolor=color, label=f"rank {r}") for r, color in enumerate(colors)]
        handles = [*ranks, *handles]
    else:
        scale = ScalarMappable(Normalize(0, len(colors) - 1), ListedColormap(colors))
        room = axes.inset_axes((0.15, y, 5.0, 0.16), transform=axes.transData)
        bar = s.figure.colorbar(scale, cax=room, orientation="horizontal")
        bar.outline.set_visible(False)
        axes.text(5.25, y + 0.08, f"ranks 0 to {len(colors) - 1}", va="center_baseline")
        bar.set_ticks([])
        left = 6.4
    place: Any = {"loc": "center left", "bbox_to_anchor": (left, y + 0.08), "borderpad": 0}
    look: Any = {"ncols": 9, "handlelength": 1.6, "columnspacing": 1.2}
    axes.legend(handles=handles, bbox_transform=axes.transData, **place, **look)


def _counts(report: PlanReport) -> str:
    """Return the number of tables of each type, the most frequent first: `12 row_wise, 3
    table_wise`.
    """
    types = [row.type for row in report.rows]
    return ", ".join(
        f"{types.count(kind)} {kind}"
        for kind in sorted(set(types), key=lambda kind: (-types.count(kind), kind))
    )


# ---- ranks


def ranks_picture(report: PlanReport) -> Picture:
    """Draw memory and predicted time of each rank as stacked bars."""
    ranks = report.ranks
    positions = [rank.rank for rank in ranks]
    with sheet(min(WIDTH, 7.6 + 0.2 * len(ranks)), 6.2, rows=2) as s:
        memory, spent = s.axes
        kinds = {
            name: [getattr(rank, kind) for rank in ranks]
            for kind, name in drawing.MEMORY_NAMES.items()
        }
        colors = {name: drawing.MEMORY_COLORS[kind] for kind, name in drawing.MEMORY_NAMES.items()}
        total_bytes = drawing.stacked(memory, positions, kinds, colors)
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
            _by_rank(axes, report.hosts, len(ranks))
            # beside the axes it covers no data, and lists the parts of a bar from top to bottom
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True, handlelength=1.2)
        return s.finish(
            "plan_ranks",
            "What each rank carries",
            f"Bars of {len(ranks)} ranks: the fullest holds {size(max(total_bytes))}, "
            f"{_over_mean(total_bytes)}; the slowest is busy for {max(times):.3g} ms "
            f"of a step, {_over_mean(times)}.",
            "Above, bytes of each rank; below, its milliseconds of a step by phase, "
            "as predicted." + (" Grey lines part hosts." if len(report.hosts) > 1 else ""),
        )


def _over_mean(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    return f"{max(values) / mean:.2f} times the mean" if mean else "nothing"


def _by_rank(axes: "Axes", hosts: Sequence[Sequence[int]], world: int) -> None:
    """Set an axis of ranks: whole numbers, lines between hosts, bars at most as wide as for five
    ranks.
    """
    beside = max(0.0, (5 - world) / 2)
    axes.set_xlim(-0.6 - beside, world - 0.4 + beside)
    _whole_numbers(axes.xaxis, world)
    axes.grid(True, axis="y")
    for host in hosts[1:] if len(hosts) <= 64 else []:
        axes.axvline(host[0] - 0.5, color=QUIET, linewidth=0.6, alpha=0.6)


def _whole_numbers(axis: Any, world: int) -> None:
    """Set the ticks of an axis of ranks: one tick per rank for up to 16 ranks, else some whole
    numbers.
    """
    from matplotlib.ticker import FixedLocator, MaxNLocator

    axis.set_major_locator(
        FixedLocator(range(world))
        if world <= 16
        else MaxNLocator(14, integer=True, steps=[1, 2, 4, 5, 8, 10])
    )


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
            _whole_numbers(axis, world)
        for first in (
            [host[0] - 0.5 for host in report.hosts[1:]] if len(report.hosts) <= 40 else []
        ):
            axes.axhline(first, color="white", linewidth=1.5)
            axes.axvline(first, color="white", linewidth=1.5)
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
            "gradients backward; white is nothing."
            + (" White lines part hosts." if len(report.hosts) > 1 else ""),
        )
