"""The table that compares the jobs of a sweep, read from the directories that the jobs left.

    SWEEP/multirun.yaml               what was asked for: +plan=mixed,row_wise
    SWEEP/0/.hydra/overrides.yaml     what this job was: +plan=mixed
    SWEEP/0/metrics.json              how it went
    SWEEP/0/error.json                why it failed or was stopped, in one line
    SWEEP/comparison.csv              all of it, a line for each job

It is read anew after each job: no job needs to have told another anything, and an interrupted sweep
has its table. Only which jobs are of the sweep is taken from `comparison.csv`, which lists each
from its start: those of an earlier sweep may lie in the same directory, and times of files do not
survive every copy.
"""

import csv
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.console import Column
from recapp.reporting.performance import read_document
from recapp.settings.renamed import name_of_today

METRICS = (
    "ranks",
    "step_ms",
    "step_ms_q1",
    "step_ms_q3",
    "samples_per_second",
    "val_auc",
    "val_log_loss",
    "bytes_per_rank",
    "bytes_exchanged_per_step",
)
COMPARISON_FILE = "comparison.csv"
RUNNING = "running"  # status of a job that has begun and not ended
# what else a record has was varied by the sweep
FIXED = ("job", "status", "plan", "error", *METRICS)
SEED = "seed"
TABLE = (  # 80 characters hold it
    Column("job", "job"),
    Column("status", "status"),
    Column("what", "run"),
    Column("ranks", "ranks"),
    Column("step_ms", "step\nms", ".1f"),
    Column("samples_per_second", "samples\n/ s", ",.0f"),
    Column("val_auc", "val\nAUC", ".5f"),
    Column("val_log_loss", "val log\nloss", ".5f"),
    Column("bytes_per_rank", "MB a\nrank", ",.1f", 1e6),
    Column("bytes_exchanged_per_step", "MB a\nstep", ",.2f", 1e6),
)


def compare(
    sweep: Path, jobs: Sequence[Path] | None = None, *, running: bool = False
) -> list[dict[str, Any]]:
    """A flat record for each job of a sweep so far, in the order of their numbers.

    Args:
        sweep: The directory of the sweep.
        jobs: The directories of its jobs; by default those that `jobs_of` finds.
        running: Whether the last of them has only begun: what lies there is an earlier run's.

    Returns:
        Records with `job, status, plan`, the other settings that were varied, what `METRICS` lists
        (bytes per rank: the fullest rank's; the quartiles of steps), and `error`. The status is
        what `metrics.json` says (`ok`, or `stopped` with results), `failed`, or `stopped` by Ctrl-C
        or without a word.
    """
    jobs = jobs_of(sweep) if jobs is None else jobs
    said = [overrides_of(job) for job in jobs]
    asked = _overrides(sweep / "multirun.yaml")
    names = varied(said, asked)
    return [record_of(job, names, running=running and job == jobs[-1]) for job in jobs]


def jobs_of(sweep: Path) -> list[Path]:
    """The directories of a sweep's jobs so far, in the order of their numbers; none where it is not
    a sweep's.

    They are those that its `comparison.csv` lists; without one all runs in the directory.
    """
    found = [file.parent.parent for file in sweep.glob("*/.hydra/overrides.yaml")]
    listed = _listed(sweep / COMPARISON_FILE)
    jobs = [job for job in found if job.name in listed] or found
    return sorted(
        jobs, key=lambda job: (int(job.name) if job.name.isdecimal() else sys.maxsize, job.name)
    )


def _listed(path: Path) -> set[str]:
    """The names of the jobs in a table that `write_csv` has written."""
    try:
        with path.open(newline="") as file:
            return {row["job"] for row in csv.DictReader(file) if "job" in row}
    except OSError:
        return set()


def varied(said: Sequence[Mapping[str, str]], asked: Mapping[str, str]) -> list[str]:
    """Return the settings that a sweep varies, without the plan.

    Args:
        said: The overrides of each job so far.
        asked: Those of the sweep, `seed=1,2`, where it has left them (Optuna's sweeper does not):
            so that the first job alone has the columns of the whole sweep.
    """
    names = dict.fromkeys(name for job in said for name in job if name != "plan")
    return [
        name
        for name in names
        if len({job.get(name) for job in said}) > 1
        or (asked and any(name in job and asked.get(name) != job[name] for job in said))
    ]


def record_of(job: Path, names: Sequence[str] = (), *, running: bool = False) -> dict[str, Any]:
    """The flat record of one run.

    Args:
        job: its directory.
        names: the settings that its sweep varies.
        running: Whether it has only begun.
    """
    said = overrides_of(job)
    return _record(job, said, {name: said.get(name) for name in names}, running=running)


def write_csv(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes records as CSV: the new file is there whole, or the old one still is."""
    names = list(dict.fromkeys(name for record in records for name in record))
    last = [name for name in (*METRICS, "error") if name in names]
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*(name for name in names if name not in last), *last])
        writer.writeheader()
        writer.writerows(records)
    os.replace(unfinished, path)


def lines_of_table(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records as `TABLE` shows them: named by what differs between them."""
    return [
        {**record, "what": name} for record, name in zip(records, names_of(records), strict=True)
    ]


def names_of(records: Sequence[Mapping[str, Any]], leave_out: Sequence[str] = ()) -> list[str]:
    """Name each record by what differs between them: `mixed lr=0.01`; by its plan where nothing
    does.

    Args:
        records: Of runs.
        leave_out: Settings that a name does not tell, such as the seed.
    """
    columns = {
        name: [record.get(name) for record in records]
        for name in dict.fromkeys(n for r in records for n in r)
        if name not in leave_out and (name == "plan" or name not in FIXED)
    }
    telling = {
        name: texts_of(values) for name, values in columns.items() if len(set(map(str, values))) > 1
    }
    if not telling:
        return [str(record["plan"]) for record in records]
    short = short_names([name for name in telling if name != "plan"]) | {"plan": ""}
    return [
        " ".join(
            f"{short[name]}={texts[i]}" if short[name] else texts[i]
            for name, texts in telling.items()
            if columns[name][i] is not None
        )
        or "defaults"
        for i in range(len(records))
    ]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return for each dotted name as many of its last parts as tell it from the others: `dense.lr`
    beside `sparse.lr`.
    """
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
    """Return settings as text: numbers with as few digits, from three on, as tell them apart."""
    for digits in range(3, 17):
        texts = [
            f"{value:.{digits}g}" if isinstance(value, float) else str(value) for value in values
        ]
        if len(set(texts)) == len(set(values)):
            return texts
    return [str(value) for value in values]


def overrides_of(job: Path) -> dict[str, str]:
    """Return what the command line said of a job: `{"plan": "mixed", "seed": "2"}`."""
    return _overrides(job / ".hydra" / "overrides.yaml")


def _overrides(path: Path) -> dict[str, str]:
    """`{"plan": "mixed", "seed": "2"}` from a job's list of overrides, or from a sweep's own record
    of its command line, under the names of today.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        return {}
    lines = content["hydra"]["overrides"]["task"] if isinstance(content, dict) else content or []
    parts = (str(line).lstrip("+").partition("=") for line in lines)
    return {name_of_today(name): value for name, _, value in parts}


def _record(
    job: Path, said: Mapping[str, str], swept: Mapping[str, str | None], *, running: bool
) -> dict[str, Any]:
    failure = read_document(job / "error.json") or {}
    metrics = {} if running else read_document(job / "metrics.json") or {}
    if failure and metrics.get("status") != failure.get("status", "failed"):
        metrics = {}  # of an earlier run: this one left its error
    status = (
        failure.get("status", "failed")
        if failure
        else metrics.get("status", "ok")
        if metrics
        else "stopped"
    )
    status = RUNNING if running else status
    plan = metrics.get("plan") or said.get("plan") or "automatic"
    if isinstance(metrics.get("bytes_per_rank"), list):
        metrics["bytes_per_rank"] = max(metrics["bytes_per_rank"], default=None)
    first, third = metrics.get("step_ms_quartiles") or (None, None)
    metrics |= {"step_ms_q1": first, "step_ms_q3": third}
    measured = {name: finite(metrics.get(name)) for name in METRICS}
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
    """Return a number as it is, and None for one that is none: NaN, an infinity, a text."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _number(text: str) -> int | float | str:
    """A number where the text is one; `inf` and `nan` stay text."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return number if math.isfinite(number := float(text)) else text
    except ValueError:
        return text
