"""The report of a sweep, a training run or an evaluation: `report.html`, and its pictures as PNG.

    FOLDER/**/{metrics.json, performance.json, predicted.json, csv/metrics.csv} -> runs -> variants
        -> verdicts and pictures -> FOLDER/report.html, FOLDER/*.png

Each call makes the report again from the directories, so runs need not know each other. The report
lists failed runs with their errors, and covers all other runs.
"""

from pathlib import Path
from typing import Any

from recapp.errors import ConfigError
from recapp.reporting import comparison, page
from recapp.reporting.evaluation_page import evaluation_page
from recapp.reporting.gallery import Gallery
from recapp.reporting.run_page import run_page
from recapp.reporting.settings_table import Defaults
from recapp.reporting.sweep_page import sweep_page
from recapp.reporting.variants import read_runs

REPORT_FILE = "report.html"
SCORED = "rows_scored"  # a number that only predictions have


def write_report(folder: Path, defaults: Defaults = lambda chosen: {}) -> list[dict[str, Any]]:
    """Write the report of a sweep or a run into its directory.

    Args:
        folder: The directory of a sweep or of a run.
        defaults: Composes the default settings for some options of groups; called only for a
            single run.

    Returns:
        A record for the page and for each picture: `what`, `file` (None if the picture was left
        out) and `left_out` (the reason).

    Raises:
        ConfigError: The directory does not exist, has no run, or has a prediction.
    """
    runs = read_runs(folder)
    if any(SCORED in run.metrics for run in runs):
        raise ConfigError(
            f"path={folder}: holds a prediction, of which there is no page; its numbers are in "
            "metrics.json"
        )
    gallery = Gallery(folder)
    if comparison.jobs_of(folder):
        title, parts = sweep_page(runs, gallery)
    elif runs[0].split:
        title, parts = evaluation_page(runs[0], defaults)
    else:
        title, parts = run_page(runs[0], gallery, defaults)
    path = page.write_page(folder / REPORT_FILE, title, parts)
    return [{"what": "the page", "file": str(path), "left_out": None}, *gallery.made]
