"""The pictures of runs: a metric over the steps and against a setting; the length, phases and
memory of a step.

A function draws one picture of some variants, or returns its title with the reason why it cannot.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from recapp.console import size
from recapp.reporting.drawing import (
    BAR,
    BEST,
    COLUMN,
    GRID,
    INK,
    MEMORY_COLORS,
    PHASE_COLORS,
    QUIET,
    SERIES_COLORS,
    THICK,
    Picture,
    Sheet,
    bars_with_whiskers,
    byte_axis,
    horizontal_bars,
    legend_below,
    sheet,
    spec_of,
    stacked,
)
from recapp.reporting.phases import PHASES
from recapp.reporting.run_record import KINDS, RankMemory
from recapp.reporting.runs import SEED, Run, short_names, texts_of, varied_settings
from recapp.reporting.variants import Interval, Objective, Variant, by_speed, rate_of, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A picture, or its title with the reason why there is none
Drawn = Picture | str

BEST_COLORED = 3  # of more curves than colours, only this number of the best has a colour each
START = 0.25  # share of the steps whose readings may lie outside the picture
FLAT = 2.5  # they lie outside if they would make the picture more than 2.5 times as high
QUIET_NAME = "the other runs"
ALT_VALUES = 12  # values in the text for readers who cannot see the picture
DECADE = 10.0  # the axis is logarithmic if the ratio of largest to smallest number is at least this
HORIZONTAL_NAMES = 4  # more names than these are turned by 90 degrees
LETTER = 0.075  # inches
FOLDED = 16  # letters on a line below the axis
NO_RECORD = "no run has a performance.json, which training writes at its end"
TIME = "Where a step's time goes"
MEMORY = "Memory"
RANKS_SHOWN = 32  # the most ranks that are shown one by one
VALIDATION_LINE: Any = {"linewidth": 1.8, "marker": "o", "markersize": 4.5}
TRAINING_LINE: Any = {"linestyle": ":", "linewidth": 1.3}


# ---- a metric over the steps


def curves(name: str, variants: Sequence[Variant], objective: Objective) -> Drawn:
    """Draw a validation metric over the steps of training, and the training metric with it.

    Args:
        name: The name of the metric: `val_auc`.
        variants: The variants to compare.
        objective: The metric that decides which variants are best.
    """
    measure = objective.measures.get(name)
    training = measure.training if measure else None
    names = [one for one in (name, training) if one]
    readings = [run.curve(one) for v in variants for run in v.runs for one in names]
    metric = objective.named(name)
    title = f"{metric.heading} over steps"
    if not any(readings):
        return (
            f"{title}: no run has readings of {' or '.join(names)} in csv/metrics.csv "
            "(logger=csv writes it)"
        )
    if len(variants) == 1 and all(len(curve) < 2 for curve in readings):
        texts = [f"{value:.5f} after step {step}" for c in readings for step, value in c.items()]
        return (
            f"{title}: a curve needs two readings (trainer.val_check_interval); there is "
            f"{', '.join(texts)}"
        )
    from matplotlib.ticker import MaxNLocator

    colors = _colors(variants, objective)
    with sheet(COLUMN, 3.2) as s:
        axes = s.axes[0]
        for order, (variant, color) in enumerate(zip(variants, colors, strict=True), 4):
            above = 1 if color == GRID else order
            if training:
                _curve(axes, variant, training, color, min(above, 3), TRAINING_LINE)
            _curve(axes, variant, name, color, above, VALIDATION_LINE)
        _legend(s, variants, colors, training is not None)
        axes.set(xlabel="steps trained", ylabel=metric.title.removeprefix("validation "))
        axes.margins(x=0.03)
        outside = _without_the_start(axes, readings)
        whole: Any = {"nbins": 9, "min_n_ticks": 1, "integer": True, "steps": [1, 2, 5, 10]}
        axes.xaxis.set_major_locator(MaxNLocator(**whole))
        axes.grid(True, axis="y")
        last = [(v.name, end) for v in variants if (end := v.measure(lambda run: run.value(name)))]
        values = "; ".join(f"{label} {end.mean:.5f}" for label, end in last[:ALT_VALUES])
        alt = f"Curves over steps; {metric.title} of the checkpoints that are kept: {values}."
        means = "Lines are means of the seeds, bands go from the lowest run to the highest. "
        several = any(len(variant.runs) > 1 for variant in variants)
        return s.finish(f"curve_of_{name}", title, alt, means * several + outside)


def _colors(variants: Sequence[Variant], objective: Objective) -> list[str]:
    """Return a colour for each variant; of many variants only the best have colours, the others are
    grey.
    """
    if len(variants) <= len(SERIES_COLORS):
        return list(SERIES_COLORS[: len(variants)])
    best = [variant.name for variant, _ in objective.ranked(variants)[:BEST_COLORED]]
    return [SERIES_COLORS[best.index(v.name)] if v.name in best else GRID for v in variants]


def _curve(
    axes: "Axes", variant: Variant, name: str, color: str, order: int, style: Mapping[str, Any]
) -> None:
    """Draw the mean of a variant's runs, and for validation a band from the lowest run to the
    highest.
    """
    runs = [curve for run in variant.runs if (curve := run.curve(name))]
    if not runs:
        return
    steps = sorted(set(runs[0]).intersection(*runs[1:]))
    points = [Interval(tuple(run[step] for run in runs)) for step in steps]
    axes.plot(steps, [point.mean for point in points], color=color, zorder=order, **style)
    if len(runs) > 1 and style is VALIDATION_LINE:
        low = [point.low for point in points]
        high = [point.high for point in points]
        axes.fill_between(steps, low, high, color=color, alpha=0.16, linewidth=0, zorder=order - 1)


def _legend(s: Sheet, variants: Sequence[Variant], colors: Sequence[str], training: bool) -> None:
    """Add the variants to the legend by colour, if there are several; then add the line styles."""
    if several := len(variants) > 1:
        names = {v.name: color for v, color in zip(variants, colors, strict=True) if color != GRID}
        names |= {QUIET_NAME: GRID} if GRID in colors else {}
        for name, color in names.items():
            s.axes[0].plot([], [], color=color, linewidth=2.5, label=name)
    ink = INK if several else colors[0]
    s.axes[0].plot([], [], color=ink, label="validation", **VALIDATION_LINE)
    if training:
        s.axes[0].plot([], [], color=QUIET if several else ink, label="training", **TRAINING_LINE)
    legend_below(s.figure, s.axes[0])


def _without_the_start(axes: "Axes", readings: Sequence[Mapping[int, float]]) -> str:
    """Limit the axis to the later readings if the first readings would flatten their curves, and
    return a sentence that says so; empty if the axis has all readings.
    """
    points = [point for curve in readings for point in curve.items()]
    start = START * max(step for step, _ in points)
    low, high = (end(value for step, value in points if step > start) for end in (min, max))
    values = [value for _, value in points]
    if not high > low or max(values) - min(values) < FLAT * (high - low):
        return ""
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    return f"Some readings of the first {START:.0%} of the steps lie outside."


# ---- a metric against a setting


def metric_by(name: str, runs: Sequence[Run], objective: Objective) -> Drawn:
    """Draw the metric of each run against one varied setting.

    Args:
        name: The name of the setting; `plan` for the plan.
        runs: Runs that ended well; only one of the runs that differ in settings without effect.
        objective: The metric.
    """
    values: dict[Any, list[float]] = {}
    for run in runs:
        if (metric := run.value(objective.name)) is not None:
            setting = run.setting(name)
            values.setdefault("default" if setting is None else setting, []).append(metric)
    title = f"{objective.heading} by {name if name.count('.') < 2 else name.partition('.')[2]}"
    if not values:
        return f"{title}: no run has {objective.name}"
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    places = {v: float(v) if numbers else float(i) for i, v in enumerate(values)}
    texts = dict(zip(values, texts_of(list(values)), strict=True))
    means = {v: Interval(tuple(of_v)) for v, of_v in values.items()}
    upright = not numbers and len(values) > HORIZONTAL_NAMES
    with sheet(COLUMN, 3.3 + (LETTER * max(map(len, texts.values())) if upright else 0.0)) as s:
        axes = s.axes[0]
        points = [(places[v], metric) for v, of_v in values.items() for metric in of_v]
        dash: Any = {"marker": "_", "markersize": 16, "markeredgewidth": 1.8, "alpha": 0.8}
        order = sorted(values, key=lambda v: places[v])
        # a line through the means has a meaning only if nothing else was varied
        others = {n for n, of_n in varied_settings(runs).items() if len(of_n) > 1} - {name, SEED}
        width = 1.4 if numbers and name != SEED and not others else 0
        x = [places[v] for v in order]
        axes.plot(x, [means[v].mean for v in order], color=BAR, linewidth=width, **dash)
        white: Any = {"markeredgecolor": "white", "markeredgewidth": 0.8}
        axes.plot(*zip(*points, strict=True), "o", color=BAR, markersize=5.5, **white)
        best = (max if objective.highest else min)(points, key=lambda point: point[1])
        label = f"best {best[1]:.5f}"
        axes.plot(*best, "o", color=BEST, markersize=8, zorder=4, label=label, **white)
        _setting_axis(axes, places, texts, numbers=numbers, upright=upright)
        axes.set(xlabel=short_names(varied_settings(runs)).get(name, name), ylabel=objective.title)
        axes.legend(loc="best", labelcolor=BEST)
        axes.grid(True, axis="y")
        texts_of_means = [f"{texts[v]} {means[v].mean:.5f}" for v in list(values)[:ALT_VALUES]]
        alt = f"Dots, {objective.title} by {name}: {'; '.join(texts_of_means)}."
        return s.finish(
            f"metric_by_{name.replace('/', '.')}",
            title,
            alt,
            "A dot is a run; a dash is the mean of the runs above the same value.",
        )


def _setting_axis(
    axes: "Axes",
    places: Mapping[Any, float],
    texts: Mapping[Any, str],
    *,
    numbers: bool,
    upright: bool,
) -> None:
    """Set the axis of the setting: logarithmic if the numbers span a decade or more."""
    from matplotlib.ticker import NullFormatter, NullLocator

    x = list(places.values())
    if numbers and min(x) > 0 and max(x) / min(x) >= DECADE:
        axes.set_xscale("log")
    if not numbers or len(x) <= len(SERIES_COLORS):
        folded = [textwrap.fill(texts[v], FOLDED, break_on_hyphens=False) for v in places]
        axes.set_xticks(x, [*texts.values()] if upright else folded, rotation=90 * upright)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.12 if len(x) > 1 else 0.5, y=0.16)
    axes.locator_params(axis="y", nbins=6, min_n_ticks=3)


# ---- the cost of a step


def steps(variants: Sequence[Variant]) -> Drawn:
    """Draw the samples per second at the median step, with their spread."""
    rows = [(variant, cost.mean, spread(variant)) for variant, cost in by_speed(variants)]
    if not rows:
        return "Speed: no run has step_ms in its metrics.json"
    times = [ms.mean for v, _, _ in rows if (ms := v.recorded("step_ms"))]
    spec = spec_of(times)
    labels = [
        f"{rate_of(cost)} ({rate_of(r.high)} to {rate_of(r.low)}) samples/s, {ms:{spec}} ms"
        for (_, cost, r), ms in zip(rows, times, strict=True)
    ]
    with horizontal_bars([v.name for v, _, _ in rows], labels) as s:
        whiskers = [(1e3 / r.high, 1e3 / r.low) for _, _, r in rows]
        bars_with_whiskers(s, [1e3 / cost for _, cost, _ in rows], whiskers)
        s.axes[0].set(xlabel="samples a second, all ranks, at the median step", xlim=(0, None))
        _whole_ticks(s)
        return s.finish(
            "steps",
            "Speed",
            "Bars: "
            + "; ".join(f"{v.name} {text}" for (v, _, _), text in zip(rows, labels, strict=True)),
            "Means of a variant's runs, longer is better; waiting for data is part of a step. "
            "Between the ends of a whisker lies the middle half of the steps.",
        )


def phases(variants: Sequence[Variant]) -> Drawn:
    """Draw the milliseconds of each phase of a step: for each variant, or for each rank of a single
    run.
    """
    rows = {name: spent for name, (spent, _) in _records(variants).items()}
    if not rows:
        return f"{TIME}: {NO_RECORD}"
    sums = [sum(row.values()) for row in rows.values()]
    labels = [f"{ms:{spec_of(sums)}} ms" for ms in sums]
    read = "; ".join(
        f"{name}: " + ", ".join(f"{phase} {row[phase]:.3g} ms" for phase in PHASES)
        for name, row in rows.items()
    )
    caption = (
        "Medians of each phase. input: ids become rows, counts and ids travel; lookup: rows "
        "are read and summed; output: waiting for vectors; dense: all that is not the tables', "
        "data included; gradients: they travel to the owners; update: touched rows are written."
    )
    with _stacks(rows, labels, PHASE_COLORS, "ms a training step") as s:
        _whole_ticks(s)
        return s.finish("phases", TIME, f"Stacked bars. {read}.", caption)


def memory(variants: Sequence[Variant]) -> Drawn:
    """Draw the bytes of the tables by kind: on the fullest rank of each variant, or on each rank of
    a single run. The labels add the peak of the process or GPU.
    """
    records = {name: record for name, (_, record) in _records(variants).items()}
    if not records:
        return f"{MEMORY}: {NO_RECORD}"
    rows = {
        name: {
            title: getattr(record, kind) for kind, title in zip(KINDS, MEMORY_COLORS, strict=True)
        }
        for name, record in records.items()
    }
    labels = [
        f"{size(record.tables)}, {record.peak[0]} at most {size(record.peak[1])}"
        for record in records.values()
    ]
    with _stacks(rows, labels, MEMORY_COLORS, "bytes of the tables") as s:
        byte_axis(s.axes[0].xaxis)
        return s.finish(
            "memory",
            MEMORY,
            "Bars: " + "; ".join(map(" ".join, zip(rows, labels, strict=True))),
            "What the tables take on a rank, of a sweep on the fullest. Beside it, what the whole "
            "process (or its GPU) has had at most: libraries, dense part and batches included.",
        )


@contextmanager
def _stacks(
    rows: Mapping[str, Mapping[str, float]],
    labels: Sequence[str],
    colors: Mapping[str, str],
    xlabel: str,
) -> Iterator[Sheet]:
    """Open a figure of named bars, each of the parts in `colors`, with a legend of the parts."""
    with horizontal_bars(list(rows), labels) as s:
        parts = {part: [row[part] for row in rows.values()] for part in colors}
        ends = stacked(s.axes[0], s.positions, parts, colors, THICK, horizontal=True)
        s.axes[0].set(xlabel=xlabel, xlim=(0, max(ends) * 1.04 or 1))
        legend_below(s.figure, s.axes[0])
        yield s


def _whole_ticks(s: Sheet) -> None:
    s.axes[0].locator_params(axis="x", nbins=7, steps=[1, 2, 5, 10])
    s.axes[0].xaxis.set_major_formatter("{x:,.10g}")


def _records(variants: Sequence[Variant]) -> dict[str, tuple[Mapping[str, float], RankMemory]]:
    """Return phases and memory of each rank of a single run; else of each variant the mean of its
    runs' phases, and the memory of its fullest rank.
    """
    records = {v.name: [r.performance for r in v.runs if r.performance] for v in variants}
    every = [record for of_one in records.values() for record in of_one]
    if len(every) == 1 and every[0].ranks <= RANKS_SHOWN:
        pairs = zip(every[0].phases_ms, every[0].memory, strict=True)
        return {f"rank {rank}": pair for rank, pair in enumerate(pairs)}
    return {
        name: (
            {p: sum(run.mean_phases()[p] for run in runs) / len(runs) for p in PHASES},
            max((rank for run in runs for rank in run.memory), key=lambda rank: rank.tables),
        )
        for name, runs in records.items()
        if runs
    }


# the pictures of the cost of a step
COSTS: Sequence[Callable[[Sequence[Variant]], Drawn]] = (steps, phases, memory)
