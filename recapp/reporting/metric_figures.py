"""Pictures of a metric: its curves over the steps of training, in validation and in training, and
the metric of each run against a varied setting.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recapp.reporting.comparison import SEED, short_names, texts_of
from recapp.reporting.drawing import (
    BAR,
    BEST,
    COLUMN,
    GRID,
    INK,
    QUIET,
    SERIES_COLORS,
    Picture,
    legend_below,
    legend_height,
    sheet,
    step_axis,
)
from recapp.reporting.variants import Interval, Objective, Run, Variant, varied_settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORED = 6  # the most curves that have a colour each
BEST_COLORED = 3  # of more curves, only this number of the best has a colour each
START = 0.25  # share of the steps whose readings may lie outside the picture
FLAT = 2.5  # they lie outside if they would make the picture more than 2.5 times as high
QUIET_NAME = "the other runs"
ALT_VALUES = 12  # number of values in the text for readers who cannot see the picture


DECADE = 10.0  # the axis is logarithmic if the ratio of largest to smallest number is at least this
TICKS = 6  # the most numbers that are all ticks
HORIZONTAL_NAMES = 4  # more names than these are turned by 90 degrees
LETTER = 0.075  # inches
FOLDED = 16  # letters on a line below the axis


def curves(name: str, variants: Sequence[Variant], objective: Objective) -> Picture | str:
    """Draw a validation metric over the steps of training, and the training metric with it.

    Args:
        name: The name of the metric: `val_auc`.
        variants: The variants to compare.
        objective: The metric that decides which variants are best.

    Returns:
        The picture, or a sentence with the reason why there is none.
    """
    measure = objective.measures.get(name)
    training = measure.training if measure else None
    shown = [one for one in (name, training) if one]
    if not any(run.curve(one) for v in variants for run in v.runs for one in shown):
        return (
            f"no run has readings of {' or '.join(shown)} in csv/metrics.csv (logger=csv writes it)"
        )
    if len(variants) == 1 and (alone := _one_reading(variants[0], shown, objective)):
        return alone
    colors = _colors(variants, objective)
    with sheet(COLUMN, 3.2 + legend_height(_named(variants, colors))) as s:
        axes = s.axes[0]
        title = objective.named(name).title
        for number, (variant, color) in enumerate(zip(variants, colors, strict=True)):
            order = 1 if color == GRID else 4 + number
            if training:
                _curve(axes, variant, training, color, order=min(order, 3), validation=False)
            _curve(axes, variant, name, color, order=order, validation=True)
        if len(variants) == 1:
            _mark_best(axes, variants[0].runs[0], name, objective)
        _legend(axes, variants, colors, training is not None)
        legend_below(s.figure, axes)
        axes.set(xlabel="steps trained")
        axes.set_ylabel(title.removeprefix("validation ") if training else title)
        axes.margins(x=0.03)
        outside = _leave_out_the_start(axes, variants, shown)
        step_axis(axes.xaxis)
        axes.grid(True, axis="y")
        last = [(v.name, end) for v in variants if (end := v.measure(lambda run: run.value(name)))]
        values = "; ".join(f"{label} {end.mean:.5f}" for label, end in last[:ALT_VALUES])
        alt = f"Curves over steps; {title} of the checkpoints that are kept: {values}."
        caption = " ".join([*_about_curves(variants, training), *outside])
        return s.finish(curve_file(name), curve_title(name, objective), alt, caption)


def _one_reading(variant: Variant, names: Sequence[str], objective: Objective) -> str:
    """Return a sentence with the readings if no curve has two of them; else an empty text."""
    curves = {name: [run.curve(name) for run in variant.runs] for name in names}
    if any(len(curve) > 1 for found in curves.values() for curve in found):
        return ""
    said = [
        f"{title.replace('train_', 'training ')} {value:.5f} after step {step}"
        for name, found in curves.items()
        for title in [objective.named(name).title]
        for curve in found
        for step, value in curve.items()
    ]
    return f"a curve needs two readings (trainer.val_check_interval); there is {', '.join(said)}"


def curve_file(name: str) -> str:
    """Return the name of the picture's file for a metric, without suffix."""
    return f"curve_of_{name}"


def curve_title(name: str, objective: Objective) -> str:
    """Return the title of the picture of a metric over steps."""
    return f"{objective.named(name).heading} over steps"


def _colors(variants: Sequence[Variant], objective: Objective) -> list[str]:
    """Return a colour for each variant; of many variants only the best have colours, the others are
    grey.
    """
    if len(variants) <= COLORED:
        return list(SERIES_COLORS[: len(variants)])
    best = [variant.name for variant, _ in objective.ranked(variants)[:BEST_COLORED]]
    return [SERIES_COLORS[best.index(v.name)] if v.name in best else GRID for v in variants]


def _curve(
    axes: "Axes", variant: Variant, name: str, color: str, *, order: int, validation: bool
) -> None:
    """Draw the mean of a variant's runs, and for validation a band from the lowest run to the
    highest.
    """
    runs = [curve for run in variant.runs if (curve := run.curve(name))]
    at = sorted(set(runs[0]).intersection(*runs[1:])) if runs else []
    if not at:
        return
    found = [Interval(tuple(run[step] for run in runs)) for step in at]
    line: dict[str, Any] = {"color": color, "zorder": order, **_style(validation, len(at))}
    axes.plot(at, [one.mean for one in found], **line)
    low = [one.low for one in found]
    high = [one.high for one in found]
    if len(runs) > 1 and len(at) > 1 and validation:
        axes.fill_between(at, low, high, color=color, alpha=0.16, linewidth=0, zorder=order - 1)
    elif len(runs) > 1 and validation:
        axes.vlines(at, low, high, color=color, linewidth=1.8, zorder=order)


def _style(validation: bool, readings: int = 2) -> dict[str, Any]:
    if validation:
        return {"linestyle": "-", "linewidth": 1.8, "marker": "o", "markersize": 4.5}
    return {"linestyle": ":", "linewidth": 1.3, "marker": "." if readings == 1 else ""}


def _leave_out_the_start(
    axes: "Axes", variants: Sequence[Variant], names: Sequence[str]
) -> list[str]:
    """Limit the axis to the later readings if the first readings would flatten their curves.

    Returns:
        A sentence about the first readings if the axis leaves them out; else an empty list.
    """
    curves_ = [run.curve(name) for variant in variants for run in variant.runs for name in names]
    end = max(step for curve in curves_ for step in curve)
    early = [value for curve in curves_ for step, value in curve.items() if step <= START * end]
    later = [value for curve in curves_ for step, value in curve.items() if step > START * end]
    if not early or not later:
        return []
    low = min(later)
    reach = max(later) - min(later)
    if max(*early, *later) - min(*early, *later) < FLAT * reach:
        return []
    axes.set_ylim(low - 0.05 * reach, low + 1.05 * reach) if reach else None
    between = f"{min(early):.3g} and {max(early):.3g}"
    return [f"The first {START:.0%} of the steps, between {between}, lie partly outside."]


def _mark_best(axes: "Axes", run: Run, name: str, objective: Objective) -> None:
    """Mark the step of the kept checkpoint on the curve of the metric that chose it."""
    readings = run.curve(name)
    step = run.metrics.get("checkpoint_step")
    if name == objective.name and step in readings:
        white: dict[str, Any] = {"markeredgecolor": "white", "markersize": 9, "zorder": 9}
        axes.plot(step, readings[step], "o", color=BEST, **white)
        where: dict[str, Any] = {"xytext": (-8, -12), "textcoords": "offset points"}
        text: dict[str, Any] = {"ha": "right", "va": "top", "color": BEST, "weight": "bold"}
        axes.annotate(f"kept: {readings[step]:.5f}", (step, readings[step]), **where, **text)


def _named(variants: Sequence[Variant], colors: Sequence[str]) -> list[str]:
    """Return the names in the legend."""
    own = [variant.name for variant, color in zip(variants, colors, strict=True) if color != GRID]
    return [*(own if len(variants) > 1 else []), QUIET_NAME, "validation", "training"]


def _legend(
    axes: "Axes", variants: Sequence[Variant], colors: Sequence[str], training: bool
) -> None:
    """Add the variants to the legend by colour, if there are several; then add the line styles."""
    if len(variants) > 1:
        for variant, color in zip(variants, colors, strict=True):
            if color != GRID:
                axes.plot([], [], color=color, linewidth=2.5, label=variant.name)
        if GRID in colors:
            axes.plot([], [], color=GRID, linewidth=2.5, label=QUIET_NAME)
    ink = INK if len(variants) > 1 else colors[0]
    axes.plot([], [], color=ink, label="validation", **_style(validation=True))
    if training:
        quiet = QUIET if len(variants) > 1 else ink
        axes.plot([], [], color=quiet, label="training", **_style(validation=False))


def _about_curves(variants: Sequence[Variant], training: str | None) -> list[str]:
    said = []
    if training == "train_loss":
        averaged = all(run.about for variant in variants for run in variant.runs)
        what = "the mean of the steps since the last reading" if averaged else "single batches"
        said.append(f"Training: {what}.")
    elif training is not None:
        said.append("Training: the epoch's batches so far, those of rank 0.")
    if any(len(variant.runs) > 1 for variant in variants):
        said.append("Lines are means of the seeds, bands go from the lowest run to the highest.")
    return said


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
        return s.finish(dots_file(name), dots_title(name, objective), alt, caption)


def dots_title(name: str, objective: Objective) -> str:
    """Return the title of the picture of a metric against a setting."""
    return f"{objective.heading} by {_short(name)}"


def dots_file(name: str) -> str:
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
