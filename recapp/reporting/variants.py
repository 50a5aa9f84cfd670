"""The runs of a directory, and their variants, which reports compare with each other.

    directory of a sweep or of a run -> runs -> variants

A variant is a set of runs that count as one in a comparison: they differ only in their seed and in
settings that have no effect on the compared number, a metric or the speed.

Finds the best runs of a sweep by the metric that chooses checkpoints, and how sure the order is.

A setting that does not change the trained model, such as the plan, makes no variants here. If seeds
differ by as much as variants do, the order of the variants is called noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from recapp.errors import ConfigError
from recapp.reporting import comparison
from recapp.reporting.comparison import SEED, finite, is_setting
from recapp.reporting.record import (
    read_csv,
    read_document,
    read_measures,
    read_performance,
    read_predicted,
    read_yaml,
)
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
LEFT_BY_RUNS = ("metrics.json", "error.json", ".hydra/overrides.yaml")
RATES = "optimizer.*"  # the numbers of this group, rates, decays and epsilons, do not change speed
EQUAL = 5e-6  # metrics are shown with five decimals
NAMED = 4  # variants in a sentence, before "and 12 more"


@dataclass(frozen=True)
class Run:
    """A run that has left results in its directory.

    Args:
        directory: The directory of the run.
        record: The run's record in the comparison.
        name: The settings in which the run differs from the other runs of its sweep, as text.
    """

    directory: Path
    record: dict[str, Any]
    name: str

    @property
    def ended_well(self) -> bool:
        """Whether the run has results to compare; a run that failed or was stopped has none."""
        return str(self.record["status"]) == "ok"

    @property
    def varied(self) -> dict[str, Any]:
        """The settings that the run's sweep varies, without the plan."""
        return {name: value for name, value in self.record.items() if is_setting(name)}

    def setting(self, name: str) -> Any:
        """Return a setting that the run's sweep varies, or the plan; None if this run has the
        default.
        """
        return self.record["plan"] if name == "plan" else self.varied.get(name)

    @property
    def batch_size(self) -> int | None:
        """The number of samples of a batch over all ranks; None if it is not known."""
        found = self.about.get("batch_size") or self.varied.get("dataset.batch_size")
        if found is None and isinstance(dataset := self.settings.get("dataset"), dict):
            found = dataset.get("batch_size")
        return found if isinstance(found, int) else None

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The content of `metrics.json`; empty if this run ended before it wrote the file."""
        found = read_document(self.directory / "metrics.json") or {}
        return found if found.get("status", "ok") == self.record["status"] else {}

    @cached_property
    def measures(self) -> Measures:
        """The metrics of the run's task."""
        return read_measures(self.directory)

    @cached_property
    def split(self) -> str | None:
        """The rows of an evaluation, `val` or `test`; None for a training run."""
        asked = _read_yaml(self.directory / ".hydra" / "config.yaml").get("split")
        found = self.metrics.get("split") or asked
        return str(found) if found else None

    @property
    def about(self) -> dict[str, Any]:
        """The facts about the run (`recapp.reporting.about`); empty if they were not recorded."""
        return self.metrics if "rows_train" in self.metrics else {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that the ranks read; empty if the run has written none."""
        return _read_yaml(self.directory / "resolved.yaml")

    @cached_property
    def performance(self) -> dict[str, Any] | None:
        """The run's record of phases and memory; None without a record."""
        return read_performance(self.directory) if self.metrics else None

    @cached_property
    def predicted(self) -> dict[str, float] | None:
        """The predicted milliseconds of the step and its phases; None without a prediction."""
        return read_predicted(self.directory) if self.metrics else None

    def value(self, name: str) -> float | None:
        """Return a number of `metrics.json`; if it is missing, the last reading of the curve of the
        same name.
        """
        found: float | None = finite(self.metrics.get(name))
        if found is None and self.metrics:
            return next(reversed(self.curve(name).values()), None)
        return found

    def curve(self, name: str) -> dict[int, float]:
        """Return the readings of `csv/metrics.csv` by the number of trained steps."""
        readings = {
            int(row["step"]) + 1: float(row[name])  # loggers count steps from 0
            for row in self._rows
            if row.get(name) and row.get("step")
        }
        return {step: value for step, value in readings.items() if finite(value) is not None}

    @cached_property
    def _rows(self) -> list[dict[str, str]]:
        return read_csv(self.directory / "csv" / "metrics.csv")


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; empty if there is none."""
    found = read_yaml(path)
    return found if isinstance(found, dict) else {}


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

    def overlaps(self, other: "Interval") -> bool:
        """Return whether two intervals, each from lowest to highest, have a number in common."""
        return self.low <= other.high and other.low <= self.high


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
        """Return the interval of an entry of the runs' records; None if no run has the entry."""
        return self.measure(lambda run: run.record[key])


def read_runs(folder: Path) -> list[Run]:
    """Return the runs in a sweep's directory, or the single run in a run's directory.

    Raises:
        ConfigError: The directory does not exist, or has no run.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"path={folder}: there is no such directory; name the directory of a run or of a sweep"
        )
    if jobs := comparison.jobs_of(folder):
        records = comparison.compare(folder)
        return [Run(*one) for one in zip(jobs, records, comparison.names_of(records), strict=True)]
    if any((folder / name).exists() for name in LEFT_BY_RUNS):
        record = comparison.record_of(folder)
        return [Run(folder, record, str(record["plan"]))]
    raise ConfigError(
        f"path={folder}: has no runs; name the directory of a run (with metrics.json) or of a "
        "sweep (its jobs have metrics.json)"
    )


def speed_variants_of(runs: Sequence[Run]) -> list[Variant]:
    """Return the runs that ended well, as variants by the settings that may change speed."""
    return together(runs, same_speed(runs))


def same_speed(runs: Sequence[Run]) -> set[str]:
    """Return the varied settings that do not change the length of a step."""
    names = {name for run in runs for name in run.varied}
    return {
        name for name in names if not changes_speed(name, [run.varied.get(name) for run in runs])
    }


def changes_speed(name: str, values: Sequence[Any]) -> bool:
    """Return whether the length of a step may depend on a setting with these values."""
    numbers = all(isinstance(value, int | float | None) for value in values)
    return not any(fnmatchcase(name, pattern) for pattern in SAME_SPEED) and not (
        fnmatchcase(name, RATES) and numbers
    )


def alike_but_for_plan(variants: Sequence[Variant]) -> list[list[Variant]]:
    """Return the variants in sets. Of the settings that change speed, the members of a set differ
    only in the plan.
    """
    sets: dict[str, list[Variant]] = {}
    for variant in variants:
        first, *others = (run.varied for run in variant.runs)
        shared = {
            name: value
            for name, value in first.items()
            if changes_speed(name, [value]) and all(other.get(name) == value for other in others)
        }
        sets.setdefault(repr((variant.runs[0].record["ranks"], shared)), []).append(variant)
    return list(sets.values())


def together(runs: Sequence[Run], leave_out: set[str]) -> list[Variant]:
    """Return the runs that ended well as variants, without a distinction by some settings.

    Args:
        runs: The runs of a sweep.
        leave_out: The settings that distinguish no variants; `plan` for the plan.
    """
    sets: dict[str, list[Run]] = {}
    for run in runs:
        if run.ended_well:
            kept = {
                name: run.setting(name) for name in ("plan", *run.varied) if name not in leave_out
            }
            sets.setdefault(repr(kept), []).append(run)
    names = comparison.names_of([group[0].record for group in sets.values()], sorted(leave_out))
    return [Variant(name, tuple(group)) for name, group in zip(names, sets.values(), strict=True)]


def varied_settings(runs: Sequence[Run]) -> Mapping[str, list[Any]]:
    """Return the settings that a sweep varied, each with its values in order of appearance."""
    names = dict.fromkeys(name for run in runs for name in run.varied)
    plans = list(dict.fromkeys(run.record["plan"] for run in runs))
    found = {"plan": plans} if len(plans) > 1 else {}
    for name in names:
        found[name] = list(dict.fromkeys(run.varied.get(name) for run in runs))
    return found


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
        found = self.measures.get(self.name) if self.name.startswith(VALIDATION) else None
        return f"validation {found.title}" if found else self.name

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
        found = [(variant, interval) for variant in variants if (interval := self.of(variant))]
        return sorted(found, key=lambda one: one[1].mean, reverse=self.highest)

    def best_runs(self, runs: Sequence[Run]) -> list[Run]:
        """Return the runs with the best metric: several runs if their shown digits are equal."""
        found = [(run, value) for run in runs if (value := run.value(self.name)) is not None]
        best = (max if self.highest else min)((value for _, value in found), default=0.0)
        return [run for run, value in found if abs(value - best) < EQUAL]


def objective_of(run: Run) -> Objective:
    """Return the metric that chooses a run's best checkpoint, `callbacks.checkpoint.monitor` and
    `mode`; the best metric of the task if no callback chooses checkpoints.
    """
    callbacks = run.settings.get("callbacks")
    found = callbacks.get("checkpoint") if isinstance(callbacks, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("monitor"), str):
        best = run.measures
        return Objective(best.objective, highest=best.mode == "max", measures=best)
    mode = found.get("mode", "min")  # Lightning's default
    return Objective(found["monitor"], highest=mode == "max", measures=run.measures)


def without_effect(runs: Sequence[Run], objective: Objective) -> list[str]:
    """Return the varied settings, except the seed, that do not change the metric.

    Runs that differ in such a setting alone have the same metric, to the shown digits.
    """
    found: list[str] = []
    good = [run for run in runs if run.value(objective.name) is not None]
    for name in varied_settings(good):
        alike = [variant.runs for variant in together(good, {name, *found})]
        several = any(len({str(run.setting(name)) for run in group}) > 1 for group in alike)
        if name != SEED and several and all(_equal(group, objective) for group in alike):
            found.append(name)
    return found


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
    same = _no_effect(no_effect, objective)
    if not others:
        every = "All runs reach the same " if no_effect else ""
        title = f"{every}{objective.title}" if every else objective.heading
        return [f"{title}: {_metric(first)}.", *same]
    more = "higher" if objective.highest else "lower"
    verdict = f"Best: {best.name}, {objective.title} {_metric(first)}; {more} is better."
    return [verdict, *_how_sure(ranked), *same]


def _no_effect(names: Sequence[str], objective: Objective) -> list[str]:
    if not names:
        return []
    said = "do not change" if len(names) > 1 else "does not change"
    what = listed(["The plan" if name == "plan" else name for name in names])
    same = f"runs that differ in nothing else have the same {objective.title}"
    return [f"{what} {said} what is learned: {same}."]


def _how_sure(ranked: Sequence[tuple[Variant, Interval]]) -> list[str]:
    """Return sentences on whether the order is more than chance, as far as the seeds show."""
    (best, first), *others = ranked
    close = [variant.name for variant, interval in others if interval.overlaps(first)]
    if all(len(interval.values) == 1 for _, interval in ranked):
        lead = abs(first.mean - others[0][1].mean)
        seeds = "Each was run with one seed, so how much of that is chance is not known"
        return [f"It leads {others[0][0].name} by {lead:.5f}. {seeds}; seed=1,2,3 shows it."]
    if not close:
        return []
    return [
        f"Seeds differ by as much as settings do: the runs of {best.name} and those of "
        f"{listed(close)} overlap, so which of these is best is noise until more seeds are run."
    ]


def _metric(found: Interval) -> str:
    several = f" (mean of {len(found.values)} seeds, {found.low:.5f} to {found.high:.5f})"
    return f"{found.mean:.5f}{several if len(found.values) > 1 else ''}"


def listed(names: Sequence[str]) -> str:
    """Return names as part of a sentence: `a, b and c`; of many names the first ones and a
    count.
    """
    more = len(names) - NAMED
    shown = [*names[:NAMED], f"{more} more"] if more > 0 else list(names)
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]


def objectives_of(runs: Sequence[Run]) -> list[Objective]:
    """Return the metrics that chose the checkpoints of some runs, each once."""
    return list(dict.fromkeys(map(objective_of, runs)))
