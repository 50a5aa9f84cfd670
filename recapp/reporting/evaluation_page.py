"""The page of an evaluation: the metrics of a checkpoint on validation or test data, and the
settings.

An evaluation trains no steps, so its page has no curves, no phases and no memory.
"""

from recapp.console import Column
from recapp.reporting import page
from recapp.reporting.comparison import finite
from recapp.reporting.settings_table import Defaults, settings_table
from recapp.reporting.variants import Run

ROWS = {"val": "validation", "test": "test"}  # the names of splits
SHOWN_ELSEWHERE = ("ckpt_path", "split")  # settings that other parts of the page show


def evaluation_page(run: Run, defaults: Defaults) -> tuple[str, list[str]]:
    """Return the title and the parts of an evaluation's page.

    Args:
        run: An evaluation that has ended, with or without success.
        defaults: Composes the default settings for some options of groups.
    """
    rows = ROWS.get(str(run.split), str(run.split))
    kept = {name: value for name, value in run.settings.items() if name not in SHOWN_ELSEWHERE}
    without = _without_shown_elsewhere(defaults)
    parts = _opening(run, rows)
    if run.metrics:
        parts += [page.heading("Settings that differ from the defaults")]
        parts += [settings_table(kept, without)]
    parts.append(page.footer(_foot(run)))
    end = {"ok": "", "undefined": "", "failed": " that failed"}
    ended = end.get(str(run.record["status"]), " that was stopped")
    return f"Evaluation on {rows} data{ended}", parts


def _without_shown_elsewhere(defaults: Defaults) -> Defaults:
    return lambda chosen: {k: v for k, v in defaults(chosen).items() if k not in SHOWN_ELSEWHERE}


def _opening(run: Run, rows: str) -> list[str]:
    if not run.metrics:
        return [page.paragraph(run.record["error"] or "It ended without a word.", "failed")]
    found = {
        f"{rows} {measure.title}": value
        for measure in run.measures
        if (value := finite(run.metrics.get(f"{run.split}_{measure.name}"))) is not None
    }
    best = run.measures.get(run.measures.best)
    title = best.title if best else run.measures.best
    value = found.get(f"{rows} {title}")
    lead = f"It has no {title}." if value is None else f"{rows.capitalize()} {title}: {value:.5f}."
    ranks = f"{run.record['ranks']} rank{'s' if run.record['ranks'] != 1 else ''}"
    of = f"Of the checkpoint {run.metrics['checkpoint']}, measured on {ranks}"
    said = [page.paragraph(lead, "lead"), page.paragraph(f"{of}, plan {run.record['plan']}.")]
    lines = [{"name": name, "value": value} for name, value in found.items()]
    columns = [Column("name", "metric"), Column("value", "value", ".5f")]
    return [page.columns(["".join(said), page.table(lines, columns) if lines else ""])]


def _foot(run: Run) -> list[tuple[str, str]]:
    """Return directory and data for the foot: an evaluation records no other facts about itself."""
    dataset = run.settings.get("dataset")
    given = dataset if isinstance(dataset, dict) else {}
    path = given.get(f"{run.split}_path") or given.get("path")
    data = ", ".join(map(str, path)) if isinstance(path, list) else path
    return [("Directory", str(run.directory)), *([("Data", str(data))] if data else [])]
