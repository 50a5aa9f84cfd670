"""The base of all pictures: colours that colour-blind readers can tell apart, dark text on white,
readable sizes, files.

A few series or ranks have the colours of Okabe and Ito, phases and kinds of memory those of Paul
Tol; many ranks share the scale `viridis`. Colour is never the only mark: bars are stacked in the
order of the legend, and shards show the number of their rank if there is room.
"""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recapp.reporting.phases import PHASES
from recapp.settings.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# of named bars: letters on a line as wide as a column of the page, and inches
LETTERS = 64
LINE = 0.175
THICK = 0.2
GAP = 0.13
BELOW = 0.55  # for ticks and title of the axis
DPI = 120
# inches, the width of a column of the page: labels stay legible on a phone, and a wider window
# shows pictures side by side
COLUMN = 5.0
LEGEND_LETTERS = 66  # letters that fit into the width of a column
LEGEND_LINE = 0.185  # inches
BAR = "#0072B2"
BEST = "#D55E00"
# colours of text, of less important text, of grid lines
INK = "#1a1a1a"
QUIET = "#595959"
GRID = "#d9d9d9"
SERIES_COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#1a1a1a",
    "#8C6D31",
)
PHASE_COLORS = dict(
    zip(PHASES, ("#4477AA", "#66CCEE", "#CCBB44", "#BBBBBB", "#EE6677", "#AA3377"), strict=True)
)
MEMORY_COLORS = {  # of `KINDS`, in their order
    "weights": "#004488",
    "optimiser state": "#DDAA33",
    "exchange buffers": "#BB5566",
}
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "recapp",
    "text.parse_math": False,
}


@dataclass
class Picture:
    """A finished figure, with its title and texts.

    Args:
        name: The name of the picture's file, without suffix.
        title: The title above the picture.
        alt: A description with the main numbers, for readers who cannot see the picture.
        caption: An explanation of how to read the picture.
        svg: The SVG as text.
    """

    name: str
    title: str
    alt: str
    caption: str
    svg: str = field(repr=False)

    def _repr_svg_(self) -> str:
        """Return the SVG, which a notebook shows."""
        return self.svg

    @property
    def least_width(self) -> int:
        """The width in screen pixels below which the labels are too small to read.

        It equals the width in points: at one pixel per point the labels keep their font size.
        """
        width = re.match(r'<svg[^>]* width="([\d.]+)pt"', self.svg)
        return math.ceil(float(width[1])) if width else 0

    def write(self, folder: Path) -> Path:
        """Write the picture into a folder as SVG, and return the file."""
        path = folder / f"{self.name}.svg"
        write_whole(path, self.svg)
        return path


@dataclass
class Sheet:
    """A figure under construction; `finish` makes the picture.

    Args:
        figure: The figure.
        axes: Its axes, from top to bottom.
        positions: In a figure of named bars, the position of each bar on the vertical axis, in
            inches.
    """

    figure: "Figure"
    axes: "list[Axes]"
    positions: list[float] = field(default_factory=list)

    def finish(self, name: str, title: str, alt: str, caption: str) -> Picture:
        """Return the figure as a picture; equal figures give equal bytes.

        Args:
            name: The name of the picture's file, without suffix.
            title: The title, which stands above the picture.
            alt: A description of the picture, for readers who cannot see it.
            caption: An explanation of how to read the picture.
        """
        svg = io.StringIO()
        self.figure.savefig(
            svg, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
        text = svg.getvalue()
        return Picture(name, title, alt, caption, text[text.index("<svg") :])


@contextmanager
def sheet(width: float, height: float, rows: int = 1) -> Iterator[Sheet]:
    """Open an empty figure in the style of all pictures; the style is set inside the `with`.

    Args:
        width: The width in inches.
        height: The height in inches.
        rows: The number of axes, one above the other; 0 makes a single axes without frame, ticks
            or margins, whose units are inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # a letter that the font lacks becomes a box here, but is right in the alt text
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = Figure(figsize=(width, height), layout="constrained" if rows else None, dpi=DPI)
        if rows:
            axes = list(figure.subplots(rows, squeeze=False).flat)
        else:
            axes = [figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))]
            axes[0].axis("off")
        yield Sheet(figure, axes)


def spec_of(values: Iterable[float | None]) -> str:
    """Return one number format for all values of a column.

    The format shows three digits of the largest value, and at least one decimal below 1000.
    """
    largest = max((abs(value) for value in values if value), default=0.0)
    decimals = 2 - math.floor(math.log10(largest)) if largest else 1
    return f",.{max(decimals, int(largest < 1000))}f"


def byte_axis(axis: Any) -> None:
    """Set the ticks of an axis of bytes: `500 kB`, `2.5 MB`."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter("B"))


def rank_colors(world: int) -> list[str]:
    """Return a colour for each rank: distinct colours for up to eight ranks; for more ranks a scale
    of colours on which neighbours look alike.
    """
    if world <= len(SERIES_COLORS):
        return list(SERIES_COLORS[:world])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](rank / (world - 1))) for rank in range(world)]


def ink_on(color: Any) -> str:
    """Return black or white, the one that is easier to read on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(color)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "white"


def stacked(
    axes: "Axes",
    positions: Sequence[float],
    parts: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    width: float = 0.8,
    *,
    horizontal: bool = False,
) -> list[float]:
    """Draw stacked bars with a white line between their parts.

    Args:
        axes: The axes to draw on.
        positions: The position of each bar on the axis across the bars.
        parts: The lengths of each part, one for every bar.
        colors: The colour of each part.
        width: The thickness of a bar, in units of the axis across the bars.
        horizontal: Whether bars grow to the right instead of upwards.

    Returns:
        The length of each bar.
    """
    ends = [0.0] * len(positions)
    line: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4 if len(positions) < 200 else 0.0}
    draw, start = (axes.barh, "left") if horizontal else (axes.bar, "bottom")
    for name, values in parts.items():
        where: Any = {start: ends, "label": name, "color": colors[name]}
        bars = draw(positions, values, width, **where, **line)
        for bar in bars:
            # bars lie inside the axes, and a layout would compute the extent of each bar
            bar.set_in_layout(False)
        ends = [a + b for a, b in zip(ends, values, strict=True)]
    return ends


def legend_below(figure: "Figure", axes: "Axes") -> None:
    """Add the legend below the figure, which grows by its height, with whole names and as many
    columns as fit.
    """
    handles, names = axes.get_legend_handles_labels()
    texts = [textwrap.fill(name, LEGEND_LETTERS, break_on_hyphens=False) for name in names]
    longest = max(len(line) for text in texts for line in text.split("\n"))
    columns = max(1, min(LEGEND_LETTERS // (longest + 6), 3, len(names)))
    lines = -(-len(texts) // columns) + sum(text.count("\n") for text in texts)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * lines + 0.1)
    spaces = {"columnspacing": 1.4, "handlelength": 1.4}
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, **spaces)


@contextmanager
def horizontal_bars(names: Sequence[str], labels: Sequence[str]) -> Iterator[Sheet]:
    """Open a figure of named bars; the caller draws them at `positions` inside the `with`.

    Args:
        names: The names of the bars, from top to bottom.
        labels: The text at the right end of each name's line.
    """
    lines = [_wrapped(name, label) for name, label in zip(names, labels, strict=True)]
    heights = [LINE * len(wrapped) + THICK + GAP for wrapped in lines]
    total = sum(heights)
    with sheet(COLUMN, total + BELOW) as s:
        axes = s.axes[0]
        top = 0.0
        axes.set_ylim(total, 0)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(True, axis="x")
        across = axes.get_yaxis_transform()
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        for wrapped, height, text in zip(lines, heights, labels, strict=True):
            base = top + LINE * len(wrapped)
            style: dict[str, Any] = {"transform": across, "bbox": paper}
            axes.text(0, base, "\n".join(wrapped), va="bottom", linespacing=1.1, **style)
            axes.text(1, base, text, va="bottom", ha="right", color=QUIET, **style)
            s.positions.append(base + THICK / 2 + 0.02)
            top += height
        yield s


def bars_with_whiskers(
    s: Sheet, values: Sequence[float], whiskers: Sequence[tuple[float, float]] = ()
) -> None:
    """Draw one bar for each name of a figure of named bars.

    Args:
        s: The figure.
        values: The lengths of the bars.
        whiskers: The ends of each bar's whisker; empty for none.
    """
    reach = [
        [max(0.0, value - ends[0]) for value, ends in zip(values, whiskers, strict=False)],
        [max(0.0, ends[1] - value) for value, ends in zip(values, whiskers, strict=False)],
    ]
    line: Any = {"xerr": reach, "ecolor": INK, "capsize": 3} if whiskers else {}
    s.axes[0].barh(s.positions, values, THICK, color=BAR, **line)


def _wrapped(name: str, label: str) -> list[str]:
    """Return the lines of a name. If the last line has no room for the label, add an empty line."""
    lines = textwrap.wrap(name, LETTERS, break_on_hyphens=False) or [""]
    return lines if len(lines[-1]) + len(label) + 2 <= LETTERS else [*lines, ""]
