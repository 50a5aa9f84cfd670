"""What a run leaves in its directory, and from when on: a run that cannot begin leaves what an
earlier one wrote there.

    resolved.yaml.tmp   the settings, as the ranks read them, until the run writes a curve's first
                        row or a checkpoint
    resolved.yaml       the settings, from then on
    task.json           the metrics of its task in words (recapp/tasks/measures.py)
    performance.json    where time and memory went (recapp/reporting/performance.py); from then to
                        the end there is none
    metrics.json        how it ended; from then to the end there is none
    error.json          why it failed or was stopped: {"error": one line}, with "status" where it
                        was stopped; none where it ended well

Data, plan and memory are looked at before the first step, so most mistakes are found while nothing
is lost. Once checkpoints and curves are the new run's, an earlier run's results would stand beside
them as if they were its own.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.reporting.performance import PERFORMANCE_FILE, PREDICTED_FILE, read_document
from recapp.reporting.whole_file import write_whole
from recapp.tasks.click import CLICK
from recapp.tasks.measures import Measures, measures_from

ERROR_FILE = "error.json"
METRICS_FILE = "metrics.json"
SETTINGS_FILE = "resolved.yaml"
TASK_FILE = "task.json"
# status of a run that has ended well, but with a metric that its data do not determine
UNDEFINED = "undefined"


def pending_settings(directory: Path) -> Path:
    """Return the path of the settings' file until the run claims its directory."""
    return directory / f"{SETTINGS_FILE}.tmp"


def claim_directory(directory: Path, measures: Measures | None = None) -> None:
    """Publish this run's settings and delete an earlier run's results. One rank calls it.

    A run calls it when it first writes a curve or a checkpoint.

    Args:
        directory: The directory of the run.
        measures: The metrics of its task; None leaves no `task.json`, which is read as clicks.
    """
    for name in (METRICS_FILE, ERROR_FILE, PERFORMANCE_FILE, PREDICTED_FILE, TASK_FILE):
        (directory / name).unlink(missing_ok=True)
    publish_settings(directory)
    if measures is not None:
        write_measures(measures, directory)


def write_measures(measures: Measures, directory: Path) -> None:
    """Write `task.json`: the metrics of a run's task, for its report."""
    write_whole(directory / TASK_FILE, json.dumps(measures.plain(), indent=2) + "\n")


def read_measures(*directories: Path) -> Measures:
    """Return the metrics of the tasks of some runs together, with the best one of the first.

    Where no run has left any they are those of clicks, for which all runs were trained once.
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
    """Write the settings as they are now over those that the ranks have read. One rank calls it.

    By then a run has found out more from its data, such as how many rows its tables have.
    """
    text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
    pending_settings(directory).write_text(text)


def publish_settings(directory: Path) -> None:
    """Rename the file of the settings to `resolved.yaml`, unless that has happened already."""
    if pending_settings(directory).is_file():
        os.replace(pending_settings(directory), directory / SETTINGS_FILE)


def write_metrics(metrics: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Write `metrics.json`; after a crash either the whole new file is there or the old one.

    Args:
        metrics: A flat mapping with a `status`. JSON has neither nan nor infinity: such a number
            becomes null, `undefined` lists its name, and the status `ok` becomes `undefined`.
        directory: The directory of the run.

    Returns:
        What was written.
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
    found: dict[str, Any] = json.loads((directory / METRICS_FILE).read_text())
    return found


def written_at(directory: Path, name: str = METRICS_FILE) -> int | None:
    """Return when a file of a run was written, in nanoseconds; None where there is none.

    The time distinguishes a run's own results from an earlier run's.

    Args:
        directory: The directory of the run.
        name: The file.
    """
    file = directory / name
    return file.stat().st_mtime_ns if file.is_file() else None
