"""The figure of quality by size: mean AUC of models against the parameters of their dense part."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recapp.reporting.drawing import COLUMN, SERIES_COLORS, Picture, legend_below, sheet
from recapp.reporting.result_lines import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 3.6  # inches


def quality_by_size(log: str, lines: Sequence[Line]) -> Picture | None:
    """Draw the mean AUC of each model and size, with the range over seeds.

    Args:
        log: The log.
        lines: The results of sizes.

    Returns:
        The picture; None without two sizes of a model.
    """
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for line in lines:
        found = line.values("val_auc")
        if found and (weights := line.mean("dense_parameters")):
            points.setdefault(line.model, []).append((weights, line.auc, min(found), max(found)))
    points = {model: sorted(of_one) for model, of_one in points.items() if len(of_one) > 1}
    if not points:
        return None
    seeds = max(len(line.runs) for line in lines)
    with sheet(COLUMN, HEIGHT) as s:
        for (model, of_one), color in zip(sorted(points.items()), SERIES_COLORS, strict=False):
            x, y, low, high = zip(*of_one, strict=True)
            s.chart.plot(x, y, "o-", color=color, label=model, linewidth=1.4, markersize=4)
            s.chart.vlines(x, low, high, color=color, linewidth=1.1)
        _set_scale(s.chart)
        s.chart.grid(True, axis="y")
        s.chart.set(xlabel="parameters of the dense part", ylabel="AUC")
        legend_below(s.figure, s.chart)
        said = "; ".join(
            f"{model} {of_one[0][1]:.4f} with {of_one[0][0]:,.0f} parameters to "
            f"{of_one[-1][1]:.4f} with {of_one[-1][0]:,.0f}"
            for model, of_one in sorted(points.items())
        )
        return s.finish(
            f"quality_by_size_{log}",
            f"Quality by size, {log}",
            f"Mean AUC on {log}: {said}.",
            f"Mean AUC over {seeds} seed{'s' if seeds > 1 else ''} against the parameters of the "
            "dense part, by wider and deeper layers"
            + ("; a line shows the range over seeds." if seeds > 1 else "."),
        )


def _set_scale(chart: "Axes") -> None:
    """Make the axis of parameters logarithmic, with ticks in words: matplotlib's own are formulas,
    which a figure has as they are typed.
    """
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    chart.set_xscale("log")
    chart.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    chart.xaxis.set_major_formatter(EngFormatter())
    chart.xaxis.set_minor_locator(NullLocator())
