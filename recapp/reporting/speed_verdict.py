"""Finds the fastest runs of a sweep, and the part of their order that is noise.

An order is noise if a second measurement could reverse it. No plan changes the dense phase. So if
the dense phase differs between runs that differ in their plan alone, the machine was not equally
fast for them, whatever the spread within a run: this difference is their drift. Two such runs have
an order only if the middle halves of their steps lie further apart than the drift. Two other runs
have an order only if the middle halves do not overlap.

Runs with different batch sizes are compared by samples per second, other runs by the length of a
step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recapp.reporting.drawing import spec_of
from recapp.reporting.record import measured_phases
from recapp.reporting.variants import Interval, Run, Variant, alike_but_for_plan, listed


@dataclass(frozen=True)
class Pace:
    """The number by which speed is compared: milliseconds per step, or samples per second.

    Args:
        by_rate: Whether the number is samples per second, at the median step.
        spec: The format of milliseconds.
    """

    by_rate: bool
    spec: str = ",.1f"

    def of(self, variant: Variant) -> Interval | None:
        """Return the pace of a variant's runs."""
        return variant.measure(lambda run: self._at(run, run.record["step_ms"]))

    def spread(self, variant: Variant) -> Interval | None:
        """Return the interval of the middle half of the steps of a variant's runs; the interval of
        the medians if the runs recorded no quartiles.
        """
        first = variant.measure(lambda run: self._at(run, run.record["step_ms_q1"]))
        third = variant.measure(lambda run: self._at(run, run.record["step_ms_q3"]))
        return Interval(first.values + third.values) if first and third else self.of(variant)

    def show(self, value: float, unit: bool = True) -> str:
        """Return a pace as text, with its unit or without."""
        if self.by_rate:
            return f"{value:,.0f}{' samples/s' if unit else ''}"
        return f"{value:{self.spec}}{' ms' if unit else ''}"

    def between(self, found: Interval) -> str:
        """Return the ends of an interval as text."""
        return f"{self.show(found.low, unit=False)} to {self.show(found.high, unit=False)}"

    def ranked(self, variants: Sequence[Variant]) -> list[tuple[Variant, Interval]]:
        """Return the variants that have a pace, the fastest first."""
        found = [(variant, pace) for variant in variants if (pace := self.of(variant))]
        return sorted(found, key=lambda one: one[1].mean, reverse=self.by_rate)

    def _at(self, run: Run, step_ms: float | None) -> float | None:
        if step_ms is None or not self.by_rate:
            return step_ms
        batch = run.batch_size
        return batch / step_ms * 1e3 if batch and step_ms else None


def pace_of(variants: Sequence[Variant]) -> Pace:
    """Return the pace that compares some variants: a rate if batch sizes differ."""
    batches = {run.batch_size for variant in variants for run in variant.runs}
    medians = (run.record["step_ms"] for variant in variants for run in variant.runs)
    return Pace(len(batches) > 1 and None not in batches, spec_of(medians))


@dataclass(frozen=True)
class Drift:
    """The difference of the dense phase between variants that differ only in their plan.

    Args:
        variants: The variants.
        fastest: The variant whose dense phase is shortest, and its milliseconds.
        slowest: The variant whose dense phase is longest, and its milliseconds.
        spread: The greater distance in milliseconds between the quartiles of these two dense
            phases within a run.
    """

    variants: tuple[Variant, ...]
    fastest: tuple[Variant, float]
    slowest: tuple[Variant, float]
    spread: float

    @property
    def ms(self) -> float:
        """The difference in milliseconds between the slowest and the fastest dense phase."""
        return self.slowest[1] - self.fastest[1]


def drifts(variants: Sequence[Variant]) -> list[Drift]:
    """Return the drift of each set of variants that differ in their plan alone."""
    found = []
    for alike in alike_but_for_plan(variants):
        dense = [(v, ms.mean) for v in alike if (ms := v.measure(_dense_ms))]
        if len(dense) > 1:
            ends = min(dense, key=lambda one: one[1]), max(dense, key=lambda one: one[1])
            spreads = [spread.high for v, _ in ends if (spread := v.measure(_dense_spread))]
            found.append(Drift(tuple(alike), *ends, max(spreads, default=0.0)))
    return found


def _dense_ms(run: Run) -> float | None:
    return measured_phases(run.performance)["dense"] if run.performance else None


def _dense_spread(run: Run) -> float | None:
    ranks: list[dict[str, Any]] = (run.performance or {}).get("phases_quartiles_ms") or []
    between = [rank["dense"][1] - rank["dense"][0] for rank in ranks]
    return sum(between) / len(between) if between else None


def speed_verdict(variants: Sequence[Variant]) -> list[str]:
    """Return sentences about speed: first the fastest variant and whether the order is noise, then
    remarks about the machine.
    """
    pace = pace_of(variants)
    ranked = pace.ranked(variants)
    if len(ranked) < 2:
        return _one_speed(ranked[0][0]) if ranked else ["No run has the length of its steps."]
    fastest, best = ranked[0]
    slowest, worst = ranked[-1]
    others = [v for v, _ in ranked[1:]]
    moved = drifts(variants)
    fast = pace.show(best.mean)
    slow = pace.show(worst.mean)
    if len(near := _tied_with(fastest, variants)) == len(others):
        verdict = (
            f"The order by speed is noise: {fastest.name} is fastest ({fast}) and {slowest.name} "
            f"slowest ({slow}), but {_why_noise(pace, fastest, others, moved)}."
        )
    else:
        factor = max(best.mean, worst.mean) / min(best.mean, worst.mean)
        times = f"{factor:.2f} times {'fewer' if pace.by_rate else 'as long'}"
        a_step = "" if pace.by_rate else " a step"
        verdict = (
            f"Fastest: {fastest.name}, {fast}{a_step}. Slowest: {slowest.name}, {slow}, {times}."
        )
        for end, tied in ("fastest", near), ("slowest", _tied_with(slowest, variants)):
            if tied:
                named = listed([v.name for v in tied])
                verdict += f" {named} cannot be told from the {end}: that difference is noise."
    return [verdict, *(remark for drift in moved if (remark := _remark(drift)))]


def tied_with_fastest(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants that differ from the fastest variant by no more than noise."""
    return _tied_with(pace_of(variants).ranked(variants)[0][0], variants)


def _tied_with(one: Variant, variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants that differ from `one` by no more than noise, the fastest first."""
    pace = pace_of(variants)
    moved = drifts(variants)
    return [v for v, _ in pace.ranked(variants) if v is not one and _tied(pace, one, v, moved)]


def _one_speed(variant: Variant) -> list[str]:
    step = variant.recorded("step_ms")
    rate = variant.recorded("samples_per_second")
    assert step
    samples = f", {rate.mean:,.0f} samples/s" if rate else ""
    if len(step.values) == 1:
        return [f"A step takes {step.mean:.3g} ms{samples}."]
    why = (
        "Speed is not compared: the runs do not differ in anything that changes it. That the "
        f"medians of their steps go from {step.low:.3g} to {step.high:.3g} ms is noise."
    )
    return [f"A step takes {step.mean:.3g} ms on average{samples}.", why]


def _tied(pace: Pace, one: Variant, other: Variant, moved: Sequence[Drift]) -> bool:
    """Return whether the difference of two variants is noise."""
    if _overlap(pace, one, other):
        return True
    drift = max((d.ms for d in moved if one in d.variants and other in d.variants), default=0.0)
    # variants that differ in the plan alone have the same batch size, so steps may be compared
    return drift > 0 and _overlap(Pace(by_rate=False), one, other, drift)


def _overlap(pace: Pace, one: Variant, other: Variant, apart: float = 0.0) -> bool:
    """Return whether the distance between the middle halves of two variants' steps is at most
    `apart`.

    Compare the medians of old runs, because they recorded no quartiles.
    """
    known = all(v.recorded("step_ms_q1") for v in (one, other))
    a, b = (pace.spread(v) if known else pace.of(v) for v in (one, other))
    assert a and b
    return a.low <= b.high + apart and b.low <= a.high + apart


def _why_noise(
    pace: Pace, fastest: Variant, others: Sequence[Variant], moved: Sequence[Drift]
) -> str:
    apart = [v for v in others if not _overlap(pace, fastest, v)]
    if not apart:
        several = "the middle half of the fastest's steps overlaps with that of each other"
        return several if len(others) > 1 else "the middle halves of their steps overlap"
    drift = max(drift.ms for drift in moved if fastest in drift.variants)
    said = "lie no further apart than the dense phase, which no plan changes, differs"
    overlap = "" if len(apart) == len(others) else "overlap or "
    return f"the middle halves of their steps {overlap}{said} ({drift:.3g} ms)"


def _remark(drift: Drift) -> str | None:
    if drift.ms <= drift.spread:
        return None
    fast, least = drift.fastest
    slow, most = drift.slowest
    return (
        f"The dense phase, which no plan changes, took {least:.3g} ms in {fast.name} and "
        f"{most:.3g} ms in {slow.name}; within a run its middle half lies {drift.spread:.2g} ms "
        "apart. So the machine was not equally fast for all: differences below "
        f"{drift.ms:.3g} ms a step are noise."
    )
