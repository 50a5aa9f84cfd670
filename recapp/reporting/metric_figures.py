"""Pictures of the metric of each run against a varied setting."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recapp.reporting.comparison import SEED, short_names, texts_of
from recapp.reporting.drawing import BAR, BEST, COLUMN, Picture, sheet
from recapp.reporting.objective import Objective
from recapp.reporting.variants import Interval, Run, varied_settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DECADE = 10.0  # the axis is logarithmic if the ratio of largest to smallest number is at least this
TICKS = 6  # the most numbers that are all ticks
HORIZONTAL_NAMES = 4  # more names than these are turned by 90 degrees
LETTER = 0.075  # inches
FOLDED = 16  # letters on a line below the axis
ALT_VALUES = 12  # number of values in the text for readers who cannot see the picture


def metric_by(name: str, runs: Sequence[Run], objective: Objective) -> Picture | str:
    """Draw the metric of each run against one varied setting.

    Args:
        name: The name of the setting; `plan` for the plan.
        runs: Runs that ended well; only one of the runs that differ in settings without effect.
        objective: The metric.

    Returns:
        The picture, or a sentence with the reason why there is none.
    """
    points = [
        (_setting(run, name), value)
        for run in runs
        if (value := run.value(objective.name)) is not None
    ]
    if not points:
        return f"no run has {objective.name}"
    values = list(dict.fromkeys(value for value, _ in points))
    numbers = all(_is_number(value) for value in values)
    positions = {v: v for v in values} if numbers else {v: float(i) for i, v in enumerate(values)}
    names = dict(zip(values, texts_of(values), strict=True))
    best = (max if objective.highest else min)(points, key=lambda point: point[1])
    turned = not numbers and len(values) > HORIZONTAL_NAMES
    room = LETTER * max(map(len, names.values())) if turned else 0.0
    with sheet(COLUMN, 3.3 + room) as s:
        axes = s.axes[0]
        x = [positions[value] for value, _ in points]
        y = [value for _, value in points]
        means = {v: Interval(tuple(found for value, found in points if value == v)) for v in values}
        if len(points) > len(values) or _one_number_alone(runs, name):
            _means(axes, {positions[v]: mean.mean for v, mean in means.items()}, joined=numbers)
        white: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.8}
        axes.plot(x, y, "o", color=BAR, markersize=5.5, zorder=3, **white)
        axes.plot(positions[best[0]], best[1], "o", color=BEST, markersize=8, zorder=4, **white)
        _axis(axes, positions, names, numbers=numbers)
        _name_best(axes, positions[best[0]], best[1], objective)
        label = short_names(list(varied_settings(runs))).get(name, name)  # as in the legends
        axes.set(xlabel=label, ylabel=objective.title)
        axes.grid(True, axis="y")
        first = list(means.items())[:ALT_VALUES]
        numbers_read = "; ".join(_summary_of(names[v], mean) for v, mean in first)
        alt = f"Dots, {objective.title} by {name}: {numbers_read}."
        caption = _how_to_read(runs, name, several=len(points) > len(values))
        return s.finish(file_of(name), title_of(name, objective), alt, caption)


def title_of(name: str, objective: Objective) -> str:
    """Return the title of the picture of a metric against a setting."""
    return f"{objective.heading} by {_short(name)}"


def file_of(name: str) -> str:
    """Return the name of the picture's file for a setting, without suffix."""
    return f"metric_by_{name.replace('/', '.')}"


def _setting(run: Run, name: str) -> Any:
    value = run.setting(name)
    return "default" if value is None else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(name: str) -> str:
    return name if name.count(".") < 2 else name.partition(".")[2]


def _one_number_alone(runs: Sequence[Run], name: str) -> bool:
    """Return whether only this setting and the seed were varied.

    Only then has a line through the runs a meaning.
    """
    return {n for n, values in varied_settings(runs).items() if len(values) > 1} <= {name, SEED}


def _means(axes: "Axes", means: Mapping[float, float], *, joined: bool) -> None:
    ordered = sorted(means.items())
    dash: dict[str, Any] = {"marker": "_", "markersize": 16, "markeredgewidth": 1.8}
    width = 1.4 if joined else 0
    axes.plot(*zip(*ordered, strict=True), color=BAR, linewidth=width, alpha=0.8, zorder=2, **dash)


def _axis(
    axes: "Axes", positions: Mapping[Any, float], names: Mapping[Any, str], *, numbers: bool
) -> None:
    """Set the axis of the setting: logarithmic if the numbers span a decade or more.

    Each word is a tick; each number is a tick if there are few.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    found = list(positions.values())
    if numbers and min(found) > 0 and max(found) / min(found) >= DECADE:
        axes.set_xscale("log")
    if not numbers or len(found) <= TICKS:
        standing = not numbers and len(found) > HORIZONTAL_NAMES
        texts = [names[value] if standing else _folded(names[value]) for value in positions]
        axes.set_xticks(found, texts, rotation=90 if standing else 0)
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        if axes.get_xscale() == "log":
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        axes.xaxis.set_major_formatter("{x:.10g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.12 if len(found) > 1 else 0.5, y=0.16)
    axes.locator_params(axis="y", nbins=6, min_n_ticks=3)


def _folded(text: str) -> str:
    """Return a name on several lines, if it is so long that it would overlap the next name."""
    return "\n".join(textwrap.wrap(text, FOLDED, break_on_hyphens=False))


def _name_best(axes: "Axes", x: float, y: float, objective: Objective) -> None:
    above = objective.highest
    position = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[0]
    beside = "left" if position < 0.2 else "right" if position > 0.8 else "center"
    where: dict[str, Any] = {"ha": beside, "va": "bottom" if above else "top"}
    apart = (0, 9 if above else -9)
    bold: dict[str, Any] = {"color": BEST, "weight": "bold", "textcoords": "offset points"}
    axes.annotate(f"best {y:.5f}", (x, y), xytext=apart, **where, **bold)


def _summary_of(name: str, found: Interval) -> str:
    several = f" ({found.low:.5f} to {found.high:.5f})" if len(found.values) > 1 else ""
    return f"{name} {found.mean:.5f}{several}"


def _how_to_read(runs: Sequence[Run], name: str, *, several: bool) -> str:
    differ = {n for n, values in varied_settings(runs).items() if len(values) > 1}
    others = sorted(differ - {name, SEED})
    seeds = SEED in differ - {name}
    said = ["A dot is a run"]
    if several:
        said.append("a dash is the mean of the runs above the same value")
    if others:
        said.append(f"they differ in {', '.join(others)}{' and the seed' if seeds else ''} as well")
    elif several and seeds:
        said.append("they differ in their seed")
    return "; ".join(said) + "."
