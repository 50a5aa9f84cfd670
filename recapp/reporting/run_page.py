"""The page of a single run: its metric and curves, each rank's time and memory, its settings."""

from collections.abc import Iterator, Mapping
from typing import Any

from recapp.console import Column
from recapp.reporting import curve_figures, page
from recapp.reporting.about import foot
from recapp.reporting.comparison import finite
from recapp.reporting.gallery import Gallery
from recapp.reporting.objective import TITLES, objective_of
from recapp.reporting.phases import PHASES
from recapp.reporting.speed_figures import FIGURES
from recapp.reporting.speed_figures import TITLES as FIGURE_TITLES
from recapp.reporting.variants import Run, Variant

OWN_FIGURES = ("phases", "memory", "predicted")  # of FIGURES; the others compare variants
GROUPS = (
    "choices"  # the options of configuration groups, which resolved.yaml has beside the settings
)


def run_page(run: Run, gallery: Gallery, defaults: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the title and the parts of a run's page.

    Args:
        run: That ended, well or not.
        gallery: Takes the pictures.
        defaults: The settings of a run that is told nothing, as `resolved.yaml` has them.
    """
    objective, variant = objective_of(run), Variant(run.name, (run,))
    parts = _opening(run)
    names = dict.fromkeys((objective.name, "val_log_loss", "val_auc"))
    shown = [
        gallery.show(
            curve_figures.file_of(name),
            curve_figures.title_of(name),
            curve_figures.curves(name, [variant], objective),
        )
        for name in names
    ]
    parts += gallery.part("Training", [], shown)
    if run.metrics:
        told = [page.paragraph(text) for text in _speed(run)]
        own = [
            gallery.show(name, FIGURE_TITLES[name], FIGURES[name]([variant]))
            for name in OWN_FIGURES
        ]
        parts += gallery.part("What a step costs", told, own)
        parts += [_phases(run)]
    parts += [page.heading("Settings that differ from the defaults"), _settings(run, defaults)]
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
    """What it reached, or why it did not."""
    if not run.metrics:
        return [page.paragraph(run.record["error"] or "It ended without a word.", "failed")]
    objective, found = objective_of(run), run.metrics
    value = run.value(objective.name)
    title = f"{objective.title[0].upper()}{objective.title[1:]}"
    said = [
        page.paragraph(
            f"{title}: {value:.5f}." if value is not None else f"It has no {objective.name}.",
            "lead",
        )
    ]
    if found.get("checkpoint"):
        behind, steps = found.get("checkpoint_step"), found.get("steps")
        said.append(
            page.paragraph(
                f"Of the checkpoint {found['checkpoint']}, written after step {behind} of {steps}."
            )
        )
    if found.get("hidden_model_auc"):
        drawn = f"The model that drew the labels has an AUC of {found['hidden_model_auc']:.5f}"
        said.append(page.paragraph(f"{drawn}: nothing can do better."))
    if found.get("stopped"):
        early = "Stopped early at" if run.ended_well else "Stopped before its end:"
        said.append(
            page.paragraph(f"{early} {found['stopped']}", "" if run.ended_well else "failed")
        )
    rows = [
        {"name": name, "value": value}
        for key, name in TITLES.items()
        if (value := finite(found.get(key))) is not None
    ]
    columns = [Column("name", "metric"), Column("value", "value", ".5f")]
    return [page.columns(["".join(said), page.table(rows, columns) if rows else ""])]


def _speed(run: Run) -> Iterator[str]:
    record = run.record
    if record["step_ms"] is None:
        return
    low, high = record["step_ms_q1"], record["step_ms_q3"]
    half = "" if low is None else f" (half of the steps took {low:.3g} to {high:.3g} ms)"
    ranks = f"{record['ranks']} rank{'s' if record['ranks'] != 1 else ''}"
    yield (
        f"A step takes {record['step_ms']:.3g} ms{half}: "
        f"{record['samples_per_second']:,.0f} samples/s on {ranks}, plan {record['plan']}."
    )


def _phases(run: Run) -> str:
    """Each rank's phases in numbers, with the quartiles where they were recorded."""
    measured = run.performance
    if measured is None:
        return ""
    reach = measured.get("phases_quartiles_ms") or [{} for _ in measured["phases_ms"]]
    rows = [
        {
            "rank": rank,
            **{phase: _with_quartiles(spent[phase], between.get(phase)) for phase in PHASES},
        }
        for rank, (spent, between) in enumerate(zip(measured["phases_ms"], reach, strict=True))
    ]
    columns = [Column("rank", "rank"), *(Column(phase, f"{phase}, ms", ".3g") for phase in PHASES)]
    return page.table(rows, columns, "Phases of each rank: median (middle half of the steps)")


def _with_quartiles(median: float, between: Any) -> Any:
    return f"{median:.3g} ({between[0]:.3g} to {between[1]:.3g})" if between else median


# ---- settings


def _settings(run: Run, defaults: Mapping[str, Any]) -> str:
    if not run.settings:
        return page.paragraph("Its settings were not left (resolved.yaml).", "quiet")
    own, usual = dict(_flat(run.settings)), dict(_flat(defaults))
    names = [
        name
        for name in dict.fromkeys((*own, *usual))
        if own.get(name, ABSENT) != usual.get(name, ABSENT)
    ]
    rows = [
        {"name": name, "own": _shown(own, name), "default": _shown(usual, name)} for name in names
    ]
    if not rows:
        return page.paragraph("None: everything is as it comes.")
    columns = [Column("name", "setting"), Column("own", "this run"), Column("default", "default")]
    return page.table(rows, columns, f"{len(rows)} settings" if len(rows) > page.LONG else "")


ABSENT = object()


def _shown(settings: Mapping[str, Any], name: str) -> str:
    if name not in settings:
        return "not there"
    return "null" if settings[name] is None else str(settings[name])


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Settings under their dotted names; `choices` are groups, named like on the command line."""
    for name, value in settings.items():
        if not above and name == GROUPS and isinstance(value, Mapping):
            yield from ((str(group), option) for group, option in value.items())
        elif isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
