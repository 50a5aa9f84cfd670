"""Pictures of what was learned: the metric against each setting that was varied, and curves over steps."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recapp.reporting.comparison import SEED, texts_of
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
)
from recapp.reporting.objective import Objective
from recapp.reporting.variants import Interval, Run, Variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DECADE = 10.0  # numbers that span more stand on a logarithmic axis
TICKS = 6  # swept values that are ticks themselves
COLORED = 6  # curves that are told apart by colour; of more, the best ones are
BEST_COLORED = 3
START, FLAT = 0.25, 2.5  # a share of the steps; how many times as high a picture would have to be for their readings
QUIET_NAME = "the other runs"
TRAINING = {"val_auc": "train_auc", "val_log_loss": "train_loss"}  # the curve of training beside that of validation


def metric_by(name: str, runs: Sequence[Run], objective: Objective) -> Picture | str:
    """Draw the metric of each run against one setting that was varied.

    Args:
        name: Of the setting; `plan` for the plan.
        runs: That ended well.
        objective: The metric.
    """
    points = [(_setting(run, name), value) for run in runs if (value := run.value(objective.name)) is not None]
    if not points:
        return f"no run has {objective.name}"
    values = list(dict.fromkeys(value for value, _ in points))
    numbers = all(_is_number(value) for value in values)
    places = {v: v for v in values} if numbers else {v: float(place) for place, v in enumerate(values)}
    names = dict(zip(values, texts_of(values), strict=True))
    best = (max if objective.highest else min)(points, key=lambda point: point[1])
    with sheet(COLUMN, 3.3) as s:
        axes = s.axes[0]
        x, y = [places[value] for value, _ in points], [value for _, value in points]
        means = {v: Interval(tuple(found for value, found in points if value == v)) for v in values}
        if len(points) > len(values) or _one_number_alone(runs, name):
            _means(axes, {places[v]: mean.mean for v, mean in means.items()}, joined=numbers)
        axes.plot(x, y, "o", color=BAR, markersize=5.5, markeredgecolor="white", markeredgewidth=0.8, zorder=3)
        axes.plot(places[best[0]], best[1], "o", color=BEST, markersize=8, zorder=4, markeredgecolor="white")
        _axis(axes, places, names, numbers=numbers)
        _name_best(axes, places[best[0]], best[1], objective)
        axes.set(xlabel=name, ylabel=objective.title)
        axes.grid(True, axis="y")
        told = "; ".join(_told(names[v], mean) for v, mean in list(means.items())[:12])
        return s.finish(file_of(name), title_of(name, objective), f"Dots, {objective.title} by {name}: {told}.",
                        _how_to_read(runs, name, several=len(points) > len(values)))  # fmt: skip


def title_of(name: str, objective: Objective) -> str:
    """Return the title of the picture of a metric against a setting."""
    return f"{objective.title[0].upper()}{objective.title[1:]} by {_short(name)}"


def file_of(name: str) -> str:
    """Return the name of its file, without suffix."""
    return f"metric_by_{name.replace('/', '.')}"


def _setting(run: Run, name: str) -> Any:
    value = run.setting(name)
    return "default" if value is None else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(name: str) -> str:
    return name if name.count(".") < 2 else name.partition(".")[2]


def _one_number_alone(runs: Sequence[Run], name: str) -> bool:
    """Whether nothing else was varied but the seed, so that a line through the runs means something."""
    return {other for run in runs for other in run.varied} <= {name, SEED}


def _means(axes: "Axes", means: Mapping[float, float], *, joined: bool) -> None:
    ordered = sorted(means.items())
    axes.plot(*zip(*ordered, strict=True), color=BAR, linewidth=1.4 if joined else 0, marker="_", markersize=16,
              markeredgewidth=1.8, alpha=0.8, zorder=2)  # fmt: skip


def _axis(axes: "Axes", places: Mapping[Any, float], names: Mapping[Any, str], *, numbers: bool) -> None:
    """Numbers over a decade or more on a logarithmic axis; few values, and words, as ticks of their own."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    found = list(places.values())
    if numbers and min(found) > 0 and max(found) / min(found) >= DECADE:
        axes.set_xscale("log")
    if not numbers or len(found) <= TICKS:
        axes.set_xticks(found, [_folded(names[value]) for value in places])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        if axes.get_xscale() == "log":
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        axes.xaxis.set_major_formatter("{x:.10g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.12 if len(found) > 1 else 0.5, y=0.16)
    axes.locator_params(axis="y", nbins=6, min_n_ticks=3)


def _folded(text: str) -> str:
    """A name on several lines, where it would run into the next one."""
    return "\n".join(textwrap.wrap(text.replace("_", "_\u200b"), 14, break_long_words=False)).replace("\u200b", "")


def _name_best(axes: "Axes", x: float, y: float, objective: Objective) -> None:
    above = objective.highest
    place = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[0]
    beside = "left" if place < 0.2 else "right" if place > 0.8 else "center"
    axes.annotate(f"best {y:.5f}", (x, y), xytext=(0, 9 if above else -9), textcoords="offset points",
                  ha=beside, va="bottom" if above else "top", color=BEST, weight="bold")  # fmt: skip


def _told(name: str, found: Interval) -> str:
    several = f" ({found.low:.5f} to {found.high:.5f})" if len(found.values) > 1 else ""
    return f"{name} {found.mean:.5f}{several}"


def _how_to_read(runs: Sequence[Run], name: str, *, several: bool) -> str:
    others = sorted({other for run in runs for other in run.varied} - {name, SEED})
    seeds = any(SEED in run.varied for run in runs)
    said = ["A dot is a run"]
    if several:
        said.append("a dash is the mean of the runs above the same value")
    if others:
        said.append(f"they differ in {', '.join(others)}{' and the seed' if seeds else ''} as well")
    elif several and seeds:
        said.append("they differ in their seed")
    return "; ".join(said) + "."


# ---- curves


def curves(name: str, variants: Sequence[Variant], objective: Objective) -> Picture | str:
    """Draw a metric of validation, and training's beside it, as training went on.

    Args:
        name: Of the metric: `val_auc`.
        variants: What is compared.
        objective: Chooses the best.
    """
    training = TRAINING.get(name)
    shown = [one for one in (name, training) if one]
    if not any(run.curve(one) for v in variants for run in v.runs for one in shown):
        return f"no run has readings of {' or '.join(shown)} in csv/metrics.csv (logger=csv writes it)"
    colors = _colors(variants, objective)
    with sheet(COLUMN, 3.2 + legend_height(_named(variants, colors))) as s:
        axes = s.axes[0]
        for place, (variant, color) in enumerate(zip(variants, colors, strict=True)):
            quiet = color == GRID
            if training:
                _curve(axes, variant, training, color, dashes=":", marker="", order=1 if quiet else 3)
            _curve(axes, variant, name, color, dashes="-", marker="o", order=1 if quiet else 4 + place)
        if len(variants) == 1:
            _mark_best(axes, variants[0].runs[0], name, objective)
        _legend(axes, variants, colors, training is not None)
        legend_below(s.figure, axes)
        title = Objective(name).title
        axes.set(xlabel="steps trained", ylabel=title if training is None else title.removeprefix("validation "))
        axes.margins(x=0.03)
        above = _leave_out_the_start(axes, variants, shown)
        axes.locator_params(axis="x", integer=True, steps=[1, 2, 5, 10])
        axes.grid(True, axis="y")
        last = [(v.name, end) for v in variants if (end := v.measure(lambda run: run.value(name)))]
        told = "; ".join(f"{label} {end.mean:.5f}" for label, end in last[:12])
        heading = curve_title(name)
        alt = f"Curves of training and validation over steps; {title} of the checkpoint that is kept: {told}."
        return s.finish(f"curve_of_{name}", heading, alt, _about_curves(variants, training) + above)


def curve_title(name: str) -> str:
    """Return the title of the picture of a metric over steps."""
    title = Objective(name).title
    return f"{title[0].upper()}{title[1:]} over steps"


def _colors(variants: Sequence[Variant], objective: Objective) -> list[str]:
    """A colour for each variant; of many the best ones have one, the others are grey."""
    if len(variants) <= COLORED:
        return list(SERIES_COLORS[: len(variants)])
    best = [variant.name for variant, _ in objective.ranked(variants)[:BEST_COLORED]]
    return [SERIES_COLORS[best.index(v.name)] if v.name in best else GRID for v in variants]


def _curve(
    axes: "Axes", variant: Variant, name: str, color: str, *, dashes: str, marker: str, order: int
) -> None:
    runs = [curve for run in variant.runs if (curve := run.curve(name))]
    at = sorted(set(runs[0]).intersection(*runs[1:])) if runs else []
    if not at:
        return
    found = [Interval(tuple(run[step] for run in runs)) for step in at]
    axes.plot(at, [one.mean for one in found], color=color, linestyle=dashes, linewidth=1.8 if marker else 1.3,
              marker=marker or ("." if len(at) == 1 else ""), markersize=4.5, zorder=order)  # fmt: skip
    low, high = [one.low for one in found], [one.high for one in found]
    if len(runs) > 1 and len(at) > 1 and marker:
        axes.fill_between(at, low, high, color=color, alpha=0.16, linewidth=0, zorder=order - 1)
    elif len(runs) > 1 and marker:
        axes.vlines(at, low, high, color=color, linewidth=1.8, zorder=order)


def _leave_out_the_start(axes: "Axes", variants: Sequence[Variant], names: Sequence[str]) -> str:
    """Let the first readings lie outside where they alone would press all others flat; says so."""
    curves_ = [run.curve(name) for variant in variants for run in variant.runs for name in names]
    end = max(step for curve in curves_ for step in curve)
    early = [value for curve in curves_ for step, value in curve.items() if step <= START * end]
    later = [value for curve in curves_ for step, value in curve.items() if step > START * end]
    everything = [*early, *later]
    if not later or not early or max(everything) - min(everything) < FLAT * (max(later) - min(later)):
        return ""
    reach = max(later) - min(later)
    axes.set_ylim(min(later) - 0.05 * reach, max(later) + 0.05 * reach)
    return (f" Readings of the first {START:.0%} of the steps lie outside of this picture: they go from "
            f"{min(early):.3g} to {max(early):.3g}.")


def _mark_best(axes: "Axes", run: Run, name: str, objective: Objective) -> None:
    """Where the checkpoint that is kept was written, on the curve that it was chosen by."""
    readings, step = run.curve(name), run.metrics.get("checkpoint_step")
    if name == objective.name and step in readings:
        axes.plot(step, readings[step], "o", color=BEST, markersize=9, zorder=9, markeredgecolor="white")
        axes.annotate(f"kept: {readings[step]:.5f}", (step, readings[step]), xytext=(-8, -12), zorder=9,
                      textcoords="offset points", ha="right", va="top", color=BEST, weight="bold")  # fmt: skip


def _named(variants: Sequence[Variant], colors: Sequence[str]) -> list[str]:
    """The names that the legend will have."""
    own = [variant.name for variant, color in zip(variants, colors, strict=True) if color != GRID]
    return [*(own if len(variants) > 1 else []), QUIET_NAME, "validation", "training"]


def _legend(axes: "Axes", variants: Sequence[Variant], colors: Sequence[str], training: bool) -> None:
    """Names of colours where there are several, then of dashes."""
    if len(variants) > 1:
        for variant, color in zip(variants, colors, strict=True):
            if color != GRID:
                axes.plot([], [], color=color, linewidth=2.5, label=variant.name)
        if GRID in colors:
            axes.plot([], [], color=GRID, linewidth=2.5, label=QUIET_NAME)
    ink = INK if len(variants) > 1 else colors[0]
    axes.plot([], [], color=ink, marker="o", markersize=4.5, linewidth=1.8, label="validation")
    if training:
        axes.plot([], [], color=QUIET if len(variants) > 1 else ink, linestyle=":", linewidth=1.3, label="training")


def _about_curves(variants: Sequence[Variant], training: str | None) -> str:
    said = []
    if training == "train_loss":
        whole = all(run.about for variant in variants for run in variant.runs)
        said.append("Training: the mean of the steps since the last reading." if whole else "Training: single batches.")
    elif training == "train_auc":
        said.append("Training: the epoch's batches so far, those of rank 0.")
    if any(len(variant.runs) > 1 for variant in variants):
        said.append("Lines are means of the seeds, bands go from the lowest run to the highest.")
    return " ".join(said)
