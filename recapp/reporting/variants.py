"""Variants of a sweep: sets of runs that count as one in a comparison.

The runs of a variant differ only in their seed and in settings that have no effect on the compared
number, a metric or the speed. A setting that does not change the trained model, such as the plan,
makes no variants by metric; a learning rate makes none by speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from recapp.reporting.runs import PLAN, SEED, Run, names_of, varied_settings
from recapp.tasks.click import CLICK
from recapp.tasks.measures import VALIDATION, Measures

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
        """Return whether two intervals, each from lowest to highest, are at most `apart` apart."""
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
    return together(runs, same_speed(runs))


def same_speed(runs: Sequence[Run]) -> set[str]:
    """Return the varied settings that do not change the length of a step."""
    return {
        name
        for name, values in varied_settings(runs).items()
        if name != PLAN and not changes_speed(name, values)
    }


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
        measure = self.measures.get(self.name) if self.name.startswith(VALIDATION) else None
        return f"validation {measure.title}" if measure else self.name

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
        alike = [variant.runs for variant in together(good, {name, *names})]
        several = any(len({str(run.setting(name)) for run in some}) > 1 for some in alike)
        if name != SEED and several and all(_equal(some, objective) for some in alike):
            names.append(name)
    return names


def _equal(runs: Sequence[Run], objective: Objective) -> bool:
    values = [value for run in runs if (value := run.value(objective.name)) is not None]
    return max(values) - min(values) < EQUAL


def learned_variants_of(runs: Sequence[Run], objective: Objective) -> list[Variant]:
    """Return the variants that may differ in their metric, each with one run per seed."""
    variants = together(runs, {SEED, *without_effect(runs, objective)})
    return [
        Variant(v.name, tuple({str(run.setting(SEED)): run for run in v.runs[::-1]}.values())[::-1])
        for v in variants
    ]
