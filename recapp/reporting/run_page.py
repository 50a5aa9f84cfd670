"""The page of a single run: metric and curves, time and memory of each rank, settings."""

from collections.abc import Iterator, Mapping
from typing import Any

from recapp.console import Column
from recapp.reporting import curve_figures, page
from recapp.reporting.about import foot
from recapp.reporting.comparison import finite
from recapp.reporting.drawing import spec_of
from recapp.reporting.gallery import Gallery
from recapp.reporting.objective import objective_of
from recapp.reporting.phases import PHASES
from recapp.reporting.settings_table import Defaults, settings_table
from recapp.reporting.speed_figures import FIGURES
from recapp.reporting.speed_figures import TITLES as FIGURE_TITLES
from recapp.reporting.variants import Run, Variant

OWN_FIGURES = ("phases", "memory", "predicted")  # the other pictures of FIGURES compare variants


def run_page(run: Run, gallery: Gallery, defaults: Defaults) -> tuple[str, list[str]]:
    """Return the title and the parts of a run's page.

    Args:
        run: A training run that has ended, with or without success.
        gallery: Collects the pictures.
        defaults: Composes the default settings for some options of groups.
    """
    objective = objective_of(run)
    variant = Variant(run.name, (run,))
    parts = _opening(run)
    names = dict.fromkeys((objective.name, *objective.measures.shown[::-1]))
    shown = [
        gallery.show(
            curve_figures.file_of(name),
            curve_figures.title_of(name, objective),
            curve_figures.curves(name, [variant], objective),
        )
        for name in names
    ]
    parts += gallery.part("Training", [], shown)
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


def _opening(run: Run) -> list[str]:
    """Return the paragraphs at the top: the run's metrics and checkpoint, or its error."""
    if not run.metrics:
        return [page.paragraph(run.record["error"] or "It ended without a word.", "failed")]
    objective = objective_of(run)
    found = run.metrics
    value = run.value(objective.name)
    missing = f"No {objective.title} was measured{'' if run.ended_well else ' yet'}."
    lead = f"{objective.heading}: {value:.5f}." if value is not None else missing
    said = [page.paragraph(lead, "lead")]
    if found.get("checkpoint"):
        after = f"written after step {_of_steps(found)}"
        said.append(page.paragraph(f"Of the checkpoint {found['checkpoint']}, {after}."))
    best = run.measures.get(run.measures.best)
    if best and (hidden := found.get(f"hidden_model_{best.name}")):
        article = "an" if best.title[0].lower() in "aeiou" else "a"
        drawn = f"The model that drew the labels has {article} {best.title} of {hidden:.5f}"
        said.append(page.paragraph(f"{drawn}: nothing can do better."))
    if found.get("stopped"):
        early = "Stopped early at" if run.ended_well else "Stopped before its end:"
        said.append(
            page.paragraph(f"{early} {found['stopped']}", "" if run.ended_well else "failed")
        )
    rows = [
        {"name": f"validation {measure.title}", "value": value}
        for measure in run.measures
        if (value := finite(found.get(measure.of_validation))) is not None
    ]
    columns = [Column("name", "metric"), Column("value", "value", ".5f")]
    return [page.columns(["".join(said), page.table(rows, columns) if rows else ""])]


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
