"""Boxes, cells, arrows and words on a sheet, measured in inches from its upper left corner."""

from collections.abc import Callable, Sequence
from typing import Any

from recapp.reporting.drawing import INK, QUIET, ink_on, rank_colors

RANKS = rank_colors(4)
PALE = "#f2f2f2"
SHARED = "#e6e6e6"
ACCENT = "#D55E00"


class Canvas:
    """What is drawn on one pair of axes.

    Args:
        axes: Axes without frame, in inches.
        height: The height of the sheet in inches.
    """

    def __init__(self, axes: Any, height: float) -> None:
        self.axes = axes
        axes.set_ylim(height, 0)

    def text(self, x: float, y: float, words: str, **style: Any) -> None:
        """Write words; their middle is at (x, y) unless `ha` and `va` say otherwise."""
        style = {"fontsize": 9, "ha": "center", "va": "center", "color": INK} | style
        self.axes.text(x, y, words, **style)

    def heading(self, x: float, y: float, words: str, **style: Any) -> None:
        """Write a bold line that begins at (x, y)."""
        self.text(x, y, words, **({"ha": "left", "fontsize": 10, "weight": "bold"} | style))

    def note(self, x: float, y: float, words: str, **style: Any) -> None:
        """Write words of second rank that begin at (x, y), which is their upper left corner."""
        style = {"ha": "left", "va": "top", "color": QUIET, "fontsize": 8.5} | style
        self.text(x, y, words, **style)

    def box(
        self,
        x: float,
        y: float,
        wide: float,
        high: float,
        words: str = "",
        fill: str = "white",
        **style: Any,
    ) -> None:
        """Draw a rectangle with words in its middle."""
        from matplotlib.patches import Rectangle

        edge = {"edgecolor": QUIET, "linewidth": 0.8}
        patch = {key: style.pop(key) for key in ("hatch", "linestyle") if key in style}
        self.axes.add_patch(Rectangle((x, y), wide, high, facecolor=fill, **edge, **patch))
        if words:
            self.text(x + wide / 2, y + high / 2, words, **({"color": ink_on(fill)} | style))

    def cells(
        self,
        x: float,
        y: float,
        rows: Sequence[Sequence[str]],
        wide: float,
        high: float,
        fill: Callable[[int, int], str] = lambda row, column: "white",
        **style: Any,
    ) -> None:
        """Draw a grid of words.

        Args:
            x: The left edge.
            y: The upper edge.
            rows: The words of each row.
            wide: The width of a cell.
            high: The height of a cell.
            fill: The colour of the cell in a row and a column.
            style: How words are written.
        """
        for r, row in enumerate(rows):
            for c, words in enumerate(row):
                self.box(x + c * wide, y + r * high, wide, high, words, fill(r, c), **style)

    def arrow(
        self, x: float, y: float, to_x: float, to_y: float, words: str = "", **style: Any
    ) -> None:
        """Draw an arrow; words stand above its middle."""
        color = style.pop("color", INK)
        bend = style.pop("bend", 0.0)
        self.axes.annotate(
            "",
            xy=(to_x, to_y),
            xytext=(x, y),
            arrowprops={
                "arrowstyle": style.pop("arrowstyle", "-|>"),
                "color": color,
                "linewidth": 1.2,
                "shrinkA": 0,
                "shrinkB": 0,
                "connectionstyle": f"arc3,rad={bend}",
            },
        )
        if words:
            style = {"fontsize": 8.5, "va": "bottom", "color": color} | style
            self.text((x + to_x) / 2, (y + to_y) / 2 - 0.04, words, **style)
