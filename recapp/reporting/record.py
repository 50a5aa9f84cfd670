"""The files of a run in its directory, and the times at which they are written. A run that cannot
start keeps the files of an earlier run.

    resolved.yaml.tmp   the settings for the ranks, until the run claims the directory
    resolved.yaml       the settings, from the claim on
    task.json           the metrics of the run's task, with their titles (recapp/tasks/measures.py)
    performance.json    time and memory of the run, written at the end
    predicted.json      the plan with the costs that the planner predicts, before the first step
    details.json        metrics by slice and other details of validations, if there are any
                        (recapp/reporting/details.py)
    metrics.json        the results of the run, written at the end
    error.json          the reason of a failure or a stop: {"error": one line}, with "status" after
                        a stop; missing if the run ended well

A run claims its directory before it writes the first row of a curve or a checkpoint. The claim
deletes the results of an earlier run, because they would look like results of the new run. Most
errors come before it, while data, plan and memory are checked, and so lose no earlier results.

`recapp/reporting/run_record.py` has a class for each JSON file.
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


def read_document(path: Path) -> dict[str, Any] | None:
    """Return the content of a run's JSON file; None if the file is missing or incomplete."""
    try:
        content = small_files.read_json(path)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_document(content: Mapping[str, Any], path: Path) -> None:
    """Write a JSON file of a run. After a crash the file is either the old one or the whole new
    one.
    """
    write_whole(path, json.dumps(content, indent=1) + "\n")


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
    content: dict[str, Any] = small_files.read_json(directory / METRICS_FILE)
    return content


def written_at(directory: Path, name: str = METRICS_FILE) -> int | None:
    """Return the time at which a file of a run was written, in nanoseconds; None without the file.

    The time distinguishes a run's own results from an earlier run's results.

    Args:
        directory: The directory of the run.
        name: The name of the file.
    """
    file = directory / name
    return file.stat().st_mtime_ns if file.is_file() else None
