"""The table that compares the jobs of a sweep, read from the directories of the jobs.

    SWEEP/multirun.yaml               the sweep's overrides: +plan=mixed,row_wise
    SWEEP/0/.hydra/overrides.yaml     this job's overrides: +plan=mixed
    SWEEP/0/metrics.json              its results
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
from io import StringIO
from pathlib import Path
from typing import Any

from recapp.console import Column
from recapp.reporting.record import (
    ERROR_FILE,
    read_csv,
    read_document,
    read_measures,
    read_yaml,
    write_whole,
)
from recapp.tasks.measures import VALIDATION, Measures

COSTS = ("ranks", "step_ms", "step_ms_q1", "step_ms_q3", "samples_per_second", "train_seconds")
SIZES = ("bytes_per_rank", "bytes_exchanged_per_step")
COMPARISON_FILE = "comparison.csv"
RUNNING = "running"  # status of a job that has not ended
# keys of every record; a record also has validation metrics, and all other keys are varied settings
FIXED = ("job", "status", "plan", "error", *COSTS, *SIZES)
SEED = "seed"


def is_setting(key: str) -> bool:
    """Return whether a key of a record is a setting that the sweep varied."""
    return key not in FIXED and not key.startswith(VALIDATION)


def columns_of(measures: Measures) -> list[Column]:
    """Return the columns of the printed table; for clicks it fits into 80 characters.

    Args:
        measures: The metrics of the task.
    """
    shown = [measure for measure in measures if measure.shown]
    return [
        Column("job", "job"),
        Column("status", "status"),
        Column("what", "run"),
        Column("ranks", "ranks"),
        Column("step_ms", "step\nms", ".1f"),
        Column("samples_per_second", "samples\n/ s", ",.0f"),
        *(
            Column(one.of_validation, "\n".join(f"val {one.title}".rsplit(" ", 1)), ".5f")
            for one in shown
        ),
        Column("bytes_per_rank", "MB a\nrank", ",.1f", 1e6),
        Column("bytes_exchanged_per_step", "MB a\nstep", ",.2f", 1e6),
    ]


def compare(
    sweep: Path, jobs: Sequence[Path] | None = None, *, running: bool = False
) -> list[dict[str, Any]]:
    """Return a flat record for each job of a sweep so far, in the order of their numbers.

    Args:
        sweep: The directory of the sweep.
        jobs: The directories of its jobs; None takes the directories that `jobs_of` finds.
        running: Whether the last job still runs, so that results in its directory belong to an
            earlier run.

    Returns:
        Records with `job, status, plan`, the other varied settings, times, the metrics that the
        task shows, bytes (per rank: of the fullest rank), and `error`. The status is the status in
        `metrics.json` (`ok`, or `stopped` with results), `failed`, or `stopped` by Ctrl-C or
        without any message.
    """
    jobs = jobs_of(sweep) if jobs is None else jobs
    overrides = [overrides_of(job) for job in jobs]
    names = varied(overrides, _overrides(sweep / "multirun.yaml"))
    measures = read_measures(*jobs)
    return [
        _record(
            job,
            found,
            {name: found.get(name) for name in names},
            measures,
            running=running and job == jobs[-1],
        )
        for job, found in zip(jobs, overrides, strict=True)
    ]


def jobs_of(sweep: Path) -> list[Path]:
    """Return the directories of a sweep's jobs so far, in the order of their numbers.

    These are the jobs in the sweep's `comparison.csv`; without this file, all runs in the
    directory. The list is empty if the directory does not belong to a sweep.
    """
    found = [file.parent.parent for file in sweep.glob("*/.hydra/overrides.yaml")]
    listed = {row["job"] for row in read_csv(sweep / COMPARISON_FILE) if "job" in row}
    jobs = [job for job in found if job.name in listed] or found
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
    names = dict.fromkeys(name for job in jobs for name in job if name != "plan")
    return [
        name
        for name in names
        if len({job.get(name) for job in jobs}) > 1
        or (sweep and any(name in job and sweep.get(name) != job[name] for job in jobs))
    ]


def record_of(job: Path) -> dict[str, Any]:
    """Return the flat record of a single run; `compare` lists the keys of a record.

    Args:
        job: The directory of the run.
    """
    return _record(job, overrides_of(job), {}, read_measures(job), running=False)


def write_csv(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write records as CSV. After a crash the file is either the old one or the whole new one."""
    names = list(dict.fromkeys(name for record in records for name in record))
    last = [name for name in names if name in (*COSTS, *SIZES) or name.startswith(VALIDATION)]
    last += ["error"] if "error" in names else []
    text = StringIO(newline="")
    writer = csv.DictWriter(text, [*(name for name in names if name not in last), *last])
    writer.writeheader()
    writer.writerows(records)
    write_whole(path, text.getvalue())


def lines_of_table(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the records with a name in the column `what`, made of the settings that differ."""
    return [
        {**record, "what": name} for record, name in zip(records, names_of(records), strict=True)
    ]


def names_of(records: Sequence[Mapping[str, Any]], leave_out: Sequence[str] = ()) -> list[str]:
    """Return a name for each record, made of the settings that differ: `mixed lr=0.01`.

    If no setting differs, the name is the plan.

    Args:
        records: The records of the runs.
        leave_out: Settings that the names leave out, such as the seed.
    """
    columns = {
        name: [record.get(name) for record in records]
        for name in dict.fromkeys(n for r in records for n in r)
        if name not in leave_out and (name == "plan" or is_setting(name))
    }
    differing = {
        name: texts_of(values) for name, values in columns.items() if len(set(map(str, values))) > 1
    }
    if not differing:
        return [str(record["plan"]) for record in records]
    short = short_names([name for name in differing if name != "plan"]) | {"plan": ""}
    return [
        " ".join(
            f"{short[name]}={texts[i]}" if short[name] else texts[i]
            for name, texts in differing.items()
            if columns[name][i] is not None
        )
        or "defaults"
        for i in range(len(records))
    ]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return for each dotted name its shortest unique ending: `dense.lr`, `sparse.lr`."""
    found = {}
    for name in names:
        parts = name.split(".")
        endings = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        found[name] = next(
            (
                end
                for end in endings
                if not any(f".{other}".endswith(f".{end}") for other in names if other != name)
            ),
            name,
        )
    return found


def texts_of(values: Sequence[Any]) -> list[str]:
    """Return settings as text; numbers get at least three digits, and enough to tell them apart."""
    for digits in range(3, 17):
        texts = [
            f"{value:.{digits}g}" if isinstance(value, float) else str(value) for value in values
        ]
        if len(set(texts)) == len(set(values)):
            return texts
    return [str(value) for value in values]


def overrides_of(job: Path) -> dict[str, str]:
    """Return the settings of a job's command line: `{"plan": "mixed", "seed": "2"}`."""
    return _overrides(job / ".hydra" / "overrides.yaml")


def _overrides(path: Path) -> dict[str, str]:
    """Return `{"plan": "mixed", "seed": "2"}` from the file of a job's or a sweep's overrides."""
    content = read_yaml(path)
    lines = content["hydra"]["overrides"]["task"] if isinstance(content, dict) else content or []
    parts = (str(line).lstrip("+").partition("=") for line in lines)
    return {name: value for name, _, value in parts}


def _record(
    job: Path,
    overrides: Mapping[str, str],
    swept: Mapping[str, str | None],
    measures: Measures,
    *,
    running: bool,
) -> dict[str, Any]:
    failure = read_document(job / ERROR_FILE) or {}
    metrics = {} if running else read_document(job / "metrics.json") or {}
    if failure and metrics.get("status") != failure.get("status", "failed"):
        metrics = {}  # they belong to an earlier run, because this run has left an error
    status = (
        failure.get("status", "failed")
        if failure
        else metrics.get("status", "ok")
        if metrics
        else "stopped"
    )
    status = RUNNING if running else status
    plan = metrics.get("plan") or overrides.get("plan") or "automatic"
    if isinstance(metrics.get("bytes_per_rank"), list):
        metrics["bytes_per_rank"] = max(metrics["bytes_per_rank"], default=None)
    first, third = metrics.get("step_ms_quartiles") or (None, None)
    metrics |= {"step_ms_q1": first, "step_ms_q3": third}
    keys = (*COSTS, *measures.shown, *SIZES)
    measured = {name: finite(metrics.get(name)) for name in keys}
    others = {name: None if value is None else _number(value) for name, value in swept.items()}
    number: int | str = int(job.name) if job.name.isdecimal() else job.name
    return {
        "job": number,
        "status": status,
        "plan": plan,
        **others,
        **measured,
        "error": failure.get("error"),
    }


def finite(value: Any) -> Any:
    """Return a finite number unchanged, and None for other values: NaN, infinity, text."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _number(text: str) -> int | float | str:
    """Return the number in a text; a text without a number, and `inf` and `nan`, stay text."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return number if math.isfinite(number := float(text)) else text
    except ValueError:
        return text
