"""The runs of a directory, and their variants, which reports compare with each other.

    directory of a sweep or of a run -> runs -> variants

A variant is a set of runs that count as one in a comparison: they differ only in their seed and in
settings that have no effect on the compared number, a metric or the speed.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.errors import ConfigError
from recapp.reporting import comparison
from recapp.reporting.comparison import SEED, finite, is_setting
from recapp.reporting.performance import read_document, read_performance, read_predicted
from recapp.reporting.record import read_measures
from recapp.settings.renamed import with_names_of_today
from recapp.tasks.measures import Measures

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
        """The settings that the ranks read, under their current names; empty if the run has written
        none.
        """
        return with_names_of_today(_read_yaml(self.directory / "resolved.yaml"))

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
        return {step: value for step, value in self._readings(name) if finite(value) is not None}

    def _readings(self, name: str) -> Iterator[tuple[int, float]]:
        for row in self._rows:
            if row.get(name) and row.get("step"):
                yield int(row["step"]) + 1, float(row[name])  # loggers count steps from 0

    @cached_property
    def _rows(self) -> list[dict[str, str]]:
        try:
            with open(self.directory / "csv" / "metrics.csv", newline="") as file:
                return list(csv.DictReader(file))
        except OSError:
            return []


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; empty if there is none."""
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        return {}
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
            f"path={folder}: there is no such directory; name that of a run or of a sweep"
        )
    if jobs := comparison.jobs_of(folder):
        records = comparison.compare(folder)
        return [Run(*one) for one in zip(jobs, records, comparison.names_of(records), strict=True)]
    if any((folder / name).exists() for name in LEFT_BY_RUNS):
        record = comparison.record_of(folder)
        return [Run(folder, record, str(record["plan"]))]
    raise ConfigError(
        f"path={folder}: no runs in it; name the directory of a run (it has metrics.json) or of a "
        "sweep (its jobs have)"
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
        shared = _shared(variant.runs)
        sets.setdefault(repr((variant.runs[0].record["ranks"], shared)), []).append(variant)
    return list(sets.values())


def _shared(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the varied settings that may change speed and have the same value in all runs."""
    first, *others = (run.varied for run in runs)
    return {
        name: value
        for name, value in first.items()
        if changes_speed(name, [value]) and all(other.get(name) == value for other in others)
    }


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
