"""What a training run records of its performance: `performance.json`, its writer and its readers.

    {"batch_per_rank": 2048, "ranks": 2, "steps": 90,      measured, without the first ones
     "step_ms": 12.3,                                      median, waiting for data included
     "phases_ms": [{"input": 1.2, ...}, ...],              per rank: medians of
                                                           recapp/reporting/phases.py
     "phases_quartiles_ms": [{"input": [1.1, 1.4], ...}],  per rank: half of the steps lie between
                                                           them
     "parts_ms": [{"data": .1, "route": .4, ...}, ...],    per rank: medians of each mark; data,
                                                           counts, ids, vectors and gradients are
                                                           waits
     "memory": [{"weights", "state", "buffers",            bytes
                 "rss", "rss_peak", "allocated",
                 "reserved", "allocated_peak"}, ...],
     "sent_bytes": [1234, ...]}                            per rank and step

Beside it may lie `predicted.json`, what the planner predicted before the first step: `step_ms` and
`<phase>_ms`, of the step or of each entry of `ranks`.
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
    """Write `performance.json`; after a crash either the whole new file is there or the old one."""
    _write(measured, directory / PERFORMANCE_FILE)


def write_predicted(predicted: Mapping[str, Any], directory: Path) -> None:
    """Write `predicted.json`; after a crash either the whole new file is there or the old one."""
    _write(predicted, directory / PREDICTED_FILE)


def _write(document: Mapping[str, Any], path: Path) -> None:
    write_whole(path, json.dumps(document, indent=1) + "\n")


def read_performance(directory: Path) -> dict[str, Any] | None:
    """Return what a run measured; None where it recorded nothing."""
    return read_document(directory / PERFORMANCE_FILE)


def measured_phases(measured: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds of each phase, the mean of the ranks.

    The mean, because a rank that waits in a phase waits for another rank's work.
    """
    ranks = measured["phases_ms"]
    return {phase: sum(rank[phase] for rank in ranks) / len(ranks) for phase in PHASES}


def read_predicted(directory: Path) -> dict[str, float] | None:
    """Return the milliseconds that were predicted of a run; None where nothing was.

    Returns:
        `step_ms`, and each phase under its name, the mean of the ranks.
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
    """Return the content of a run's JSON file; None where there is none, or half of one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
