"""The files of a run in its directory, and the times at which they are written. A run that cannot
start keeps the files of an earlier run.

    resolved.yaml.tmp   the settings for the ranks, until the run claims the directory
    resolved.yaml       the settings, from the claim on
    task.json           the metrics of the run's task, with their titles (recapp/tasks/measures.py)
    performance.json    time and memory of the run, written at the end
    predicted.json      the prediction of the planner before the first step: `step_ms` and
                        `<phase>_ms`, for the step or for each entry of `ranks`
    details.json        metrics by slice and other details of validations, if there are any
                        (recapp/reporting/details.py)
    metrics.json        the results of the run, written at the end
    error.json          the reason of a failure or a stop: {"error": one line}, with "status" after
                        a stop; missing if the run ended well

A run claims its directory before it writes the first row of a curve or a checkpoint. The claim
deletes the results of an earlier run, because they would look like results of the new run. Most
errors come before it, while data, plan and memory are checked, and so lose no earlier results.

The performance record, `performance.json`:

    {"batch_per_rank": 2048, "ranks": 2, "steps": 90,      measured steps, without the first ones
     "step_ms": 12.3,                                      median, with the wait for data
     "phases_ms": [{"input": 1.2, ...}, ...],              per rank: medians of
                                                           recapp/reporting/phases.py
     "phases_quartiles_ms": [{"input": [1.1, 1.4], ...}],  per rank: half of the steps lie between
                                                           them
     "parts_ms": [{"data": .1, "route": .4, ...}, ...],    per rank: medians of each part; data,
                                                           counts, ids, vectors and gradients are
                                                           waits
     "memory": [{"weights", "state", "buffers",            bytes
                 "rss", "rss_peak", "allocated",
                 "reserved", "allocated_peak"}, ...],
     "sent_bytes": [1234, ...]}                            per rank and step
"""

import csv
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.reporting.phases import PHASES
from recapp.settings import small_files
from recapp.tasks.click import CLICK
from recapp.tasks.measures import Measures, measures_from

DETAILS_FILE = "details.json"
ERROR_FILE = "error.json"
METRICS_FILE = "metrics.json"
PERFORMANCE_FILE = "performance.json"
PREDICTED_FILE = "predicted.json"
SETTINGS_FILE = "resolved.yaml"
TASK_FILE = "task.json"
# status of a run that has ended well, but with a metric that is not defined on its data
UNDEFINED = "undefined"


def write_performance(
    measured: Mapping[str, Any], directory: Path, name: str = PERFORMANCE_FILE
) -> None:
    """Write `performance.json`, or the planner's prediction to `predicted.json`. After a crash the
    file is the old one or the whole new one.
    """
    write_document(measured, directory / name)


def read_performance(directory: Path) -> dict[str, Any] | None:
    """Return the performance record of a run; None if there is none."""
    return read_document(directory / PERFORMANCE_FILE)


def measured_phases(measured: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds of each phase, as the mean over the ranks.

    The mean is right, because a rank that waits in a phase waits for the work of another rank.
    """
    ranks = measured["phases_ms"]
    return {phase: sum(rank[phase] for rank in ranks) / len(ranks) for phase in PHASES}


def read_predicted(directory: Path) -> dict[str, float] | None:
    """Return the predicted milliseconds of a run; None without a prediction.

    Returns:
        `step_ms`, and each phase under its name, as the mean over the ranks.
    """
    found = read_document(directory / PREDICTED_FILE)
    if not found or "step_ms" not in found:
        return None
    ranks = found.get("ranks")
    entries = ranks if isinstance(ranks, list) and ranks else [found]
    phases = {
        phase: sum(entry.get(f"{phase}_ms") or 0.0 for entry in entries) / len(entries)
        for phase in PHASES
    }
    return {"step_ms": float(found["step_ms"]), **phases}


def read_document(path: Path) -> dict[str, Any] | None:
    """Return the content of a run's JSON file; None if the file is missing or incomplete."""
    try:
        found = small_files.read_json(path)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_document(found: Mapping[str, Any], path: Path) -> None:
    """Write a JSON file of a run. After a crash the file is either the old one or the whole new
    one.
    """
    write_whole(path, json.dumps(found, indent=1) + "\n")


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; None if the file is missing or broken."""
    try:
        return small_files.read_yaml(path)
    except (OSError, ValueError):
        return None


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the lines of a CSV file by column; an empty list if the file is missing."""
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except OSError:
        return []


def write_whole(path: Path, text: str) -> None:
    """Write a file. After a crash the file is either the old one or the whole new one.

    Args:
        path: The file.
        text: The content; line ends are written unchanged.

    Raises:
        OSError: The disk is full, or there is no permission; nothing is left of the new file.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(text, newline="")
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


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

    If no run has a `task.json`, return the click metrics: early runs wrote no such file and all
    trained on clicks.
    """
    found = []
    for directory in directories:
        with suppress(ValueError):
            found.append(measures_from(read_document(directory / TASK_FILE) or {}))
    if not found:
        return CLICK
    metrics = {measure.name: measure for each in found[::-1] for measure in each}
    names = dict.fromkeys(measure.name for each in found for measure in each)
    return Measures(tuple(metrics[name] for name in names), found[0].best)


def update_settings(settings: Mapping[str, Any], directory: Path) -> None:
    """Overwrite the settings that the ranks have read with the current ones. One rank calls it.

    The current settings include facts from the data, such as the number of rows of each table.
    """
    text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
    pending_settings(directory).write_text(text)


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
    found: dict[str, Any] = small_files.read_json(directory / METRICS_FILE)
    return found


def written_at(directory: Path, name: str = METRICS_FILE) -> int | None:
    """Return the time at which a file of a run was written, in nanoseconds; None without the file.

    The time distinguishes a run's own results from an earlier run's results.

    Args:
        directory: The directory of the run.
        name: The name of the file.
    """
    file = directory / name
    return file.stat().st_mtime_ns if file.is_file() else None
