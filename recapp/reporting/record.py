"""What a run leaves in its directory, and from when on: a run that cannot begin leaves what an
earlier one wrote there.

    resolved.yaml.tmp   the settings, as the ranks read them, until the run writes a curve's first
                        row or a checkpoint
    resolved.yaml       the settings, from then on
    performance.json    where time and memory went (recapp/reporting/performance.py); from then to
                        the end there is none
    metrics.json        how it ended; likewise

Data, plan and memory are looked at before the first step, so most mistakes are found while nothing
is lost. Once checkpoints and curves are the new run's, an earlier run's results would stand beside
them as if they were its own.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.reporting.performance import PERFORMANCE_FILE, PREDICTED_FILE

METRICS_FILE = "metrics.json"
SETTINGS_FILE = "resolved.yaml"
# status of a run that has ended well, but with a metric that its data do not determine
UNDEFINED = "undefined"


def unsettled(directory: Path) -> Path:
    """The file that holds the settings until the run takes its directory over."""
    return directory / f"{SETTINGS_FILE}.tmp"


def take_over(directory: Path) -> None:
    """The run writes: its settings take their name, and an earlier run's results go. One rank calls
    it.
    """
    for name in (METRICS_FILE, PERFORMANCE_FILE, PREDICTED_FILE):
        (directory / name).unlink(missing_ok=True)
    settle(directory)


def keep_settings(settings: Mapping[str, Any], directory: Path) -> None:
    """The settings as they are now replace those that the ranks have read. One rank calls it.

    A run has found out more from its data, such as how many rows its tables have.
    """
    text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
    unsettled(directory).write_text(text)


def settle(directory: Path) -> None:
    """The settings take their name, if they have not yet."""
    if unsettled(directory).is_file():
        os.replace(unsettled(directory), directory / SETTINGS_FILE)


def write_metrics(metrics: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Write `metrics.json`: the new file is there whole, or the old one still is.

    Args:
        metrics: flat, with a `status`. JSON has neither nan nor infinity: such a number becomes
            null, `undefined` lists its name, and the status `ok` becomes `undefined`.
        directory: of the run.

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
    unfinished = directory / f"{METRICS_FILE}.tmp"
    unfinished.write_text(json.dumps(written, indent=2, allow_nan=False) + "\n")
    os.replace(unfinished, directory / METRICS_FILE)
    return written


def read_metrics(directory: Path) -> dict[str, Any]:
    """What `metrics.json` says."""
    found: dict[str, Any] = json.loads((directory / METRICS_FILE).read_text())
    return found


def written_at(directory: Path) -> int | None:
    """When `metrics.json` was written, in nanoseconds; None where there is none. Tells a run's own
    from an earlier one's.
    """
    file = directory / METRICS_FILE
    return file.stat().st_mtime_ns if file.is_file() else None
