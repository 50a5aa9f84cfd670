"""The runs of a directory, read from what they left, and the table that compares them.

    SWEEP/multirun.yaml               the sweep's overrides: +plan=mixed,row_wise
    SWEEP/0/.hydra/overrides.yaml     this job's overrides: +plan=mixed
    SWEEP/0/metrics.json              its results (recapp/reporting/run_record.py)
    SWEEP/0/error.json                the reason of its failure or stop, in one line
    SWEEP/comparison.csv              the table, a line for each job

The table is made again after each job. So jobs need not know each other, and an interrupted sweep
has a table too. `comparison.csv` lists each job from its start, and so tells which jobs belong to
the sweep: jobs of an earlier sweep may lie in the same directory, and the times of files cannot
tell them apart after a copy.
"""

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

from recapp.console import Column
from recapp.errors import ConfigError
from recapp.reporting.run_record import (
    ERROR_FILE,
    METRICS_FILE,
    PERFORMANCE_FILE,
    PREDICTED_FILE,
    SETTINGS_FILE,
    Failure,
    Performance,
    PlanReport,
    RunRecord,
    finite,
    read_csv,
    read_measures,
    read_record,
    read_yaml,
)
from recapp.settings.whole_file import write_whole
from recapp.tasks.measures import Measures

COSTS = ("ranks", "step_ms", "step_ms_q1", "step_ms_q3", "samples_per_second", "train_seconds")
SIZES = ("bytes_per_rank", "bytes_exchanged_per_step")
COMPARISON_FILE = "comparison.csv"
OVERRIDES_FILE = Path(".hydra/overrides.yaml")
RUNNING = "running"  # status of a job that has not ended
SEED = "seed"
PLAN = "plan"


@dataclass(frozen=True)
class Run:
    """A run that has left something in its directory.

    Args:
        directory: The directory of the run.
        overrides: The settings of its command line: `{"plan": "mixed", "seed": "2"}`.
        varied: The settings that the run's sweep varies, without the plan.
        measures: The metrics of the sweep's tasks.
        running: Whether the run has not ended, so that results in its directory belong to an
            earlier run.
        name: The settings in which the run differs from the other runs of its sweep, as text.
    """

    directory: Path
    overrides: Mapping[str, str]
    varied: Mapping[str, Any]
    measures: Measures
    running: bool = False
    name: str = ""

    @cached_property
    def failure(self) -> Failure | None:
        """The reason why the run failed or was stopped."""
        return read_record(Failure, self.directory / ERROR_FILE)

    @cached_property
    def _record(self) -> RunRecord | None:
        content = None if self.running else read_record(RunRecord, self.directory / METRICS_FILE)
        if content and self.failure and self.failure.status != content.status:
            return None  # an earlier run's
        return content

    @property
    def ended(self) -> bool:
        """Whether the run has left results of its own, after a stop too."""
        return self._record is not None

    @property
    def results(self) -> RunRecord:
        """The content of `metrics.json`; empty if the run ended before it wrote the file."""
        return self._record or RunRecord(status="stopped")

    @property
    def status(self) -> str:
        """`ok`, `failed`, `stopped` (by Ctrl-C, or without any message), or `running`."""
        if self.running:
            return RUNNING
        return self.failure.status if self.failure else self.results.status

    @property
    def ended_well(self) -> bool:
        """Whether the run has results to compare; a run that failed or was stopped has none."""
        return self.status == "ok"

    @property
    def plan(self) -> str:
        """The name of the plan."""
        return self.results.plan or self.overrides.get(PLAN) or "automatic"

    @property
    def job(self) -> int | str:
        """The number of the job in its sweep, or the name of the directory."""
        name = self.directory.name
        return int(name) if name.isdecimal() else name

    def setting(self, name: str) -> Any:
        """Return a setting that the run's sweep varies, or the plan; None if this run has the
        default.
        """
        return self.plan if name == PLAN else self.varied.get(name)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The settings that the ranks read; empty if the run has written none."""
        content = read_yaml(self.directory / SETTINGS_FILE)
        return content if isinstance(content, dict) else {}

    @cached_property
    def performance(self) -> Performance | None:
        """The run's record of phases and memory; None without a record."""
        return read_record(Performance, self.directory / PERFORMANCE_FILE) if self.ended else None

    @cached_property
    def predicted(self) -> PlanReport | None:
        """The plan with its predicted costs; None without a prediction."""
        return read_record(PlanReport, self.directory / PREDICTED_FILE) if self.ended else None

    def value(self, name: str) -> float | None:
        """Return a number of `metrics.json`; if it is missing, the last reading of the curve of the
        same name.
        """
        number: float | None = self.results.value(name)
        if number is None and self.ended:
            return next(reversed(self.curve(name).values()), None)
        return number

    def curve(self, name: str) -> dict[int, float]:
        """Return the readings of `csv/metrics.csv` by the number of trained steps."""
        readings = {
            int(row["step"]) + 1: float(row[name])  # loggers count steps from 0
            for row in self._readings
            if row.get(name) and row.get("step")
        }
        return {step: value for step, value in readings.items() if finite(value) is not None}

    @cached_property
    def _readings(self) -> list[dict[str, str]]:
        return read_csv(self.directory / "csv" / "metrics.csv")

    def flat(self) -> dict[str, Any]:
        """Return the run as a line of the comparison: `job, status, plan`, the other varied
        settings, times, the metrics that the task shows, bytes, and `error`.
        """
        quartiles = self.results.step_ms_quartiles or (None, None)
        costs = {name: self.results.value(name) for name in COSTS}
        costs |= {"step_ms_q1": quartiles[0], "step_ms_q3": quartiles[1]}
        measured = {name: self.results.value(name) for name in (*self.measures.shown, *SIZES)}
        error = self.failure.error if self.failure else None
        start = {"job": self.job, "status": self.status, PLAN: self.plan}
        return {**start, **self.varied, **costs, **measured, "error": error}


# ---- reading


def read_runs(folder: Path) -> list[Run]:
    """Return the runs in a sweep's directory, or the single run in a run's directory.

    Raises:
        ConfigError: The directory does not exist, or has no run.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"path={folder}: there is no such directory; name the directory of a run or of a sweep"
        )
    if jobs := jobs_of(folder):
        return compare(folder, jobs)
    if any((folder / name).exists() for name in (METRICS_FILE, ERROR_FILE, OVERRIDES_FILE)):
        run = Run(folder, _overrides(folder / OVERRIDES_FILE), {}, read_measures(folder))
        return [replace(run, name=run.plan)]
    raise ConfigError(
        f"path={folder}: has no runs; name the directory of a run (with metrics.json) or of a "
        "sweep (its jobs have metrics.json)"
    )


def compare(sweep: Path, jobs: Sequence[Path], *, running: bool = False) -> list[Run]:
    """Return the jobs of a sweep so far.

    Args:
        sweep: The directory of the sweep.
        jobs: The directories of its jobs.
        running: Whether the last job still runs.
    """
    overrides = [_overrides(job / OVERRIDES_FILE) for job in jobs]
    names = varied(overrides, _overrides(sweep / "multirun.yaml"))
    measures = read_measures(*jobs)
    runs = [
        Run(
            job,
            of_job,
            {name: _number(of_job[name]) if name in of_job else None for name in names},
            measures,
            running=running and job == jobs[-1],
        )
        for job, of_job in zip(jobs, overrides, strict=True)
    ]
    return [replace(run, name=name) for run, name in zip(runs, names_of(runs), strict=True)]


def jobs_of(sweep: Path) -> list[Path]:
    """Return the directories of a sweep's jobs so far, in the order of their numbers.

    These are the jobs in the sweep's `comparison.csv`; without this file, all runs in the
    directory. The list is empty if the directory does not belong to a sweep.
    """
    every = [file.parent.parent for file in sweep.glob(f"*/{OVERRIDES_FILE}")]
    listed = {row["job"] for row in read_csv(sweep / COMPARISON_FILE) if "job" in row}
    jobs = [job for job in every if job.name in listed] or every
    return sorted(
        jobs, key=lambda job: (int(job.name) if job.name.isdecimal() else sys.maxsize, job.name)
    )


def varied(jobs: Sequence[Mapping[str, str]], sweep: Mapping[str, str]) -> list[str]:
    """Return the names of the settings that a sweep varies, without the plan.

    Args:
        jobs: The overrides of each job so far.
        sweep: The overrides of the sweep, `seed=1,2`; empty if it has written none (Optuna's
            sweeper does not). With them the table has all its columns after the first job.
    """
    names = dict.fromkeys(name for job in jobs for name in job if name != PLAN)
    return [
        name
        for name in names
        if len({job.get(name) for job in jobs}) > 1
        or (sweep and any(name in job and sweep.get(name) != job[name] for job in jobs))
    ]


def _overrides(path: Path) -> dict[str, str]:
    """Return `{"plan": "mixed", "seed": "2"}` from the file of a job's or a sweep's overrides."""
    content = read_yaml(path)
    lines = content["hydra"]["overrides"]["task"] if isinstance(content, dict) else content or []
    parts = (str(line).lstrip("+").partition("=") for line in lines)
    return {name: value for name, _, value in parts}


def _number(text: str) -> int | float | str:
    """Return the number in a text; a text without a number, and `inf` and `nan`, stay text."""
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        return text
    return int(text) if text.lstrip("+-").isdecimal() else number


# ---- names


def varied_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the settings that a sweep varied, each with its values in order of appearance."""
    names = dict.fromkeys(name for run in runs for name in run.varied)
    plans = list(dict.fromkeys(run.plan for run in runs))
    settings: dict[str, list[Any]] = {PLAN: plans} if len(plans) > 1 else {}
    return settings | {
        name: list(dict.fromkeys(run.setting(name) for run in runs)) for name in names
    }


def names_of(runs: Sequence[Run], leave_out: Sequence[str] = ()) -> list[str]:
    """Return a name for each run, made of the settings that differ: `mixed lr=0.01`.

    If no setting differs, the name is the plan.

    Args:
        runs: The runs.
        leave_out: Settings that the names leave out, such as the seed.
    """
    differing = {
        name: values
        for name, values in varied_settings(runs).items()
        if name not in leave_out and len(values) > 1
    }
    if not differing:
        return [run.plan for run in runs]
    short = short_names(differing)
    texts = {name: dict(zip(v, texts_of(v), strict=True)) for name, v in differing.items()}
    return [
        " ".join(
            texts[name][value] if name == PLAN else f"{short[name]}={texts[name][value]}"
            for name in differing
            if (value := run.setting(name)) is not None
        )
        or "defaults"
        for run in runs
    ]


def short_names(names: Mapping[str, Any] | Sequence[str]) -> dict[str, str]:
    """Return for each dotted name its shortest unique ending: `dense.lr`, `sparse.lr`."""
    short = {}
    for name in names:
        parts = name.split(".")
        others = [f".{other}" for other in names if other not in (name, PLAN)]
        endings = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        unique = [end for end in endings if not any(o.endswith(f".{end}") for o in others)]
        short[name] = next(iter(unique), name)
    return short


def texts_of(values: Sequence[Any]) -> list[str]:
    """Return settings as text; numbers get at least three digits, and enough to tell them apart."""
    for digits in range(3, 17):
        texts = [
            f"{value:.{digits}g}" if isinstance(value, float) else str(value) for value in values
        ]
        if len(set(texts)) == len(set(values)):
            return texts
    return [str(value) for value in values]


# ---- the table


def columns_of(measures: Measures) -> list[Column]:
    """Return the columns of the printed table; for clicks it fits into 80 characters."""
    return [
        Column("job", "job"),
        Column("status", "status"),
        Column("what", "run"),
        Column("ranks", "ranks"),
        Column("step_ms", "step\nms", ".1f"),
        Column("samples_per_second", "samples\n/ s", ",.0f"),
        *(
            Column(one.of_validation, "\n".join(f"val {one.title}".rsplit(" ", 1)), ".5f")
            for one in measures
            if one.shown
        ),
        Column("bytes_per_rank", "MB a\nrank", ",.1f", 1e6),
        Column("bytes_exchanged_per_step", "MB a\nstep", ",.2f", 1e6),
    ]


def write_csv(runs: Sequence[Run], path: Path) -> None:
    """Write the comparison as CSV. After a crash the file is the old one or the whole new one."""
    lines = [run.flat() for run in runs]
    text = StringIO(newline="")
    writer = csv.DictWriter(text, list(lines[0]))  # all jobs of a sweep have the same columns
    writer.writeheader()
    writer.writerows(lines)
    write_whole(path, text.getvalue())
