"""Pictures of the cost of a step: its length and spread, phases, memory, bytes, the prediction.

A function draws one picture of some variants, or returns a sentence with the reason why it cannot.
A bar is the mean of a variant's runs. For a single run, phases and memory have a bar for each rank.
Two more pictures compare measurements by the name of a sharding strategy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recapp.console import size
from recapp.errors import ConfigError
from recapp.reporting import drawing
from recapp.reporting.drawing import (
    INK,
    QUIET,
    Picture,
    Sheet,
    bars_with_whiskers,
    byte_axis,
    horizontal_bars,
    spec_of,
)
from recapp.reporting.phases import PHASES
from recapp.reporting.record import measured_phases
from recapp.reporting.speed_verdict import Pace, pace_of
from recapp.reporting.variants import Interval, Run, Variant

Drawn = Picture | str
"""A picture, or a sentence with the reason why there is none."""

TITLES = {
    "steps": "Speed",
    "phases": "Where a step's time goes",
    "memory": "Memory",
    "bytes_exchanged": "Bytes exchanged",
    "predicted": "Predicted against measured",
}
NO_RECORD = "no run has a performance.json, which training writes at its end"
RANKS_SHOWN = 32  # the most ranks that are shown one by one
Results = Mapping[str, Mapping[str, float]]
"""The measurements by the name of a strategy."""
TIME = "batch_time_ms"
QUARTILES = (f"{TIME}_q1", f"{TIME}_q3")
MEMORY = "memory_gb"


def steps(variants: Sequence[Variant]) -> Drawn:
    """Draw the length of a step with its spread; if batch sizes differ, draw samples per second."""
    pace = pace_of(variants)
    rows = [(v, found) for v in variants if (found := pace.of(v))]
    if not rows:
        return "no run has step_ms in its metrics.json"
    said = [_said_of_steps(pace, v) for v, _ in rows]
    reaches = [pace.spread(v) for v, _ in rows]
    whiskers = [(r.low, r.high) if r and r.high > r.low else None for r in reaches]
    with horizontal_bars([v.name for v, _ in rows], said) as s:
        bars_with_whiskers(s, [found.mean for _, found in rows], whiskers)
        for (_, found), (position,) in zip(rows, s.positions, strict=True):
            if len(found.values) > 1:
                dot: Any = {"color": "white", "markeredgecolor": INK, "markersize": 4}
                s.chart.plot(found.values, [position] * len(found.values), "o", **dot)
        unit = (
            "samples a second, all ranks, at the median step"
            if pace.by_rate
            else "ms a training step (median)"
        )
        s.chart.set(xlabel=unit, xlim=(0, None))
        _whole_ticks(s)
        summary = "; ".join(f"{v.name} {text}" for (v, _), text in zip(rows, said, strict=True))
        return s.finish(
            "steps", TITLES["steps"], f"Bars: {summary}.", _how_to_read_steps(pace, rows)
        )


def _said_of_steps(pace: Pace, variant: Variant) -> str:
    found = pace.of(variant)
    reach = pace.spread(variant)
    other = variant.recorded("step_ms" if pace.by_rate else "samples_per_second")
    assert found and reach
    between = f" ({pace.between(reach)})" if reach.high > reach.low else ""
    text = f"{pace.show(found.mean)}{between}"
    if other is None:
        return text
    beside = f"{other.mean:{pace.spec}} ms" if pace.by_rate else f"{other.mean:,.0f} samples/s"
    return f"{text}, {beside}"


def _how_to_read_steps(pace: Pace, rows: Sequence[tuple[Variant, Interval]]) -> str:
    rate = "Samples of a batch by the median length of a step: longer is better"
    better = rate if pace.by_rate else "Shorter is better"
    said = [f"{better}; waiting for data is part of a step"]
    if any(v.recorded("step_ms_q1") for v, _ in rows):
        said.append("between the ends of a whisker lies the middle half of the steps")
    if any(len(found.values) > 1 for _, found in rows):
        said.append("bars are means of several runs, dots are the runs")
    return "; ".join(said) + "."


def bytes_exchanged(variants: Sequence[Variant]) -> Drawn:
    """Draw the bytes that all ranks send for their tables in a step."""
    rows = [
        (v.name, found.mean) for v in variants if (found := v.recorded("bytes_exchanged_per_step"))
    ]
    if not rows:
        return "no run has bytes_exchanged_per_step in its metrics.json"
    if not any(n for _, n in rows):
        return "nothing travels: each run has one rank"
    with horizontal_bars([name for name, _ in rows], [size(n) for _, n in rows]) as s:
        bars_with_whiskers(s, [n for _, n in rows])
        s.chart.set_xlabel("bytes a step, all ranks")
        s.chart.set_xlim(left=0)
        drawing.byte_axis(s.chart.xaxis)
        summary = "; ".join(f"{name} {size(n)}" for name, n in rows)
        caption = (
            "What all ranks send each other for the tables in a step: counts, ids, vectors, "
            "gradients. Dense gradients are not in it."
        )
        return s.finish("bytes_exchanged", TITLES["bytes_exchanged"], f"Bars: {summary}.", caption)


def phases(variants: Sequence[Variant]) -> Drawn:
    """Draw the milliseconds of each phase of a step: for each variant, or for each rank of a single
    run.
    """
    rows = _phase_rows(variants)
    if not rows:
        return NO_RECORD
    sums = [sum(row.values()) for _, row in rows]
    said = [f"{ms:{drawing.spec_of(sums)}} ms" for ms in sums]
    with horizontal_bars([name for name, _ in rows], said, legend=PHASES) as s:
        _stack(s, [position for (position,) in s.positions], [row for _, row in rows])
        s.chart.set_xlabel("ms a training step")
        drawing.legend_below(s.figure, s.chart)
        summary = "; ".join(
            f"{name}: " + ", ".join(f"{phase} {row[phase]:.3g} ms" for phase in PHASES)
            for name, row in rows
        )
        caption = (
            f"Medians of each phase{'' if _alone(variants) else ', the mean of the ranks'}. "
            "input: ids become rows, counts and ids travel; lookup: rows are read and summed; "
            "output: waiting for vectors; dense: all that is not the tables', data included; "
            "gradients: they travel to the owners; update: touched rows are written."
        )
        return s.finish("phases", TITLES["phases"], f"Stacked bars. {summary}.", caption)


def _stack(
    s: Sheet, positions: Sequence[float], rows: Sequence[Mapping[str, float]]
) -> list[float]:
    parts = {phase: [row[phase] for row in rows] for phase in PHASES}
    ends = drawing.stacked(s.chart, positions, parts, drawing.PHASE_COLORS, 0.2, horizontal=True)
    s.chart.set_xlim(0, max(ends) * 1.04 or 1)
    _whole_ticks(s)
    return ends


def _whole_ticks(s: Sheet) -> None:
    s.chart.locator_params(axis="x", nbins=7, steps=[1, 2, 5, 10])
    s.chart.xaxis.set_major_formatter("{x:,.10g}")


def _alone(variants: Sequence[Variant]) -> Run | None:
    """Return the run if there is only one, with a performance record; else None."""
    runs = [run for variant in variants for run in variant.runs]
    return runs[0] if len(runs) == 1 and runs[0].performance else None


def _phase_rows(variants: Sequence[Variant]) -> list[tuple[str, dict[str, float]]]:
    if (run := _alone(variants)) and run.performance and run.performance["ranks"] <= RANKS_SHOWN:
        return [(f"rank {rank}", spent) for rank, spent in enumerate(run.performance["phases_ms"])]
    return [(variant.name, mean) for variant in variants if (mean := mean_phases(variant))]


def mean_phases(variant: Variant) -> dict[str, float] | None:
    """Return the milliseconds of each phase, as the mean over ranks and runs; None without a
    record.
    """
    runs = [measured_phases(run.performance) for run in variant.runs if run.performance]
    return (
        {phase: sum(run[phase] for run in runs) / len(runs) for phase in PHASES} if runs else None
    )


def memory(variants: Sequence[Variant]) -> Drawn:
    """Draw the bytes of the tables on the fullest rank by kind; the labels add the peak of the
    process or GPU.
    """
    rows = _memory_rows(variants)
    if not rows:
        return NO_RECORD
    kinds = {name: [row[kind] for _, row in rows] for kind, name in drawing.MEMORY_NAMES.items()}
    colors = {name: drawing.MEMORY_COLORS[kind] for kind, name in drawing.MEMORY_NAMES.items()}
    said = [f"{size(_held(row))}, {row['peak_of']} at most {size(row['peak'])}" for _, row in rows]
    with horizontal_bars([name for name, _ in rows], said, legend=list(kinds)) as s:
        ends = drawing.stacked(
            s.chart, [position for (position,) in s.positions], kinds, colors, 0.2, horizontal=True
        )
        s.chart.set_xlim(0, max(ends) * 1.04 or 1)
        s.chart.set_xlabel("bytes of the tables" + ("" if _alone(variants) else ", fullest rank"))
        drawing.byte_axis(s.chart.xaxis)
        drawing.legend_below(s.figure, s.chart)
        summary = "; ".join(f"{name} {text}" for (name, _), text in zip(rows, said, strict=True))
        alt = f"Stacked bars of weights, optimiser state and exchange buffers: {summary}."
        caption = (
            "Bars: what the tables take. In numbers beside it, what the whole process (or its GPU) "
            "has had at most: interpreter, libraries, dense part and batches included."
        )
        return s.finish("memory", TITLES["memory"], alt, caption)


def _memory_rows(variants: Sequence[Variant]) -> list[tuple[str, dict[str, Any]]]:
    if (run := _alone(variants)) and len(ranks := memory_of(run)) <= RANKS_SHOWN:
        return [(f"rank {rank}", row) for rank, row in enumerate(ranks)]
    found = []
    for variant in variants:
        fullest = [max(ranks, key=_held) for run in variant.runs if (ranks := memory_of(run))]
        if fullest:
            mean = {
                key: sum(row[key] for row in fullest) / len(fullest)
                for key in fullest[0]
                if key != "peak_of"
            }
            found.append((variant.name, {**mean, "peak_of": fullest[0]["peak_of"]}))
    return found


def memory_of(run: Run) -> list[dict[str, Any]]:
    """Return for each rank the bytes of its tables by kind, and the peak of its process or GPU."""
    rows = []
    for rank in (run.performance or {}).get("memory", []):
        gpu = rank["allocated_peak"] is not None
        peak = rank["allocated_peak"] if gpu else rank["rss_peak"]
        kept = {kind: rank[kind] for kind in drawing.MEMORY_NAMES}
        rows.append({**kept, "peak": peak or 0, "peak_of": "GPU" if gpu else "process"})
    return rows


def _held(row: Mapping[str, Any]) -> float:
    return float(sum(row[kind] for kind in drawing.MEMORY_NAMES))


def predicted(variants: Sequence[Variant]) -> Drawn:
    """Draw the predicted time of each variant above the measured time."""
    rows = []
    for variant in variants:
        said = next((found for run in variant.runs if (found := run.predicted)), None)
        step = variant.recorded("step_ms")
        spent = mean_phases(variant)
        if said and step and spent:
            rows.append((variant.name, said, {"step_ms": step.mean, **spent}))
    if not rows:
        return (
            "no run has a predicted.json of what the planner expected beside its performance.json"
        )
    errors = [said["step_ms"] / step["step_ms"] - 1 for _, said, step in rows]
    spec = drawing.spec_of(ms["step_ms"] for _, *both in rows for ms in both)
    texts = [_said_of_prediction(said, step, spec) for _, said, step in rows]
    names = [name if len(rows) > 1 else "" for name, _, _ in rows]
    with horizontal_bars(names, texts, bars=2, legend=PHASES) as s:
        both = [part for _, said, step in rows for part in (said, step)]
        positions = [position for pair in s.positions for position in pair]
        ends = _stack(s, positions, both)
        most = max(ends)
        for position, end, kind in zip(
            positions, ends, ["predicted", "measured"] * len(rows), strict=True
        ):
            s.chart.text(end + most * 0.012, position, kind, va="center", color=QUIET)
        s.chart.set(xlabel="ms a training step", xlim=(0, most * 1.17))
        drawing.legend_below(s.figure, s.chart)
        summary = "; ".join(
            f"{name} {text}" for (name, _, _), text in zip(rows, texts, strict=True)
        )
        caption = (
            "Upper bars: what the planner expected of each phase before the first step. Lower "
            "bars: what was measured (medians, which need not add up to that of a whole step). "
            f"The largest error of a step is {max(errors, key=abs):+.0%}."
        )
        return s.finish("predicted", TITLES["predicted"], f"Bars: {summary}.", caption)


def _said_of_prediction(said: Mapping[str, float], step: Mapping[str, float], spec: str) -> str:
    predicted_ms = said["step_ms"]
    measured_ms = step["step_ms"]
    error = predicted_ms / measured_ms - 1
    return f"{predicted_ms:{spec}} ms predicted, {measured_ms:{spec}} ms measured ({error:+.0%})"


def latency_picture(results: Results) -> Picture:
    """Draw the milliseconds of a batch, with the middle half of the readings if it is known.

    Args:
        results: The measurements by strategy: each has `batch_time_ms`, and may have
            `batch_time_ms_q1`, `batch_time_ms_q3` and `throughput`.

    Raises:
        ConfigError: There are no results, or a result has no time.
    """
    times = _entries(results, TIME)
    spec = spec_of(times)
    rates = [
        f", {result['throughput']:,.0f} samples/s" if "throughput" in result else ""
        for result in results.values()
    ]
    said = [f"{ms:{spec}} ms{rate}" for ms, rate in zip(times, rates, strict=True)]
    known = all(key in result for result in results.values() for key in QUARTILES)
    whiskers = [(r[QUARTILES[0]], r[QUARTILES[1]]) for r in results.values() if known]
    with horizontal_bars(list(results), said) as s:
        bars_with_whiskers(s, times, whiskers)
        s.chart.set(xlabel="ms a batch (median)", xlim=(0, None))
        return s.finish(
            "strategy_latency",
            "Latency by sharding strategy",
            f"Bars: {_listed(results, said)}.",
            "Shorter is better"
            + ("; between the ends of a whisker lies the middle half." if known else "."),
        )


def memory_picture(results: Results) -> Picture:
    """Draw the memory of each strategy.

    Args:
        results: The measurements by strategy: each has `memory_gb`, in units of 1e9 bytes.

    Raises:
        ConfigError: There are no results, or a result has no memory.
    """
    held = [gb * 1e9 for gb in _entries(results, MEMORY)]
    said = [size(n) for n in held]
    with horizontal_bars(list(results), said) as s:
        bars_with_whiskers(s, held)
        s.chart.set(xlabel="bytes", xlim=(0, max(held) * 1.04 or 1))
        byte_axis(s.chart.xaxis)
        return s.finish(
            "strategy_memory",
            "Memory by sharding strategy",
            f"Bars: {_listed(results, said)}.",
            "What a rank holds, or the rank with most where that was taken.",
        )


def _entries(results: Results, key: str) -> list[float]:
    """Return the entry of each result under a key."""
    if not results:
        raise ConfigError("results={}: give the measured results by strategy")
    for name, result in results.items():
        if key not in result:
            raise ConfigError(
                f"results[{name!r}] has no {key}: it has {', '.join(sorted(result)) or 'nothing'}"
            )
    return [float(result[key]) for result in results.values()]


def _listed(results: Results, said: Sequence[str]) -> str:
    return "; ".join(f"{name} {text}" for name, text in zip(results, said, strict=True))


FIGURES: dict[str, Callable[[Sequence[Variant]], Drawn]] = {
    "steps": steps,
    "phases": phases,
    "memory": memory,
    "bytes_exchanged": bytes_exchanged,
    "predicted": predicted,
}
"""The functions that draw, by the name of the picture's file."""
