"""The runs of a sweep as strategies: those that differ in nothing but their seed are one, with a mean and an interval.

    directory of a sweep or of a run -> runs -> strategies
"""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from recapp.errors import ConfigError
from recapp.reporting import comparison
from recapp.reporting.performance import read_performance, read_predicted

SEED = "seed"


@dataclass(frozen=True)
class Run:
    """A run that was made.

    Args:
        directory: where it wrote.
        record: its line of the comparison.
    """

    directory: Path
    record: dict[str, Any]

    @property
    def label(self) -> str:
        """The plan, and what else was swept but the seed."""
        return comparison.label(self.record, [SEED])

    @property
    def ended_well(self) -> bool:
        """Whether it has results; a run that failed has none, whatever an earlier one left there."""
        return str(self.record["status"]) == "ok"

    @cached_property
    def performance(self) -> dict[str, Any] | None:
        """What it recorded of phases and memory."""
        return read_performance(self.directory) if self.ended_well else None

    @cached_property
    def predicted(self) -> dict[str, float] | None:
        """What the planner said before it."""
        return read_predicted(self.directory) if self.ended_well else None

    def curve(self, name: str) -> dict[int, float]:
        """Readings of `csv/metrics.csv` by step; empty where it has none."""
        return {step: value for step, value in self._readings(name) if math.isfinite(value)}

    def _readings(self, name: str) -> Iterator[tuple[int, float]]:
        for row in self._rows:
            if row.get(name) and row.get("step"):
                yield int(row["step"]), float(row[name])

    @cached_property
    def _rows(self) -> list[dict[str, str]]:
        try:
            with open(self.directory / "csv" / "metrics.csv", newline="") as file:
                return list(csv.DictReader(file))
        except OSError:
            return []


@dataclass(frozen=True)
class Interval:
    """The mean of several runs, the lowest and the highest, and each of them."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of all runs."""
        return sum(self.values) / len(self.values)

    @property
    def low(self) -> float:
        """Of the lowest run."""
        return min(self.values)

    @property
    def high(self) -> float:
        """Of the highest run."""
        return max(self.values)

    def show(self, spec: str) -> str:
        """`12.3 (12.1 to 12.6)`, or one number of one run."""
        mean = format(self.mean, spec)
        return mean if len(self.values) == 1 else f"{mean} ({self.low:{spec}} to {self.high:{spec}})"


@dataclass(frozen=True)
class Strategy:
    """Runs that differ in nothing but their seed, and ended well.

    Args:
        label: what they have in common.
        runs: at least one.
    """

    label: str
    runs: tuple[Run, ...]

    def measure(self, of: Callable[[Run], float | None]) -> Interval | None:
        """A number of its runs; None where no run has it."""
        values = tuple(float(value) for run in self.runs if (value := of(run)) is not None)
        return Interval(values) if values else None

    def mean(self, of: Callable[[Run], float | None]) -> float | None:
        """The mean of a number of its runs; None where no run has it."""
        found = self.measure(of)
        return found.mean if found else None


def read_runs(folder: Path) -> list[Run]:
    """The runs of a sweep's directory, or the one of a run's.

    Raises:
        ConfigError: there is no such directory, or no run in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"path={folder}: there is no such directory; name that of a run or of a sweep")
    if jobs := comparison.jobs_of(folder):
        return [Run(job, record) for job, record in zip(jobs, comparison.compare(folder), strict=True)]
    if any((folder / name).exists() for name in ("metrics.json", "error.json", ".hydra/overrides.yaml")):
        return [Run(folder, comparison.record_of(folder))]
    raise ConfigError(f"path={folder}: no runs in it; name the directory of a run (it has metrics.json) or of a sweep (its jobs have)")


def strategies_of(runs: Sequence[Run]) -> list[Strategy]:
    """The strategies among runs that ended well, in order of appearance."""
    good = [run for run in runs if run.ended_well]
    return [Strategy(label, tuple(run for run in good if run.label == label)) for label in dict.fromkeys(run.label for run in good)]
