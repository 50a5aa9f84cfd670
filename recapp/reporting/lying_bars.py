"""Lying bars as a newspaper sets them: above each its name, whole, and at the right what it says.

    mixed batch_size=256                    7.06 ms (6.21 to 7.74), 20,700 samples/s
    ██████████████████████████|─|

A name that is too long for its line goes on in the next one; it is never cut.
"""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from recapp.reporting.drawing import COLUMN, QUIET, Sheet, legend_height, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LETTERS = 64  # on a line of a column's width
# inches
LINE = 0.175
BAR = 0.2
GAP = 0.13
BELOW = 0.55  # inches: ticks and title of the axis


class LyingBars(Sheet):
    """A figure with room for named bars; `places` says where, a list for each name."""

    axes: "list[Axes]"
    places: list[list[float]]

    @property
    def chart(self) -> "Axes":
        """The axes."""
        return self.axes[0]


@contextmanager
def lying_bars(
    names: Sequence[str], said: Sequence[str], *, bars: int = 1, legend: Sequence[str] = ()
) -> Iterator[LyingBars]:
    """Open a figure of named bars; draw them at `places` inside the `with`.

    Args:
        names: Of the bars, from above to below.
        said: What each says, at the right end of its name's line.
        bars: How many stand under each name.
        legend: The names that `legend_below` will have.
    """
    lines = [_wrapped(name, said_) for name, said_ in zip(names, said, strict=True)]
    heights = [LINE * len(wrapped) + BAR * bars + GAP for wrapped in lines]
    total = sum(heights)
    with sheet(COLUMN, total + BELOW + (legend_height(legend) if legend else 0)) as plain:
        s = LyingBars(plain.figure, plain.axes)
        axes = s.chart
        top = 0.0
        s.places = []
        axes.set_ylim(total, 0)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(True, axis="x")
        across = axes.get_yaxis_transform()
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        for wrapped, height, text in zip(lines, heights, said, strict=True):
            base = top + LINE * len(wrapped)
            style: dict[str, Any] = {"transform": across, "bbox": paper}
            axes.text(0, base, "\n".join(wrapped), va="bottom", linespacing=1.1, **style)
            axes.text(1, base, text, va="bottom", ha="right", color=QUIET, **style)
            first = base + BAR / 2 + 0.02
            s.places.append([first + BAR * bar for bar in range(bars)])
            top += height
        yield s


def _wrapped(name: str, said: str) -> list[str]:
    """A name in lines, with an empty one where there is no room beside it for what is said."""
    lines = textwrap.wrap(name, LETTERS, break_on_hyphens=False) or [""]
    return lines if len(lines[-1]) + len(said) + 2 <= LETTERS else [*lines, ""]
