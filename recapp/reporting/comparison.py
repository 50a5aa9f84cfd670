"""The table that compares the jobs of a sweep, read from the directories that the jobs left.

    SWEEP/multirun.yaml               what was asked for: +plan=mixed,row_wise
    SWEEP/0/.hydra/overrides.yaml     what this job was: +plan=mixed
    SWEEP/0/metrics.json              how it went
    SWEEP/0/error.json                why it failed or was stopped, in one line
    SWEEP/comparison.csv              all of it, a line for each job

It is read anew after each job: no job needs to have told another anything, and an interrupted sweep has its table.
"""

import csv
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.console import Column

METRICS = (
    "ranks",
    "step_ms",
    "samples_per_second",
    "val_auc",
    "val_log_loss",
    "bytes_per_rank",
    "bytes_exchanged_per_step",
)
TABLE = (  # 80 characters hold it
    Column("job", "job"),
    Column("status", "status"),
    Column("what", "plan"),
    Column("ranks", "ranks"),
    Column("step_ms", "step\nms", ".1f"),
    Column("samples_per_second", "samples\n/ s", ",.0f"),
    Column("val_auc", "val\nAUC", ".5f"),
    Column("val_log_loss", "val log\nloss", ".5f"),
    Column("bytes_per_rank", "MB a\nrank", ",.1f", 1e6),
    Column("bytes_exchanged_per_step", "MB a\nstep", ",.2f", 1e6),
)


def compare(sweep: Path) -> list[dict[str, Any]]:
    """A flat record for each job of a sweep so far, in the order of their numbers.

    Args:
        sweep: The directory of the sweep.

    Returns:
        Records with `job, status, plan`, the other settings that were swept, what `METRICS` lists (bytes per rank: the fullest
        rank's), and `error`. The status is what `metrics.json` says (`ok`), `failed`, or `stopped` by Ctrl-C or without a word.
    """
    asked = _overrides(sweep / "multirun.yaml")
    return [record_of(job, asked) for job in jobs_of(sweep)]


def jobs_of(sweep: Path) -> list[Path]:
    """The directories of a sweep's jobs so far, in the order of their numbers; none where it is not a sweep's."""
    jobs = [file.parent.parent for file in sweep.glob("*/.hydra/overrides.yaml")]
    return sorted(jobs, key=lambda job: (int(job.name) if job.name.isdecimal() else sys.maxsize, job.name))


def record_of(job: Path, asked: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The flat record of one run.

    Args:
        job: its directory.
        asked: the overrides of the whole sweep, which are told of no single job; None: the run is none of a sweep.
    """
    said = _overrides(job / ".hydra" / "overrides.yaml")
    swept = {} if asked is None else {name: value for name, value in said.items() if asked.get(name) != value}
    return _record(job, said, swept)


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
    """The records as `TABLE` shows them: what was swept beside the plan stands behind it, under the last part of its name."""
    return [{**record, "what": label(record)} for record in records]


def label(record: Mapping[str, Any], leave_out: Sequence[str] = ()) -> str:
    """The plan and what else was swept, but for some settings: `mixed seed=2`."""
    fixed = {"job", "status", "plan", "error", *METRICS, *leave_out}
    return " ".join([str(record["plan"]), *(f"{name.rpartition('.')[2]}={value}" for name, value in record.items() if name not in fixed)])


def _overrides(path: Path) -> dict[str, str]:
    """`{"plan": "mixed", "seed": "2"}` from a job's list of overrides, or from a sweep's own record of its command line."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        return {}
    lines = content["hydra"]["overrides"]["task"] if isinstance(content, dict) else content or []
    parts = (str(line).lstrip("+").partition("=") for line in lines)
    return {name: value for name, _, value in parts}


def _record(job: Path, said: Mapping[str, str], swept: Mapping[str, str]) -> dict[str, Any]:
    failure = _json(job / "error.json")
    metrics = {} if failure else _json(job / "metrics.json")      # of an earlier run, if there are any beside an error
    status = failure.get("status", "failed") if failure else metrics.get("status", "ok") if metrics else "stopped"
    plan = metrics.get("plan") or said.get("plan") or "automatic"
    measured = {name: metrics.get(name) for name in METRICS}
    if isinstance(measured["bytes_per_rank"], list):
        measured["bytes_per_rank"] = max(measured["bytes_per_rank"], default=None)
    others = {name: _number(value) for name, value in swept.items() if name != "plan"}
    number: int | str = int(job.name) if job.name.isdecimal() else job.name
    return {"job": number, "status": status, "plan": plan, **others, **measured, "error": failure.get("error")}


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


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
