"""The performance record of a training run, `performance.json`: its writer and its readers.

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

The directory may also hold `predicted.json`, the prediction of the planner before the first step:
`step_ms` and `<phase>_ms`, for the step or for each entry of `ranks`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recapp.reporting.phases import PHASES
from recapp.reporting.whole_file import write_whole

PERFORMANCE_FILE = "performance.json"
PREDICTED_FILE = "predicted.json"


def write_performance(measured: Mapping[str, Any], directory: Path) -> None:
    """Write `performance.json`. After a crash the file is the old one or the whole new one."""
    _write(measured, directory / PERFORMANCE_FILE)


def write_predicted(predicted: Mapping[str, Any], directory: Path) -> None:
    """Write `predicted.json`. After a crash the file is the old one or the whole new one."""
    _write(predicted, directory / PREDICTED_FILE)


def _write(document: Mapping[str, Any], path: Path) -> None:
    write_whole(path, json.dumps(document, indent=1) + "\n")


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
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
