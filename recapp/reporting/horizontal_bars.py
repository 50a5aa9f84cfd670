"""Horizontal bars in the style of a newspaper: above each bar its whole name, at the right its
numbers.

    mixed batch_size=256                    7.06 ms (6.21 to 7.74), 20,700 samples/s
    ██████████████████████████|─|

A name that is too long for one line continues on the next line; it is never cut.
"""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from recapp.reporting.drawing import COLUMN, QUIET, Sheet, legend_height, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LETTERS = 64  # letters on a line as wide as a column of the page
# inches
LINE = 0.175
BAR = 0.2
GAP = 0.13
BELOW = 0.55  # for ticks and title of the axis


class HorizontalBars(Sheet):
    """A figure with free space for named bars."""

    axes: "list[Axes]"
    positions: list[list[float]]
    """The positions of each name's bars on the vertical axis, in inches."""

    @property
    def chart(self) -> "Axes":
        """The axes on which the bars are drawn."""
        return self.axes[0]


@contextmanager
def horizontal_bars(
    names: Sequence[str], labels: Sequence[str], *, bars: int = 1, legend: Sequence[str] = ()
) -> Iterator[HorizontalBars]:
    """Open a figure of named bars; the caller draws them at `positions` inside the `with`.

    Args:
        names: The names of the bars, from top to bottom.
        labels: The text at the right end of each name's line.
        bars: The number of bars under each name.
        legend: The names in the legend of `legend_below`; empty for no legend.
    """
    lines = [_wrapped(name, label) for name, label in zip(names, labels, strict=True)]
    heights = [LINE * len(wrapped) + BAR * bars + GAP for wrapped in lines]
    total = sum(heights)
    with sheet(COLUMN, total + BELOW + (legend_height(legend) if legend else 0)) as plain:
        s = HorizontalBars(plain.figure, plain.axes)
        axes = s.chart
        top = 0.0
        s.positions = []
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
            first = base + BAR / 2 + 0.02
            s.positions.append([first + BAR * bar for bar in range(bars)])
            top += height
        yield s


def _wrapped(name: str, label: str) -> list[str]:
    """Return the lines of a name. If the last line has no room for the label, add an empty line."""
    lines = textwrap.wrap(name, LETTERS, break_on_hyphens=False) or [""]
    return lines if len(lines[-1]) + len(label) + 2 <= LETTERS else [*lines, ""]
