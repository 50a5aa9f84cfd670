"""Variants of a sweep, sets of runs that count as one in a comparison, and the sentences that
compare them: the best and the fastest variant, and whether their order is noise.

The runs of a variant differ only in their seed and in settings that have no effect on the compared
number, a metric or the speed. A setting that does not change the trained model, such as the plan,
makes no variants by metric; a learning rate makes none by speed.

By metric, an order is noise while the runs of the best variant overlap with those of another.

By speed, it is noise if a second measurement could reverse it: while the middle halves of the steps
overlap. No plan changes the dense phase. So if the dense phases of two variants that differ in
their plan alone differ, the machine was not equally fast for them, and their steps must lie further
apart than that. Speed is compared by samples per second, so batch sizes may differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from recapp.reporting.runs import PLAN, SEED, Run, names_of, varied_settings
from recapp.reporting.summary import SPLITS
from recapp.tasks.measures import Measures
from recapp.tasks.task import CLICK

SAME_SPEED = (  # settings that do not change the length of a step
    SEED,
    "ckpt_path",
    "callbacks",
    "callbacks.*",
    "logger",
    "logger.*",
    "metrics",
    "metrics.*",
    "optimizer/schedule",
    "optimizer.schedule",
    "optimizer.schedule.*",
    "tables.init_range",
    "trainer.max_*",
    "trainer.limit_*",
    "trainer.val_check_interval",
    "trainer.log_every_n_steps",
    "trainer.enable_progress_bar",
    "trainer.gradient_clip_val",
    "dataset.val_*",
)
RATES = "optimizer.*"  # the numbers of this group, rates, decays and epsilons, do not change speed
NAMED = 4  # variants in a sentence, before "and 12 more"
EQUAL = 5e-6  # metrics are shown with five decimals


@dataclass(frozen=True)
class Interval:
    """The values of one number in several runs, with mean, lowest and highest value."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over all runs."""
        return sum(self.values) / len(self.values)

    @property
    def low(self) -> float:
        """The value of the lowest run."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The value of the highest run."""
        return max(self.values)

    def overlaps(self, other: "Interval", apart: float = 0.0) -> bool:
        """Return whether two intervals, each from lowest to highest, lie at most `apart` from each
        other.
        """
        return self.low <= other.high + apart and other.low <= self.high + apart


@dataclass(frozen=True)
class Variant:
    """Runs that ended well and count as one in a comparison.

    Args:
        name: The settings in which the variant differs from the other variants, as text.
        runs: The runs; at least one.
    """

    name: str
    runs: tuple[Run, ...]

    def measure(self, of: Callable[[Run], float | None]) -> Interval | None:
        """Return the interval of a function's values over the variant's runs; None if no run has a
        value.
        """
        values = tuple(float(value) for run in self.runs if (value := of(run)) is not None)
        return Interval(values) if values else None

    def recorded(self, key: str) -> Interval | None:
        """Return the interval of an entry of `metrics.json`; None if no run has the entry."""
        return self.measure(lambda run: run.results.value(key))


def together(runs: Sequence[Run], leave_out: set[str]) -> list[Variant]:
    """Return the runs that ended well as variants, without a distinction by some settings.

    Args:
        runs: The runs of a sweep.
        leave_out: The settings that distinguish no variants; `plan` for the plan.
    """
    sets: dict[str, list[Run]] = {}
    for run in runs:
        if run.ended_well:
            names = [name for name in (PLAN, *run.varied) if name not in leave_out]
            sets.setdefault(repr([run.setting(name) for name in names]), []).append(run)
    names = names_of([alike[0] for alike in sets.values()], sorted(leave_out))
    return [Variant(name, tuple(alike)) for name, alike in zip(names, sets.values(), strict=True)]


# ---- by speed


def speed_variants_of(runs: Sequence[Run]) -> list[Variant]:
    """Return the runs that ended well, as variants by the settings that may change speed."""
    settings = varied_settings(runs).items()
    return together(
        runs, {name for name, vs in settings if name != PLAN and not changes_speed(name, vs)}
    )


def changes_speed(name: str, values: Sequence[Any]) -> bool:
    """Return whether the length of a step may depend on a setting with these values."""
    numbers = all(isinstance(value, int | float | None) for value in values)
    rate = numbers and fnmatchcase(name, RATES)
    return not rate and not any(fnmatchcase(name, pattern) for pattern in SAME_SPEED)


def alike_but_for_plan(variants: Sequence[Variant]) -> list[list[Variant]]:
    """Return the variants in sets. Of the settings that change speed, the members of a set differ
    only in the plan.
    """
    sets: dict[str, list[Variant]] = {}
    for variant in variants:
        first = variant.runs[0]
        shared = [v for name, v in first.varied.items() if changes_speed(name, [v])]
        sets.setdefault(repr((first.results.ranks, shared)), []).append(variant)
    return list(sets.values())


# ---- by metric


@dataclass(frozen=True)
class Objective:
    """The metric by which the best run is chosen.

    Args:
        name: The metric's name in `metrics.json`.
        highest: Whether the highest value is best; else the lowest is.
        measures: The metrics of the task.
    """

    name: str = CLICK.objective
    highest: bool = True
    measures: Measures = CLICK

    @property
    def title(self) -> str:
        """The metric's name as people read it: `validation AUC`."""
        split, _, name = self.name.partition("_")
        measure = self.measures.get(name) if split in SPLITS else None
        return f"{SPLITS[split]} {measure.title}" if measure else self.name

    def named(self, name: str) -> "Objective":
        """Return another metric of the same task."""
        return replace(self, name=name)

    @property
    def heading(self) -> str:
        """The title with a capital letter, to begin a sentence."""
        return f"{self.title[0].upper()}{self.title[1:]}"

    def of(self, variant: Variant) -> Interval | None:
        """Return the metric of a variant's runs."""
        return variant.measure(lambda run: run.value(self.name))

    def ranked(self, variants: Sequence[Variant]) -> list[tuple[Variant, Interval]]:
        """Return the variants that have the metric, the best first."""
        known = [(variant, interval) for variant in variants if (interval := self.of(variant))]
        return sorted(known, key=lambda one: one[1].mean, reverse=self.highest)

    def best_runs(self, runs: Sequence[Run]) -> list[Run]:
        """Return the runs with the best metric: several runs if their shown digits are equal."""
        known = [(run, value) for run in runs if (value := run.value(self.name)) is not None]
        best = (max if self.highest else min)((value for _, value in known), default=0.0)
        return [run for run, value in known if abs(value - best) < EQUAL]


def objective_of(run: Run) -> Objective:
    """Return the metric that chooses a run's best checkpoint, `callbacks.checkpoint.monitor` and
    `mode`; the best metric of the task if no callback chooses checkpoints.
    """
    callbacks = run.settings.get("callbacks")
    chooses = callbacks.get("checkpoint") if isinstance(callbacks, dict) else None
    if not isinstance(chooses, dict) or not isinstance(chooses.get("monitor"), str):
        best = run.measures
        return Objective(best.objective, highest=best.mode == "max", measures=best)
    mode = chooses.get("mode", "min")  # Lightning's default
    return Objective(chooses["monitor"], highest=mode == "max", measures=run.measures)


def without_effect(runs: Sequence[Run], objective: Objective) -> list[str]:
    """Return the varied settings, except the seed, that do not change the metric.

    Runs that differ in such a setting alone have the same metric, to the shown digits.
    """
    names: list[str] = []
    good = [run for run in runs if run.value(objective.name) is not None]
    for name in varied_settings(good):
        alike = together(good, {name, *names})
        several = any(len({str(run.setting(name)) for run in v.runs}) > 1 for v in alike)
        metrics = [interval for _, interval in objective.ranked(alike)]
        if name != SEED and several and all(one.high - one.low < EQUAL for one in metrics):
            names.append(name)
    return names


def learned_variants_of(runs: Sequence[Run], objective: Objective) -> list[Variant]:
    """Return the variants that may differ in their metric, each with one run per seed."""
    variants = together(runs, {SEED, *without_effect(runs, objective)})
    return [
        Variant(v.name, tuple({str(run.setting(SEED)): run for run in v.runs[::-1]}.values())[::-1])
        for v in variants
    ]


# ---- sentences


def listed(names: Sequence[str]) -> str:
    """Return names as part of a sentence: `a, b and c`; of many names the first ones and a
    count.
    """
    more = len(names) - NAMED
    shown = [*names[:NAMED], f"{more} more"] if more > 0 else list(names)
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]


def metric_verdict(
    variants: Sequence[Variant], objective: Objective, no_effect: Sequence[str] = ()
) -> list[str]:
    """Return sentences about the best variant by the metric; the first sentence is the verdict.

    Args:
        variants: The variants to compare.
        objective: The metric.
        no_effect: The varied settings that do not change the metric.
    """
    ranked = objective.ranked(variants)
    if not ranked:
        return [f"No run has {objective.name}, so none is best."]
    (best, first), *others = ranked
    same = []
    if no_effect:
        what = listed(["The plan" if name == PLAN else name for name in no_effect])
        same = [
            f"{what} {'do' if len(no_effect) > 1 else 'does'} not change what is learned: runs "
            f"that differ in nothing else have the same {objective.title}."
        ]
    if not others:
        every = f"All runs reach the same {objective.title}" if no_effect else objective.heading
        return [f"{every}: {_metric(first)}.", *same]
    more = "higher" if objective.highest else "lower"
    verdict = f"Best: {best.name}, {objective.title} {_metric(first)}; {more} is better."
    return [verdict, *_how_sure(ranked), *same]


def _how_sure(ranked: Sequence[tuple[Variant, Interval]]) -> list[str]:
    """Return sentences on whether the order is more than chance, as far as the seeds show."""
    (best, first), *others = ranked
    if all(len(interval.values) == 1 for _, interval in ranked):
        lead = abs(first.mean - others[0][1].mean)
        seeds = "Each was run with one seed, so how much of that is chance is not known"
        return [f"It leads {others[0][0].name} by {lead:.5f}. {seeds}; seed=1,2,3 shows it."]
    close = [variant.name for variant, interval in others if interval.overlaps(first)]
    if not close:
        return []
    return [
        f"Seeds differ by as much as settings do: the runs of {best.name} and those of "
        f"{listed(close)} overlap, so which of these is best is noise until more seeds are run."
    ]


def _metric(interval: Interval) -> str:
    n = len(interval.values)
    several = f" (mean of {n} seeds, {interval.low:.5f} to {interval.high:.5f})" if n > 1 else ""
    return f"{interval.mean:.5f}{several}"


# ---- speed


def ms_a_sample(run: Run, step_ms: float | None) -> float | None:
    """Return the milliseconds of a run for a sample, in which all variants are compared."""
    batch = run.results.batch_size
    return step_ms / batch if step_ms and batch else None


def by_speed(variants: Sequence[Variant]) -> list[tuple[Variant, Interval]]:
    """Return the variants that have the length of a step, each with its milliseconds for a sample,
    the fastest first.
    """
    known = [
        (variant, cost)
        for variant in variants
        if (cost := variant.measure(lambda run: ms_a_sample(run, run.results.step_ms)))
    ]
    return sorted(known, key=lambda one: one[1].mean)


def spread(variant: Variant) -> Interval:
    """Return the milliseconds for a sample of the middle half of the steps of a variant's runs."""
    return Interval(
        tuple(
            cost
            for run in variant.runs
            for ms in run.results.step_ms_quartiles or (run.results.step_ms,)
            if (cost := ms_a_sample(run, ms)) is not None
        )
    )


def rate_of(cost: float) -> str:
    """Return the samples per second of some milliseconds for a sample, as text."""
    return f"{1e3 / cost:,.0f}"


def tied_with(one: Variant, variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants that differ from `one` by no more than noise, the fastest first."""
    alike = next(some for some in alike_but_for_plan(variants) if one in some)
    others = [variant for variant, _ in by_speed(variants) if variant is not one]
    return [
        other
        for other in others
        if spread(one).overlaps(spread(other), _drift(one, other) if other in alike else 0.0)
    ]


def _drift(*variants: Variant) -> float:
    """Return the milliseconds for a sample by which the dense phases of some variants differ."""
    dense = [ms.mean for variant in variants if (ms := variant.measure(_dense))]
    return max(dense) - min(dense) if dense else 0.0


def _dense(run: Run) -> float | None:
    return ms_a_sample(run, run.performance.mean_phases()["dense"]) if run.performance else None


def speed_verdict(variants: Sequence[Variant]) -> list[str]:
    """Return sentences about speed: the fastest variant, and whether the order is noise."""
    ranked = by_speed(variants)
    if len(ranked) < 2:
        return _one_speed(ranked[0][0]) if ranked else ["No run has the length of its steps."]
    (fastest, best), *_, (slowest, worst) = ranked
    fast, slow = (f"{rate_of(cost.mean)} samples/s" for cost in (best, worst))
    near = tied_with(fastest, variants)
    if len(near) == len(ranked) - 1:
        return [
            f"The order by speed is noise: {fastest.name} is fastest ({fast}) and {slowest.name} "
            f"slowest ({slow}), but the middle halves of their steps overlap, or differ by no more "
            "than the dense phase, which no plan changes."
        ]
    verdict = (
        f"Fastest: {fastest.name}, {fast}. Slowest: {slowest.name}, {slow}, "
        f"{worst.mean / best.mean:.2f} times fewer."
    )
    for end, tied in ("fastest", near), ("slowest", tied_with(slowest, variants)):
        if tied:
            names = listed([variant.name for variant in tied])
            verdict += f" {names} cannot be told from the {end}: that difference is noise."
    return [verdict]


def _one_speed(variant: Variant) -> list[str]:
    step = variant.recorded("step_ms")
    assert step
    rates = variant.recorded("samples_per_second")
    samples = f", {rates.mean:,.0f} samples/s" if rates else ""
    text = f"A step takes {step.mean:.3g} ms{samples}."
    why = (
        "Speed is not compared: the runs do not differ in anything that changes it. That the "
        f"medians of their steps go from {step.low:.3g} to {step.high:.3g} ms is noise."
    )
    return [text, why] if len(step.values) > 1 else [text]
