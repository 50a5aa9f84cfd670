"""The report of a sweep, or of one run: `report.html`, and its pictures as PNG beside `comparison.csv`.

    SWEEP/*/{metrics.json, performance.json, predicted.json, csv/metrics.csv} -> strategies -> pictures -> SWEEP/report.html, SWEEP/*.png

It is made anew from the directories whenever somebody asks: no run has told another anything. What failed is said, and spoils nothing.
"""

from pathlib import Path
from typing import Any

from recapp.console import Column, progress
from recapp.reporting import comparison, page
from recapp.reporting.strategies import Run, Strategy, read_runs, strategies_of
from recapp.reporting.sweep_figures import FIGURES, SEEDS, TITLES

REPORT_FILE = "report.html"
SHOWN_FAILURES = 5          # before the first picture
SUMMARY = (  # of a strategy: key of a run's record, heading, how it is shown, divided by
    ("step_ms", "step, ms", ".3g", 1.0), ("samples_per_second", "samples / s", ",.0f", 1.0), ("val_auc", "validation AUC", ".5f", 1.0),
    ("val_log_loss", "validation log loss", ".5f", 1.0), ("bytes_per_rank", "MB, fullest rank", ",.1f", 1e6),
    ("bytes_exchanged_per_step", "MB a step", ",.2f", 1e6),
)


def write_report(folder: Path) -> list[dict[str, Any]]:
    """Writes the report of a sweep or a run into its directory.

    Args:
        folder: of a sweep or of a run.

    Returns:
        A record for each picture and one for the page: `what`, `file` (None where it was left out) and `left_out` (why).

    Raises:
        ConfigError: there is no such directory, or no run in it.
    """
    runs = read_runs(folder)
    strategies, parts, made = strategies_of(runs), [], []
    with progress("drawing the report", len(FIGURES)) as advance:
        for name, draw in FIGURES.items():
            title, drawn = TITLES[name], draw(strategies) if strategies else "no run has ended well"
            if isinstance(drawn, str):
                (folder / f"{name}.png").unlink(missing_ok=True)        # of an earlier report
                parts += [page.heading(title), page.paragraph(f"Left out: {drawn}.", "quiet")]
                made.append({"what": title, "file": None, "left_out": drawn})
            else:
                parts.append(page.figure(drawn))
                made.append({"what": title, "file": str(drawn.write(folder, "png")[0]), "left_out": None})
            advance(1)
    path = page.write_page(folder / REPORT_FILE, _title(folder, runs), [*_opening(runs, strategies), *parts, *_numbers(runs, strategies)])
    return [{"what": "the page", "file": str(path), "left_out": None}, *made]


def _title(folder: Path, runs: list[Run]) -> str:
    several = len(comparison.jobs_of(folder)) > 0
    return f"Sweep of {len(runs)} run{'s' if len(runs) > 1 else ''}" if several else f"Run with plan {runs[0].record['plan']}"


def _opening(runs: list[Run], strategies: list[Strategy]) -> list[str]:
    """What came out, and what went wrong, before the first picture."""
    said = []
    timed = [(found.mean, s.label) for s in strategies if (found := s.measure(lambda run: run.record["step_ms"]))]
    if len(timed) > 1:
        (best, fastest), (worst, slowest) = min(timed), max(timed)
        said.append(page.paragraph(f"Fastest: {fastest}, {best:.3g} ms a step. Slowest: {slowest}, {worst:.3g} ms, "
                                   f"{worst / best:.2f} times as long."))
    if any(len(s.runs) > 1 for s in strategies):
        said.append(page.paragraph(f"Runs that differ in their seed only are one strategy.{SEEDS}", "quiet"))
    bad = [run for run in runs if not run.ended_well]
    for run in bad[:SHOWN_FAILURES]:
        why = run.record["error"] or "it ended without a word"
        said.append(page.paragraph(f"Job {run.record['job']} ({run.label}) {run.record['status']}: {why}", "failed"))
    if len(bad) > SHOWN_FAILURES:
        said.append(page.paragraph(f"{len(bad) - SHOWN_FAILURES} more did not end well either; their errors stand below, among all runs.",
                                   "failed"))
    return said


def _numbers(runs: list[Run], strategies: list[Strategy]) -> list[str]:
    """All of it in tables: by strategy where runs were put together, and run by run."""
    parts = [page.heading("In numbers")]
    if any(len(s.runs) > 1 for s in strategies):
        rows = [{"strategy": s.label, "runs": len(s.runs), **{key: _shown(s, key, spec, scale) for key, _, spec, scale in SUMMARY}}
                for s in strategies]
        columns = [Column("strategy", "strategy"), Column("runs", "runs"), *(Column(key, title) for key, title, _, _ in SUMMARY)]
        parts.append(page.table(rows, columns, "Strategies: mean (lowest to highest)"))
    lines = comparison.lines_of_table([run.record for run in runs])
    return [*parts, page.table(lines, [*comparison.TABLE, Column("error", "error")], "Runs")]


def _shown(strategy: Strategy, key: str, spec: str, scale: float) -> str | None:
    def scaled(run: Run) -> float | None:
        value = run.record.get(key)
        return None if value is None else float(value) / scale

    found = strategy.measure(scaled)
    return found.show(spec) if found else None
