"""What a training run records of its performance: `performance.json`, one writer, all readers.

    {"batch_per_rank": 2048, "ranks": 2, "steps": 90,      measured, without the first ones
     "step_ms": 12.3,                                      median, waiting for data included
     "phases_ms": [{"input": 1.2, ...}, ...],              per rank: medians of
                                                           recapp/reporting/phases.py
     "phases_quartiles_ms": [{"input": [1.1, 1.4], ...}],  per rank: half of the steps lie between
                                                           them
     "parts_ms": [{"data": .1, "route": .4, ...}, ...],    the same, mark by mark: data, counts,
                                                           ids, vectors and gradients are waits
     "memory": [{"weights", "state", "buffers",            bytes
                 "rss", "rss_peak", "allocated",
                 "reserved", "allocated_peak"}, ...],
     "sent_bytes": [1234, ...]}                            per rank and step

Beside it may lie `predicted.json`, what the planner said before the first step: `step_ms` and
`<phase>_ms`, of the step or of each entry of `ranks`.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recapp.reporting.phases import PHASES

PERFORMANCE_FILE = "performance.json"
PREDICTED_FILE = "predicted.json"


def write_performance(measured: Mapping[str, Any], directory: Path) -> None:
    """Writes `performance.json`: the new file is there whole, or the old one still is."""
    _write(measured, directory / PERFORMANCE_FILE)


def write_predicted(told: Mapping[str, Any], directory: Path) -> None:
    """Writes `predicted.json`, likewise."""
    _write(told, directory / PREDICTED_FILE)


def _write(document: Mapping[str, Any], path: Path) -> None:
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(unfinished, path)


def read_performance(directory: Path) -> dict[str, Any] | None:
    """What a run measured; None where it recorded nothing."""
    return read_document(directory / PERFORMANCE_FILE)


def measured_phases(measured: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of each phase, the mean of the ranks: one that waits does so for another's
    work.
    """
    ranks = measured["phases_ms"]
    return {phase: sum(rank[phase] for rank in ranks) / len(ranks) for phase in PHASES}


def read_predicted(directory: Path) -> dict[str, float] | None:
    """What was predicted of a run: `step_ms`, and each phase under its name, the mean of the ranks.
    None where nothing was.
    """
    told = read_document(directory / PREDICTED_FILE)
    if not told or "step_ms" not in told:
        return None
    ranks = told.get("ranks")
    entries = ranks if isinstance(ranks, list) and ranks else [told]
    phases = {
        phase: sum(entry.get(f"{phase}_ms") or 0.0 for entry in entries) / len(entries)
        for phase in PHASES
    }
    return {"step_ms": float(told["step_ms"]), **phases}


def read_document(path: Path) -> dict[str, Any] | None:
    """What a JSON file of a run says; None where there is none, or where a run that was cut off
    left half of one.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
