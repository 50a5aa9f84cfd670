"""The report of a sweep, a training run or an evaluation: `report.html`.

    FOLDER/**/{metrics.json, performance.json, predicted.json, csv/metrics.csv} -> runs -> variants
        -> verdicts and pictures -> FOLDER/report.html

Each call makes the report again from the directories, so runs need not know each other. The report
lists failed runs with their errors, and covers all other runs.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.console import Column
from recapp.errors import ConfigError
from recapp.reporting import page
from recapp.reporting.about import foot
from recapp.reporting.details import part_of_page, read_details
from recapp.reporting.drawing import spec_of
from recapp.reporting.page import Gallery
from recapp.reporting.phases import PHASES
from recapp.reporting.run_figures import curve_title, curves, memory, phases
from recapp.reporting.run_record import read_yaml
from recapp.reporting.runs import Run, jobs_of, read_runs
from recapp.reporting.sweep_page import sweep_page
from recapp.reporting.variants import Variant, objective_of
from recapp.settings.records import leaves

REPORT_FILE = "report.html"
ROWS = {"val": "validation", "test": "test"}  # the names of splits
SHOWN_ELSEWHERE = ("ckpt_path", "split")  # settings that other parts of an evaluation's page show
CHOICES = "choices"  # the key in resolved.yaml of the options of groups
ABSENT = object()
Defaults = Callable[[Mapping[str, str]], Mapping[str, Any]]
"""A function from the options of groups to the default settings under these options, in the form of
`resolved.yaml`: `{"plan": "mixed"}` -> `{"plan": {...}, "tables": {...}, ...}`.
"""


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
    if any(run.results.rows_scored is not None for run in runs):
        raise ConfigError(
            f"path={folder}: is the directory of a prediction, which has no page; its numbers "
            "are in metrics.json"
        )
    gallery = Gallery()
    if jobs_of(folder):
        title, parts = sweep_page(runs, gallery)
    else:
        title, parts = run_page(runs[0], gallery, defaults)
    path = str(page.write_page(folder / REPORT_FILE, title, parts))
    shown = [
        {"what": what, "file": path, "left_out": None} for what in ("the page", *gallery.shown)
    ]
    return shown + [
        {"what": w, "file": None, "left_out": why} for w, why in gallery.left_out.items()
    ]


def run_page(run: Run, gallery: Gallery, defaults: Defaults) -> tuple[str, list[str]]:
    """Return the title and the parts of the page of a training run or an evaluation.

    Args:
        run: A run that has ended, with or without success.
        gallery: Collects the pictures.
        defaults: Composes the default settings for some options of groups.
    """
    split = _split(run)
    rows = ROWS[split or "val"]
    if not run.ended:
        parts = [page.paragraph(run.failure.error if run.failure else "It ended early.", "failed")]
    else:
        parts = [page.columns(["".join(_opening(run, rows)), _metrics(run, split or "val", rows)])]
    if not split:
        objective = objective_of(run)
        variant = Variant(run.name, (run,))
        names = dict.fromkeys((objective.name, *objective.measures.shown[::-1]))
        drawn = {curve_title(n, objective): curves(n, [variant], objective) for n in names}
        parts += gallery.part("Training", [], drawn)
    parts += part_of_page(read_details(run.directory, run.results.checkpoint_step))
    if run.ended and not split:
        costs = {"Where a step's time goes": phases([variant]), "Memory": memory([variant])}
        speed = [page.paragraph(text) for text in _speed(run)]
        parts += [*gallery.part("What a step costs", speed, costs), _phases(run)]
    parts += [page.heading("Settings that differ from the defaults"), _settings(run, defaults)]
    facts = [("Directory", str(run.directory)), *([] if split else foot([run.results]))]
    return _title(run, split), [*parts, page.footer(facts)]


def _split(run: Run) -> str | None:
    """Return the rows of an evaluation, `val` or `test`; None for a training run."""
    asked = read_yaml(run.directory / ".hydra" / "config.yaml") or {}
    split = run.results.split or run.settings.get("split") or asked.get("split")
    return str(split) if split else None


def _title(run: Run, split: str | None) -> str:
    end = {"ok": "", "undefined": "", "failed": " that failed"}.get(run.status, " that was stopped")
    if split:
        return f"Evaluation on {ROWS[split]} data{end}"
    if run.ended:
        steps = run.results.steps
        return "Training run" if steps is None else f"Training run of {steps:,} steps"
    return f"Training run{end}"


def _opening(run: Run, rows: str) -> Iterator[str]:
    """Yield the sentences at the top."""
    results = run.results
    objective = objective_of(run)
    if results.split:
        best = run.measures.get(run.measures.best)
        title = f"{rows} {best.title}" if best else run.measures.best
        value = results.value(f"{results.split}_{run.measures.best}")
    else:
        title = objective.title
        value = run.value(objective.name)
    missing = f"No {title} was measured{'' if run.ended_well else ' yet'}."
    lead = missing if value is None else f"{title[0].upper()}{title[1:]}: {value:.5f}."
    yield page.paragraph(lead, "lead")
    if results.split:
        measured = f"measured on {_ranks(run)}, plan {run.plan}"
        yield page.paragraph(f"Of the checkpoint {results.checkpoint}, {measured}.")
    elif results.checkpoint:
        step = results.checkpoint_step
        steps = results.steps_planned or results.steps
        of = f"{step:,}" if step == steps else f"{step:,} of {steps:,}"
        yield page.paragraph(f"Of the checkpoint {results.checkpoint}, written after step {of}.")
    if results.stopped:
        early = "Stopped early at" if run.ended_well else "Stopped before its end:"
        yield page.paragraph(f"{early} {results.stopped}", "" if run.ended_well else "failed")


def _metrics(run: Run, split: str, rows: str) -> str:
    lines = [
        {"name": f"{rows} {measure.title}", "value": value}
        for measure in run.measures
        if (value := run.results.value(f"{split}_{measure.name}")) is not None
    ]
    columns = [Column("name", "metric"), Column("value", "value", ".5f")]
    return page.table(lines, columns) if lines else ""


def _ranks(run: Run) -> str:
    ranks = run.results.ranks
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


def _speed(run: Run) -> Iterator[str]:
    results = run.results
    if results.step_ms is None:
        return
    low, high = results.step_ms_quartiles or (results.step_ms, results.step_ms)
    yield (
        f"A step takes {results.step_ms:.3g} ms (half of the steps took {low:.3g} to {high:.3g} "
        f"ms): {results.samples_per_second or 0:,.0f} samples/s on {_ranks(run)}, plan {run.plan}."
    )
    if run.predicted:
        error = run.predicted.step_ms / results.step_ms - 1
        yield f"The planner had predicted {run.predicted.step_ms:.3g} ms ({error:+.0%})."


def _phases(run: Run) -> str:
    """Return the table of each rank's phases, with their quartiles."""
    measured = run.performance
    if measured is None:
        return ""
    spec = {p: spec_of(spent[p] for spent in measured.phases_ms) for p in PHASES}
    rows = [
        {p: f"{ms[p]:{spec[p]}} ({q[p][0]:{spec[p]}} to {q[p][1]:{spec[p]}})" for p in PHASES}
        | {"rank": str(rank)}
        for rank, (ms, q) in enumerate(
            zip(measured.phases_ms, measured.phases_quartiles_ms, strict=True)
        )
    ]
    columns = [Column("rank", "rank"), *(Column(p, f"{p}, ms") for p in PHASES)]
    return page.table(rows, columns, "Phases of each rank: median (middle half of the steps)")


# ---- settings


def _settings(run: Run, defaults: Defaults) -> str:
    """Return the settings that differ from the defaults as HTML."""
    if not run.settings:
        return page.paragraph("Its settings were not left (resolved.yaml).", "quiet")
    chosen = _chosen(run.settings)
    usual = _chosen(defaults({}))
    of_run, of_default = (
        dict(leaves({key: each[key] for key in each if key not in (CHOICES, *SHOWN_ELSEWHERE)}))
        for each in (run.settings, defaults(chosen))
    )
    rows = [
        {"name": name, "run": _shown(ours, name), "default": _shown(theirs, name)}
        for ours, theirs in ((chosen, usual), (of_run, of_default))
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name, ABSENT) != theirs.get(name, ABSENT)
    ]
    if not rows:
        return page.paragraph("None: everything is as it comes.")
    columns = [Column("name", "setting"), Column("run", "this run"), Column("default", "default")]
    return page.table(rows, columns, f"{len(rows)} settings" if len(rows) > page.LONG else "")


def _chosen(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the option of each group."""
    return dict(settings.get(CHOICES) or {})


def _shown(settings: Mapping[str, Any], name: str) -> str | None:
    """Return a setting as one line of YAML; None if there is no setting of this name."""
    value = settings.get(name, ABSENT)
    if value is ABSENT or isinstance(value, str):
        return None if value is ABSENT else str(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("...\n").strip()
