"""The report of a sweep, a training run or an evaluation: `report.html`, and its pictures as PNG.

    FOLDER/**/{metrics.json, performance.json, predicted.json, csv/metrics.csv} -> runs -> variants
        -> verdicts and pictures -> FOLDER/report.html, FOLDER/*.png

Each call makes the report again from the directories, so runs need not know each other. The report
lists failed runs with their errors, and covers all other runs.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.console import Column
from recapp.errors import ConfigError
from recapp.reporting import comparison, page
from recapp.reporting.about import foot
from recapp.reporting.comparison import finite
from recapp.reporting.detail_figures import part_of_details
from recapp.reporting.details import read_details
from recapp.reporting.drawing import spec_of
from recapp.reporting.metric_figures import curve_file, curve_title, curves
from recapp.reporting.page import Gallery
from recapp.reporting.phases import PHASES
from recapp.reporting.speed_figures import FIGURES
from recapp.reporting.speed_figures import TITLES as FIGURE_TITLES
from recapp.reporting.sweep_page import sweep_page
from recapp.reporting.variants import Run, Variant, objective_of, read_runs
from recapp.settings.records import leaves

OWN_FIGURES = ("phases", "memory", "predicted")  # the other pictures of FIGURES compare variants
ROWS = {"val": "validation", "test": "test"}  # the names of splits
SHOWN_ELSEWHERE = ("ckpt_path", "split")  # settings that other parts of the page show
CHOICES = "choices"  # the key in resolved.yaml of the options of groups
ABSENT = object()
Defaults = Callable[[Mapping[str, str]], Mapping[str, Any]]
"""A function from the options of groups to the default settings under these options, in the form of
`resolved.yaml`: `{"plan": "mixed"}` -> `{"plan": {...}, "tables": {...}, ...}`.
"""


def run_page(run: Run, gallery: Gallery, defaults: Defaults) -> tuple[str, list[str]]:
    """Return the title and the parts of a run's page.

    Args:
        run: A training run that has ended, with or without success.
        gallery: Collects the pictures.
        defaults: Composes the default settings for some options of groups.
    """
    objective = objective_of(run)
    variant = Variant(run.name, (run,))
    parts = _opening(run, "validation", "val", _said_of_training(run))
    names = dict.fromkeys((objective.name, *objective.measures.shown[::-1]))
    shown = [
        gallery.show(
            curve_file(name),
            curve_title(name, objective),
            curves(name, [variant], objective),
        )
        for name in names
    ]
    parts += gallery.part("Training", [], shown)
    step = run.metrics.get("checkpoint_step") if run.metrics else None
    parts += part_of_details(read_details(run.directory, step), gallery)
    if run.metrics:
        speed = [page.paragraph(text) for text in _speed(run)]
        own = [
            gallery.show(name, FIGURE_TITLES[name], FIGURES[name]([variant]))
            for name in OWN_FIGURES
        ]
        parts += gallery.part("What a step costs", speed, own)
        parts += [_phases(run)]
    parts += [
        page.heading("Settings that differ from the defaults"),
        settings_table(run.settings, defaults),
    ]
    entries = foot([run.about], [run.metrics.get("seed", run.settings.get("seed"))])
    entries[3:3] = [
        ("Plan", str(run.record["plan"])),
        ("Ranks", str(run.record["ranks"] or "not recorded")),
    ]
    parts.append(page.footer([("Directory", str(run.directory)), *entries]))
    return _title(run), parts


def _title(run: Run) -> str:
    if run.metrics:
        steps = run.metrics.get("steps")
        return f"Training run of {steps:,} steps" if isinstance(steps, int) else "Training run"
    return f"Training run that {'failed' if run.record['status'] == 'failed' else 'was stopped'}"


def _opening(run: Run, rows: str, split: str, said: Iterator[str]) -> list[str]:
    """Return the parts at the top: sentences beside the metrics, or the run's error.

    Args:
        run: The run.
        rows: The rows that the metrics were measured on, in words.
        split: The name of these rows in the names of metrics.
        said: The sentences; not read if the run has failed.
    """
    if not run.metrics:
        return [page.paragraph(run.record["error"] or "It ended without a word.", "failed")]
    lines = [
        {"name": f"{rows} {measure.title}", "value": value}
        for measure in run.measures
        if (value := finite(run.metrics.get(f"{split}_{measure.name}"))) is not None
    ]
    columns = [Column("name", "metric"), Column("value", "value", ".5f")]
    return [page.columns(["".join(said), page.table(lines, columns) if lines else ""])]


def _said_of_training(run: Run) -> Iterator[str]:
    objective = objective_of(run)
    found = run.metrics
    value = run.value(objective.name)
    missing = f"No {objective.title} was measured{'' if run.ended_well else ' yet'}."
    lead = f"{objective.heading}: {value:.5f}." if value is not None else missing
    yield page.paragraph(lead, "lead")
    if found.get("checkpoint"):
        after = f"written after step {_of_steps(found)}"
        yield page.paragraph(f"Of the checkpoint {found['checkpoint']}, {after}.")
    best = run.measures.get(run.measures.best)
    if best and (hidden := found.get(f"hidden_model_{best.name}")):
        article = "an" if best.title[0].lower() in "aeiou" else "a"
        drawn = f"The model that drew the labels has {article} {best.title} of {hidden:.5f}"
        yield page.paragraph(f"{drawn}: nothing can do better.")
    if found.get("stopped"):
        early = "Stopped early at" if run.ended_well else "Stopped before its end:"
        yield page.paragraph(f"{early} {found['stopped']}", "" if run.ended_well else "failed")


def _of_steps(found: Mapping[str, Any]) -> str:
    """Return the step of the checkpoint and the number of steps: `400 of 1,000`."""
    behind = found.get("checkpoint_step")
    steps = found.get("steps_planned") or found.get("steps")
    return f"{behind:,} of {steps:,}" if behind and steps and behind != steps else f"{behind:,}"


def _speed(run: Run) -> Iterator[str]:
    record = run.record
    if record["step_ms"] is None:
        return
    low = record["step_ms_q1"]
    high = record["step_ms_q3"]
    half = "" if low is None else f" (half of the steps took {low:.3g} to {high:.3g} ms)"
    ranks = f"{record['ranks']} rank{'s' if record['ranks'] != 1 else ''}"
    yield (
        f"A step takes {record['step_ms']:.3g} ms{half}: "
        f"{record['samples_per_second']:,.0f} samples/s on {ranks}, plan {record['plan']}."
    )


def _phases(run: Run) -> str:
    """Return the table of each rank's phases, with the quartiles if they were recorded."""
    measured = run.performance
    if measured is None:
        return ""
    reach = measured.get("phases_quartiles_ms") or [{} for _ in measured["phases_ms"]]
    spec = {p: spec_of(spent[p] for spent in measured["phases_ms"]) for p in PHASES}
    rows = [
        {"rank": rank, **{p: _with_quartiles(spent[p], between.get(p), spec[p]) for p in PHASES}}
        for rank, (spent, between) in enumerate(zip(measured["phases_ms"], reach, strict=True))
    ]
    columns = [Column("rank", "rank"), *(Column(p, f"{p}, ms", spec[p]) for p in PHASES)]
    return page.table(rows, columns, "Phases of each rank: median (middle half of the steps)")


def _with_quartiles(median: float, between: Any, spec: str) -> Any:
    return f"{median:{spec}} ({between[0]:{spec}} to {between[1]:{spec}})" if between else median


def settings_table(settings: Mapping[str, Any], defaults: Defaults) -> str:
    """Return the settings that differ from the defaults as HTML.

    Args:
        settings: The content of `resolved.yaml`; empty if there is no such file.
        defaults: Composes the default settings for the comparison.
    """
    if not settings:
        return page.paragraph("Its settings were not left (resolved.yaml).", "quiet")
    own = _chosen(settings)
    usual = _chosen(defaults({}))
    rows = [
        {"name": group, "own": own.get(group), "default": usual.get(group)}
        for group in dict.fromkeys((*own, *usual))
        if own.get(group) != usual.get(group)
    ]
    set_, as_chosen = (
        dict(leaves({key: each[key] for key in each if key != CHOICES}))
        for each in (settings, defaults(own))
    )
    rows += [
        {"name": name, "own": _shown(set_, name), "default": _shown(as_chosen, name)}
        for name in dict.fromkeys((*set_, *as_chosen))
        if set_.get(name, ABSENT) != as_chosen.get(name, ABSENT)
    ]
    if not rows:
        return page.paragraph("None: everything is as it comes.")
    columns = [Column("name", "setting"), Column("own", "this run"), Column("default", "default")]
    return page.table(rows, columns, f"{len(rows)} settings" if len(rows) > page.LONG else "")


def _chosen(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the option of each group."""
    found = settings.get(CHOICES)
    return dict(found) if isinstance(found, Mapping) else {}


def _shown(settings: Mapping[str, Any], name: str) -> str | None:
    """Return a setting as one line of YAML; None if there is no setting of this name."""
    value = settings.get(name, ABSENT)
    if value is ABSENT or isinstance(value, str):
        return None if value is ABSENT else str(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("...\n").strip()


def evaluation_page(run: Run, gallery: Gallery, defaults: Defaults) -> tuple[str, list[str]]:
    """Return the title and the parts of an evaluation's page.

    Args:
        run: An evaluation that has ended, with or without success.
        gallery: Collects the pictures.
        defaults: Composes the default settings for some options of groups.
    """
    rows = ROWS.get(str(run.split), str(run.split))
    parts = _opening(run, rows, str(run.split), _said_of_evaluation(run, rows))
    if run.metrics:
        parts += part_of_details(read_details(run.directory), gallery)
        parts += [
            page.heading("Settings that differ from the defaults"),
            settings_table(
                _not_shown_elsewhere(run.settings),
                lambda chosen: _not_shown_elsewhere(defaults(chosen)),
            ),
        ]
    parts.append(page.footer(_foot(run)))
    end = {"ok": "", "undefined": "", "failed": " that failed"}
    ended = end.get(str(run.record["status"]), " that was stopped")
    return f"Evaluation on {rows} data{ended}", parts


def _not_shown_elsewhere(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in SHOWN_ELSEWHERE}


def _said_of_evaluation(run: Run, rows: str) -> Iterator[str]:
    measures = run.measures
    best = measures.get(measures.best)
    title = best.title if best else measures.best
    value = finite(run.metrics.get(f"{run.split}_{best.name}")) if best else None
    lead = f"It has no {title}." if value is None else f"{rows.capitalize()} {title}: {value:.5f}."
    yield page.paragraph(lead, "lead")
    ranks = f"{run.record['ranks']} rank{'s' if run.record['ranks'] != 1 else ''}"
    of = f"Of the checkpoint {run.metrics['checkpoint']}, measured on {ranks}"
    yield page.paragraph(f"{of}, plan {run.record['plan']}.")


def _foot(run: Run) -> list[tuple[str, str]]:
    """Return directory and data for the foot: an evaluation records no other facts about itself."""
    dataset = run.settings.get("dataset")
    given = dataset if isinstance(dataset, dict) else {}
    path = given.get(f"{run.split}_path") or given.get("path")
    data = ", ".join(map(str, path)) if isinstance(path, list) else path
    return [("Directory", str(run.directory)), *([("Data", str(data))] if data else [])]


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
            f"path={folder}: is the directory of a prediction, which has no page; its numbers "
            "are in metrics.json"
        )
    gallery = Gallery(folder)
    if comparison.jobs_of(folder):
        title, parts = sweep_page(runs, gallery)
    elif runs[0].split:
        title, parts = evaluation_page(runs[0], gallery, defaults)
    else:
        title, parts = run_page(runs[0], gallery, defaults)
    path = page.write_page(folder / REPORT_FILE, title, parts)
    return [{"what": "the page", "file": str(path), "left_out": None}, *gallery.made]
