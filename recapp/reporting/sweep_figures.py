"""Pictures that compare the strategies of a sweep. A function draws one, or says in a sentence why it cannot.

Bars are means of runs with different seeds, whiskers go from the lowest run to the highest, dots are the runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recapp.reporting import drawing
from recapp.reporting.drawing import INK, QUIET, SERIES_COLORS, Picture, sheet, size
from recapp.reporting.performance import measured_phases
from recapp.reporting.phases import PHASES
from recapp.reporting.strategies import Run, Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR, WIDE = "#0072B2", 9.5
SEEDS = " Bars are means of the runs with different seeds; whiskers go from the lowest run to the highest, dots are the runs."
TITLES = {
    "latency": "Latency by sharding strategy",
    "throughput": "Throughput by sharding strategy",
    "memory": "Memory by sharding strategy",
    "bytes_exchanged": "Bytes exchanged by sharding strategy",
    "phases": "Phases of a training step",
    "predicted": "Predicted against measured",
    "curves": "Loss and AUC",
}
NO_RECORD = "no run has a performance.json, which training writes at its end"
Strategies = Sequence[Strategy]


def latency(strategies: Strategies) -> Picture | str:
    """Median milliseconds of a training step."""
    return _bars(strategies, "latency", "step_ms", "ms per training step (median)", "{:.3g} ms".format,
                 "Time of a whole training step, waiting for data included; shorter is better.")


def throughput(strategies: Strategies) -> Picture | str:
    """Samples per second of all ranks."""
    return _bars(strategies, "throughput", "samples_per_second", "samples per second, all ranks",
                 "{:,.0f}/s".format, "Training samples per second of all ranks together; longer is better.")


def bytes_exchanged(strategies: Strategies) -> Picture | str:
    """Bytes that all ranks send for their tables in a step."""
    return _bars(strategies, "bytes_exchanged", "bytes_exchanged_per_step", "bytes per step, all ranks", size,
                 "What all ranks send each other for the tables in a step: counts, ids, vectors, gradients. Dense gradients are not in it.")


def _bars(strategies: Strategies, name: str, key: str, unit: str, show: Callable[[float], str], caption: str) -> Picture | str:
    measured = [(s.label, found) for s in strategies if (found := s.measure(lambda run: run.record.get(key)))]
    if not measured:
        return f"no run has {key} in its metrics.json"
    with sheet(WIDE, _height(len(measured))) as s:
        axes, most = s.axes[0], max(found.high for _, found in measured)
        for place, (_, found) in enumerate(measured):
            axes.barh(place, found.mean, 0.62, color=BAR)
            if len(found.values) > 1:
                axes.plot([found.low, found.high], [place, place], color=INK, linewidth=1.5, marker="|", markersize=8)
                axes.plot(found.values, [place] * len(found.values), "o", color="white", markeredgecolor=INK, markersize=4.5)
            axes.text(found.high + most * 0.015, place, show(found.mean), va="center")
        _labels(axes, [label for label, _ in measured])
        axes.set(xlabel=unit, xlim=(0, most * 1.16 or 1))
        if key.startswith("bytes"):
            drawing.byte_axis(axes.xaxis)
        else:
            axes.xaxis.set_major_formatter("{x:,.10g}")
        told = "; ".join(f"{label} {show(found.mean)}" for label, found in measured)
        several = any(len(found.values) > 1 for _, found in measured)
        return s.finish(name, TITLES[name], f"Bars, {unit}: {told}.", caption + (SEEDS if several else ""))


def _height(bars: int) -> float:
    return 0.95 + 0.42 * max(2, bars)


def _labels(axes: "Axes", labels: Sequence[str]) -> None:
    """Names of lying bars, the first on top."""
    axes.set_yticks(range(len(labels)), [label if len(label) <= 44 else f"{label[:42]}…" for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")


def memory(strategies: Strategies) -> Picture | str:
    """Bytes of the fullest rank by kind, and what its process has had at most."""
    rows = _by_rank_if_alone(strategies, _memory_of_run)
    if not rows:
        return NO_RECORD
    with sheet(WIDE + 1, _height(len(rows)) + 0.35, columns=2) as s:
        parts, peak = s.axes
        kinds = {name: [row[kind] for _, row in rows] for kind, name in drawing.MEMORY_NAMES.items()}
        colors = {name: drawing.MEMORY_COLORS[kind] for kind, name in drawing.MEMORY_NAMES.items()}
        held = drawing.stacked(parts, range(len(rows)), kinds, colors, 0.62, lying=True)
        _totals(parts, held, size)
        parts.legend(loc="upper center", bbox_to_anchor=(0.5, -0.5 / _height(len(rows))), ncols=3, columnspacing=1.2, handlelength=1.2)
        peaks = [row["peak"] for _, row in rows]
        peak.barh(range(len(rows)), peaks, 0.62, color="#8c8c8c")
        _totals(peak, peaks, size)
        for axes, title in ((parts, "Tables, fullest rank"), (peak, rows[0][1]["peak_of"])):
            drawing.byte_axis(axes.xaxis)
            axes.locator_params(axis="x", nbins=4)
            axes.set_title(title)
        _labels(parts, [label for label, _ in rows])
        _labels(peak, [""] * len(rows))
        told = "; ".join(f"{label} {size(n)}" for (label, _), n in zip(rows, held, strict=True))
        return s.finish("memory", TITLES["memory"], f"Stacked bars of weights, optimiser state and exchange buffers: {told}.",
                        "Left, what the tables take on the rank that holds most; right, what its whole process has had at most: "
                        "interpreter, libraries, dense part and batches included.")


def _memory_of_run(run: Run) -> list[dict[str, Any]]:
    """By rank."""
    if run.performance is None:
        return []
    rows = []
    for rank in run.performance["memory"]:
        gpu = rank["allocated_peak"] is not None
        rows.append({kind: rank[kind] for kind in drawing.MEMORY_NAMES} | {
            "peak": (rank["allocated_peak"] if gpu else rank["rss_peak"]) or 0,
            "peak_of": "Allocated on the GPU, peak" if gpu else "Resident memory, peak"})
    return rows


def _totals(axes: "Axes", values: Sequence[float], show: Callable[[float], str]) -> None:
    most = max(values)
    for place, value in enumerate(values):
        axes.text(value + most * 0.02, place, show(value), va="center", fontsize=8)
    axes.set_xlim(0, most * 1.28 or 1)


def _by_rank_if_alone(strategies: Strategies, of: Callable[[Run], list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """A labelled row for each strategy: of its fullest rank, the mean of its runs. Of a single run each rank has one."""
    if len(strategies) == 1 and len(strategies[0].runs) == 1 and len(rows := of(strategies[0].runs[0])) <= 32:
        return [(f"rank {rank}", row) for rank, row in enumerate(rows)]
    found = []
    for strategy in strategies:
        fullest = [max(ranks, key=_total) for run in strategy.runs if (ranks := of(run))]
        if fullest:
            found.append((strategy.label, {key: value if isinstance(value, str) else sum(row[key] for row in fullest) / len(fullest)
                                           for key, value in fullest[0].items()}))
    return found


def _total(row: Mapping[str, Any]) -> float:
    return float(sum(row[kind] for kind in drawing.MEMORY_NAMES))


def phases(strategies: Strategies) -> Picture | str:
    """Where a step's milliseconds go."""
    rows = _phase_rows(strategies)
    if not rows:
        return NO_RECORD
    with sheet(WIDE, _height(len(rows)) + 0.35) as s:
        axes = s.axes[0]
        spent = drawing.stacked(axes, range(len(rows)), {phase: [row[phase] for _, row in rows] for phase in PHASES}, drawing.PHASE_COLORS,
                                0.62, lying=True)
        _totals(axes, spent, "{:.3g} ms".format)
        axes.set_xlim(0, max(spent) * 1.12)
        _labels(axes, [label for label, _ in rows])
        axes.set_xlabel("ms per training step")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.62 / _height(len(rows))), ncols=6, columnspacing=1.2, handlelength=1.2)
        told = "; ".join(f"{label}: " + ", ".join(f"{phase} {row[phase]:.3g} ms" for phase in PHASES) for label, row in rows)
        return s.finish("phases", TITLES["phases"], f"Stacked bars. {told}.",
                        "Medians of each phase, the mean of the ranks. input: ids become rows, counts and ids travel; lookup: rows are "
                        "read and summed; output: waiting for vectors; dense: all that is not the tables', data included; gradients: "
                        "they travel to the owners; update: touched rows are written.")


def _phase_rows(strategies: Strategies) -> list[tuple[str, dict[str, float]]]:
    if len(strategies) == 1 and len(strategies[0].runs) == 1 and (own := strategies[0].runs[0].performance) and own["ranks"] <= 32:
        return [(f"rank {rank}", spent) for rank, spent in enumerate(own["phases_ms"])]
    return [(s.label, mean) for s in strategies if (mean := _mean_phases(s))]


def _mean_phases(strategy: Strategy) -> dict[str, float] | None:
    runs = [measured_phases(run.performance) for run in strategy.runs if run.performance]
    return {phase: sum(run[phase] for run in runs) / len(runs) for phase in PHASES} if runs else None


def predicted(strategies: Strategies) -> Picture | str:
    """What the planner said of each strategy beside what was measured."""
    rows = []
    for strategy in strategies:
        said = next((found for run in strategy.runs if (found := run.predicted)), None)
        step, spent = strategy.mean(lambda run: run.record["step_ms"]), _mean_phases(strategy)
        if said and step and spent:
            rows.append((strategy.label, said, {"step_ms": step, **spent}))
    if not rows:
        return "no run has a predicted.json of what the planner expected beside its performance.json"
    errors = [said["step_ms"] / step["step_ms"] - 1 for _, said, step in rows]
    with sheet(WIDE + 2, max(3.4, 0.75 + 0.62 * len(rows)), columns=2) as s:
        bars, points = s.axes
        places = [place + shift for place in range(len(rows)) for shift in (-0.2, 0.2)]
        both = [part for _, said, step in rows for part in (said, step)]
        ends = drawing.stacked(bars, places, {phase: [part[phase] for part in both] for phase in PHASES}, drawing.PHASE_COLORS, 0.36,
                               lying=True)
        for place, end, kind in zip(places, ends, ["predicted", "measured"] * len(rows), strict=True):
            bars.text(end + max(ends) * 0.015, place, kind, va="center", fontsize=7.5, color=QUIET)
        _labels(bars, [label for label, _, _ in rows])
        bars.set(xlabel="ms per step, by phase", xlim=(0, max(ends) * 1.2))
        bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=6, columnspacing=0.9, handlelength=1.0, fontsize=8)
        edge = 1.15 * max(part["step_ms"] for part in both)
        points.plot([0, edge], [0, edge], color=QUIET, linestyle="--", linewidth=1)
        for i, (label, expected, found) in enumerate(rows):
            points.plot(expected["step_ms"], found["step_ms"], "osD^vP"[i % 6], color=_color(i), label=label, markersize=8)
        points.set(xlabel="predicted step, ms", ylabel="measured step, ms", xlim=(0, edge), ylim=(0, edge))
        points.grid(True)
        drawing.legend_beside(points)
        told = "; ".join(f"{label} {said['step_ms']:.3g} ms predicted, {step['step_ms']:.3g} ms measured ({error:+.0%})"
                         for (label, said, step), error in zip(rows, errors, strict=True))
        return s.finish("predicted", TITLES["predicted"], f"Bars and points: {told}.",
                        f"Left, each strategy's phases as predicted and as measured; right, whole steps: on the dashed line a prediction "
                        f"is exact. The largest error of a step is {max(errors, key=abs):+.0%}.")


def _color(i: int) -> str:
    return SERIES_COLORS[i % len(SERIES_COLORS)]


def curves(strategies: Strategies) -> Picture | str:
    """Loss and AUC as training went on."""
    panels = {"Log loss": ("train_loss", "val_log_loss"), "AUC": ("train_auc", "val_auc")}
    if not any(run.curve(name) for s in strategies for run in s.runs for names in panels.values() for name in names):
        return "no run has readings of loss or AUC in csv/metrics.csv (logger=csv writes it)"
    with sheet(WIDE + 2, 4.2 + 0.18 * max(0, len(strategies) - 6), columns=2) as s:
        for axes, (title, names) in zip(s.axes, panels.items(), strict=True):
            for i, strategy in enumerate(strategies):
                for name, dashes, marker in zip(names, (":", "-"), ("", "o"), strict=True):
                    _curve(axes, strategy, name, i, len(strategies), dashes, marker)
            axes.set(title=title, xlabel="step")
            axes.margins(x=0.03)
            axes.locator_params(axis="x", integer=True)
            axes.grid(True)
        for label, dashes, marker in (("training", ":", ""), ("validation", "-", "o")):
            s.axes[1].plot([], [], color=QUIET, linestyle=dashes, marker=marker, markersize=4, label=label)
        drawing.legend_beside(s.axes[1])
        last = {s.label: s.mean(lambda run: run.record["val_auc"]) for s in strategies}
        told = "; ".join(f"{label} {auc:.5f}" for label, auc in last.items() if auc is not None)
        several = any(len(strategy.runs) > 1 for strategy in strategies)
        return s.finish("curves", TITLES["curves"], f"Curves of training and validation over steps; validation AUC at the end: {told}.",
                        "Dotted, training since the last reading; with dots, validation. Strategies that train alike lie on each other: "
                        "the first has the widest line." + (" Lines are means of the seeds, bands go from the lowest run to the highest."
                                                       if several else ""))


def _curve(axes: "Axes", strategy: Strategy, name: str, i: int, of: int, dashes: str, marker: str) -> None:
    runs = [curve for run in strategy.runs if (curve := run.curve(name))]
    steps = sorted(set(runs[0]).intersection(*runs[1:])) if runs else []
    if not steps:
        return
    values = [[run[step] for run in runs] for step in steps]
    wide = 1.4 + 1.1 * (min(of, 8) - 1 - i % 8) if marker else 1.4
    label = strategy.label if marker else None
    axes.plot(steps, [sum(v) / len(v) for v in values], color=_color(i), linestyle=dashes, linewidth=wide, label=label,
              marker=marker or ("." if len(steps) == 1 else ""), markersize=3 + wide, zorder=2 + i)
    low, high = [min(v) for v in values], [max(v) for v in values]
    if len(runs) > 1 and len(steps) > 1:
        axes.fill_between(steps, low, high, color=_color(i), alpha=0.18, linewidth=0)
    elif len(runs) > 1:
        axes.vlines(steps, low, high, color=_color(i), linewidth=wide, zorder=2 + i)


FIGURES: dict[str, Callable[[Strategies], Picture | str]] = {
    "latency": latency, "throughput": throughput, "memory": memory, "bytes_exchanged": bytes_exchanged, "phases": phases,
    "predicted": predicted, "curves": curves,
}  # fmt: skip
"""What draws a picture of `TITLES`, or says why it cannot."""
