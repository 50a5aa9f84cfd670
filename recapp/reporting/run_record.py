"""The files of a run in its directory, the times at which they are written, and their content as
types: each JSON file has one class, one reader, one writer.

    resolved.yaml.tmp   the settings for the ranks, until the run claims the directory
    resolved.yaml       the settings, from the claim on
    task.json           the metrics of the run's task, with their titles (recapp/tasks/measures.py)
    performance.json    Performance: time and memory of the run, written at the end
    predicted.json      PlanReport: the plan with the costs that the planner predicts, before the
                        first step
    details.json        metrics by slice and other details of validations, if there are any
                        (recapp/reporting/summary.py)
    metrics.json        RunRecord: the results of the run, written at the end; its metrics lie in
                        `more`
    error.json          Failure: the reason of a failure or a stop; missing if the run ended well

A run claims its directory before it writes the first row of a curve or a checkpoint. The claim
deletes the results of an earlier run, because they would look like results of the new run. Most
errors come before it, while data, plan and memory are checked, and so lose no earlier results. A
run that cannot start keeps the files of an earlier run.
"""

import csv
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from recapp.errors import ConfigError
from recapp.reporting.phases import PHASES
from recapp.settings import option_files
from recapp.settings.records import not_a_setting, record, to_plain
from recapp.settings.whole_file import write_whole
from recapp.tasks.measures import Measures, measures_from
from recapp.tasks.task import CLICK

T = TypeVar("T")

DETAILS_FILE = "details.json"
ERROR_FILE = "error.json"
METRICS_FILE = "metrics.json"
PERFORMANCE_FILE = "performance.json"
PREDICTED_FILE = "predicted.json"
SETTINGS_FILE = "resolved.yaml"
TASK_FILE = "task.json"
# status of a run that has ended well, but with a metric that is not defined on its data
UNDEFINED = "undefined"
KINDS = ("weights", "state", "buffers")  # of the bytes of a rank's tables


@dataclass(frozen=True)
class SplitRead:
    """The files and rows of a split that a run reads (`recapp/dataset/click_rows.py`)."""

    files: int
    first: str
    last: str
    rows: int
    positives: Mapping[str, float]
    positives_of: int


@dataclass(frozen=True)
class LeftOut:
    """Files of a directory that a run does not read, and why."""

    why: str
    count: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class RowsRead:
    """The rows that a run reads."""

    splits: dict[str, SplitRead]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True)
class RunRecord:
    """The content of `metrics.json`: a field that a kind of run does not have is None.

    Args:
        status: `ok`, `undefined` (a metric is not defined on the data), `stopped` or `failed`.
        split: The rows of an evaluation, `val` or `test`.
        rows_scored: The rows that a prediction scored; only predictions have it.
        more: All other entries, the metrics among them: `val_auc`.
    """

    status: str = "ok"
    split: str | None = None
    plan: str | None = None
    ranks: int | None = None
    seed: int | None = None
    steps: int | None = None
    checkpoint: str | None = None
    checkpoint_step: int | None = None
    stopped: str | None = None
    better_epoch: str | None = None
    step_ms: float | None = None
    step_ms_quartiles: tuple[float, ...] | None = None
    samples_per_second: float | None = None
    train_seconds: float | None = None
    rows_read: RowsRead | None = None
    batch_size: int | None = None
    undefined: tuple[str, ...] = ()
    rows: int | None = None
    rows_scored: int | None = None
    rows_per_second: float | None = None
    seconds: float | None = None
    output: str | None = None
    more: Mapping[str, Any] = not_a_setting()

    def value(self, name: str) -> Any:
        """Return a finite number under any name; None if there is none."""
        return finite(self.entry(name))

    def entry(self, name: str) -> Any:
        """Return an entry of the file under any name; None if there is none."""
        return self.more[name] if name in self.more else getattr(self, name, None)


@dataclass(frozen=True)
class Failure:
    """The content of `error.json`: the reason in one line, and `stopped` after a stop."""

    error: str
    status: str = "failed"


@dataclass(frozen=True)
class RankMemory:
    """The bytes of a rank: of its tables by kind, and of its process and GPU."""

    weights: int
    state: int
    buffers: int
    rss: int | None
    rss_peak: int | None
    allocated: int | None
    reserved: int | None
    allocated_peak: int | None

    @property
    def tables(self) -> int:
        """The bytes of the tables."""
        return self.weights + self.state + self.buffers

    @property
    def peak(self) -> tuple[str, int]:
        """The most bytes that the GPU held, or the process on a CPU, with the name of the two."""
        if self.allocated_peak is not None:
            return "GPU", self.allocated_peak
        return "process", self.rss_peak or 0


@dataclass(frozen=True)
class Performance:
    """The content of `performance.json`: medians of the measured steps, without the first ones.

    Args:
        batch_per_rank: The samples of a rank.
        ranks: The number of ranks.
        steps: The number of measured steps.
        step_ms: The milliseconds of a step, with the wait for data.
        phases_ms: For each rank, the milliseconds by phase (`recapp/reporting/phases.py`).
        parts_ms: The same by part; data, counts, ids, vectors and gradients are waits.
        memory: The bytes of each rank.
        sent_bytes: The bytes that each rank sends in a step.
    """

    batch_per_rank: int
    ranks: int
    steps: int
    step_ms: float
    phases_ms: tuple[dict[str, float], ...]
    parts_ms: tuple[dict[str, float], ...]
    memory: tuple[RankMemory, ...]
    sent_bytes: tuple[float, ...]

    def mean_phases(self) -> dict[str, float]:
        """Return the milliseconds of each phase, as the mean over the ranks.

        The mean is right, because a rank that waits in a phase waits for the work of another rank.
        """
        n = len(self.phases_ms)
        return {phase: sum(rank[phase] for rank in self.phases_ms) / n for phase in PHASES}


# ---- a plan


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Predicted milliseconds of a step, by phase (`recapp/reporting/phases.py`) and in all."""

    predicted_ms: float
    input_ms: float
    lookup_ms: float
    output_ms: float
    dense_ms: float
    gradients_ms: float
    update_ms: float

    def ms(self, phase: str) -> float:
        """Return the milliseconds of a phase."""
        return float(getattr(self, f"{phase}_ms"))


@dataclass(frozen=True, kw_only=True)
class PlannedTable(PhaseTimes):
    """A table of a plan, with its own times: as if it were alone.

    Args:
        rows: The rows of the table; of a dynamic table those that are expected.
        plan_rows: The rows that its shards divide.
        ranks: The ranks that have a shard.
        bytes: The bytes of all its shards.
        runner_up: The best other sharding type while all other tables keep their places.
        runner_up_ms: The step with that type; None if the table has no room under it.
        why: The reason for the type, and what the other one would change.
        shards: For each shard its rank, its first and last row and column.
    """

    table: str
    rows: int
    plan_rows: int
    dynamic: bool
    dim: int
    type: str
    mode: str
    row_order: str
    ranks: tuple[int, ...]
    bytes: int
    runner_up: str | None
    runner_up_ms: float | None
    why: str
    shards: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class PlannedRank(PhaseTimes):
    """What a rank carries under a plan."""

    rank: int
    host: int
    bytes: int
    weights: int
    state: int
    buffers: int
    capacity: int | None


@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank sends another in a step."""

    source: int
    target: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """All facts about a plan before it runs: what is printed, drawn, compared and, as
    `predicted.json`, left beside the measurements of a run.

    Args:
        hosts: The ranks of each host.
        reserve: The bytes that tables leave free on each rank, by their use.
        lower_bound_ms: The least possible step; None if it is not known.
        uses: The lookups and the row rule of each table; empty if all tables are used alike.
        between_ranks: The bytes of a step for each pair of ranks that exchanges any.
    """

    name: str
    world_size: int
    hosts: tuple[tuple[int, ...], ...]
    batch_per_rank: int
    hardware: str
    step_ms: float
    lower_bound_ms: float | None
    notes: tuple[str, ...]
    reserve: Mapping[str, int]
    rows: tuple[PlannedTable, ...]
    uses: tuple[Mapping[str, Any], ...]
    ranks: tuple[PlannedRank, ...]
    between_ranks: tuple[Traffic, ...]

    def mean_ms(self, phase: str) -> float:
        """Return the milliseconds of a phase, as the mean over the ranks."""
        return sum(rank.ms(phase) for rank in self.ranks) / len(self.ranks)

    @property
    def sent_bytes(self) -> int:
        """The bytes of a step between all ranks."""
        return sum(pair.bytes for pair in self.between_ranks)


# ---- files


def read_document(path: Path) -> dict[str, Any] | None:
    """Return the content of a run's JSON file; None if the file is missing or incomplete."""
    try:
        content = option_files.read_json(path)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; None if the file is missing or broken."""
    try:
        return option_files.read_yaml(path)
    except (OSError, ValueError):
        return None


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the lines of a CSV file by column; an empty list if the file is missing."""
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except OSError:
        return []


def pending_settings(directory: Path) -> Path:
    """Return the path of the settings' file until the run claims its directory."""
    return directory / f"{SETTINGS_FILE}.tmp"


def claim_directory(directory: Path, measures: Measures | None = None) -> None:
    """Publish this run's settings and delete an earlier run's results. One rank calls it.

    Call it just before the run's first write of a curve or a checkpoint.

    Args:
        directory: The directory of the run.
        measures: The metrics of the run's task; None writes no `task.json`, so that reports take
            the click metrics.
    """
    results = (METRICS_FILE, PERFORMANCE_FILE, PREDICTED_FILE, TASK_FILE, DETAILS_FILE)
    for name in (*results, ERROR_FILE):
        (directory / name).unlink(missing_ok=True)
    publish_settings(directory)
    if measures is not None:
        write_measures(measures, directory)


def write_measures(measures: Measures, directory: Path) -> None:
    """Write `task.json`: the metrics of a run's task, for its report."""
    write_whole(directory / TASK_FILE, json.dumps(measures.plain(), indent=2) + "\n")


def read_measures(*directories: Path) -> Measures:
    """Return the metrics of all tasks of some runs, with the best metric of the first run's task.

    Without any, as before the first run claims its directory, return the click metrics.
    """
    tasks = []
    for directory in directories:
        with suppress(ValueError):
            tasks.append(measures_from(read_document(directory / TASK_FILE) or {}))
    if not tasks:
        return CLICK
    by_name = {measure.name: measure for task in tasks[::-1] for measure in task}
    names = dict.fromkeys(measure.name for task in tasks for measure in task)
    return Measures(tuple(by_name[name] for name in names), tasks[0].best)


def update_settings(settings: Mapping[str, Any], directory: Path) -> None:
    """Overwrite the settings that the ranks have read with the current ones. One rank calls it.

    The current settings include facts from the data, such as the number of rows of each table.
    """
    text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
    write_whole(pending_settings(directory), text)


def publish_settings(directory: Path) -> None:
    """Rename the file of the settings to `resolved.yaml`, unless it has this name already."""
    if pending_settings(directory).is_file():
        os.replace(pending_settings(directory), directory / SETTINGS_FILE)


def write_metrics(metrics: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Write `metrics.json`. After a crash the file is either the old one or the whole new one.

    Args:
        metrics: A mapping with a `status`. JSON has neither nan nor infinity: such a number
            becomes null, `undefined` lists its name, and the status `ok` becomes `undefined`.
        directory: The directory of the run.

    Returns:
        The content of the file.
    """
    undefined = [
        name
        for name, value in metrics.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    written = dict(metrics) | dict.fromkeys(undefined)
    if undefined:
        written |= {
            "undefined": undefined,
            "status": UNDEFINED if metrics["status"] == "ok" else metrics["status"],
        }
    write_whole(directory / METRICS_FILE, json.dumps(written, indent=2, allow_nan=False) + "\n")
    return written


def read_metrics(directory: Path) -> dict[str, Any]:
    """Return the content of `metrics.json`."""
    return dict(option_files.read_json(directory / METRICS_FILE))


def written_at(directory: Path, name: str = METRICS_FILE) -> int | None:
    """Return the time at which a file of a run was written, in nanoseconds; None without the file.

    The time distinguishes a run's own results from an earlier run's results.

    Args:
        directory: The directory of the run.
        name: The name of the file.
    """
    file = directory / name
    return file.stat().st_mtime_ns if file.is_file() else None


# ---- records


def read_record(kind: type[T], path: Path) -> T | None:
    """Return the record of a file; None if the file is missing or incomplete.

    Raises:
        ConfigError: The file has other entries than the record.
    """
    plain = read_document(path)
    if plain is None:
        return None
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    needed = {
        name
        for name, each in known.items()
        if each.default is MISSING and each.default_factory is MISSING
    }
    missing = sorted(needed - plain.keys())
    unknown = [] if "more" in known else sorted(plain.keys() - known.keys())
    if missing or unknown:
        what = f"has no {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise ConfigError(f"{path}: {what}: it is no record of this recapp; run again to write it")
    return record(kind, plain)


def write_record(content: Any, path: Path) -> None:
    """Write a record. After a crash the file is the old one or the whole new one."""
    write_whole(path, json.dumps(to_plain(content), indent=1) + "\n")


def finite(value: Any) -> Any:
    """Return a finite number unchanged, and None for other values: NaN, infinity, text."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
