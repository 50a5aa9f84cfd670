"""The page of a sweep: what was varied and which run is best, what was learned, what a step costs, every run."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recapp.console import Column
from recapp.reporting import page
from recapp.reporting.about import foot
from recapp.reporting.comparison import FIXED, SEED, finite, overrides_of, short_names, texts_of
from recapp.reporting.drawing import byte_unit, size
from recapp.reporting.gallery import Gallery
from recapp.reporting.metric_figures import curve_title, curves, file_of, metric_by, title_of
from recapp.reporting.objective import (
    Objective,
    learned_variants_of,
    metric_verdict,
    metrics_of,
    objective_of,
    without_effect,
)
from recapp.reporting.speed_figures import FIGURES, TITLES
from recapp.reporting.speed_verdict import pace_of, speed_verdict, tied_with_fastest
from recapp.reporting.variants import Run, Variant, same_speed, speed_variants_of, told

SHOWN_FAILURES = 5  # before the first picture
VALUES_TOLD = 6  # of a setting, before "and 12 more"
TOLD_TWICE = ("val_auc", "val_log_loss")  # metrics that every table has


def sweep_page(runs: Sequence[Run], gallery: Gallery) -> tuple[str, list[str]]:
    """Return the title and the parts of a sweep's page.

    Args:
        runs: All of the sweep, failed ones as well.
        gallery: Takes the pictures.
    """
    good = _good(runs)
    objective = objective_of(good[0]) if good else Objective()
    variants, speeds = learned_variants_of(runs, objective), speed_variants_of(runs)
    opening = _opening(runs, variants, objective, speeds)
    results = _results(runs, variants, objective) if len(variants) > 1 else _speeds(runs, speeds, objective)
    parts = [page.columns([opening, results])]
    if good:
        parts += gallery.part(
            "What was learned", [], _learned_figures(good, variants, objective, gallery)
        )
        parts += _costs(speeds, gallery)
    parts += [page.heading("Every run"), _every_run(runs, objective), page.footer(_foot(runs))]
    return f"Sweep of {len(runs)} run{'s' if len(runs) > 1 else ''}", parts


def _good(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.ended_well]


# ---- what came out


def _opening(
    runs: Sequence[Run], variants: Sequence[Variant], objective: Objective, speeds: Sequence[Variant]
) -> str:
    """What was varied, which is best, what went wrong."""
    said = [page.paragraph(_varied(runs))]
    if variants:
        answer, *more = metric_verdict(variants, objective, without_effect(runs, objective))
        if len(speeds) > 1:
            more.append(speed_verdict(speeds)[0])
        said = [page.paragraph(answer, "lead"), *said, *map(page.paragraph, more)]
    if any(len(v.runs) > 1 for v in variants) and (best := objective.best_runs(_good(runs))):
        found = f"The best single run is job {best[0].record['job']} ({best[0].name}), {best[0].value(objective.name):.5f}."
        said.append(page.paragraph(found))
    others = [one.title for one in metrics_of([run for v in variants for run in v.runs]) if one != objective]
    if others:
        said.append(page.paragraph(f"Runs chose their checkpoints by {', '.join(others)} as well."))
    bad = [run for run in runs if not run.ended_well]
    ends: dict[tuple[str, str], list[Run]] = {}
    for run in bad:
        ends.setdefault((run.record["status"], run.record["error"] or "it ended without a word"), []).append(run)
    for (status, why), ended in list(ends.items())[:SHOWN_FAILURES]:
        jobs = ", ".join(f"{run.record['job']} ({run.name})" for run in ended)
        said.append(page.paragraph(f"Job{'s' if len(ended) > 1 else ''} {jobs} {status}: {why}", "failed"))
    if len(ends) > SHOWN_FAILURES:
        said.append(page.paragraph("More did not end well; their errors stand below.", "failed"))
    return "".join(said)


def _varied(runs: Sequence[Run]) -> str:
    varied = [f"{name} ({_values(values)})" for name, values in told(runs).items()]
    if not varied:
        return "Nothing was varied."
    last = f" and {varied[-1]}" if len(varied) > 1 else varied[-1]
    return f"Varied: {', '.join(varied[:-1])}{last}."


def _values(values: Sequence[Any]) -> str:
    """The values of a setting, or where many numbers lie."""
    known = [value for value in values if value is not None]
    if len(known) > VALUES_TOLD and all(finite(value) is not None for value in known):
        return f"{len(known)} values from {min(known):.3g} to {max(known):.3g}"
    texts = ["default" if value is None else text for value, text in zip(values, texts_of(values), strict=True)]
    more = [f"{len(texts) - VALUES_TOLD} more"] if len(texts) > VALUES_TOLD else []
    return ", ".join([*texts[:VALUES_TOLD], *more])


def _results(runs: Sequence[Run], variants: Sequence[Variant], objective: Objective) -> str:
    """The variants, the best first and marked."""
    ranked = objective.ranked(variants)
    if not ranked:
        return ""
    best = ranked[0][0] if len(ranked) > 1 else None
    settings = _settings(_good(runs), {SEED, *without_effect(runs, objective)})
    rows = [
        {
            "mark": "★ best" if variant is best else "",
            "name": variant.name,
            **settings.of(variant.runs[0]),
            "metric": found.mean,
            "reach": f"{found.low:.5f} to {found.high:.5f}",
            "runs": len(found.values),
            **{key: value.mean for key in TOLD_TWICE if (value := variant.recorded(key))},
        }
        for variant, found in ranked
    ]
    several = any(row["runs"] > 1 for row in rows)
    columns = [Column("mark", "")] if best else []
    columns += [Column("metric", objective.title.replace(" ", "\n", 1), ".5f")]
    columns += settings.columns or [Column("name", "run")]
    if several:
        columns += [Column("reach", "lowest to\nhighest seed"), Column("runs", "seeds")]
    columns += [
        Column(key, Objective(key).title.replace(" ", "\n", 1), ".5f")
        for key in TOLD_TWICE
        if key != objective.name
    ]
    return page.table(rows, columns, marked=[0] if best else [])


def _speeds(runs: Sequence[Run], speeds: Sequence[Variant], objective: Objective) -> str:
    """The variants by speed, the fastest first, where they do not differ in what they learned; marked, if it is no noise."""
    pace = pace_of(speeds)
    ranked, settings = pace.ranked(speeds), _settings(_good(runs), same_speed(runs))
    clear = len(ranked) > 1 and not tied_with_fastest(speeds)
    rows = []
    for place, (variant, found) in enumerate(ranked):
        metric, reach = objective.of(variant), pace.spread(variant)
        rows.append({
            "mark": "★ fastest" if clear and place == 0 else "", "name": variant.name, **settings.of(variant.runs[0]),
            "metric": metric and metric.mean, "pace": found.mean,
            "half": f"{pace.show(reach.low, unit=False)} to {pace.show(reach.high, unit=False)}" if reach else None,
        })  # fmt: skip
    columns = [Column("mark", "")] if clear else []
    columns += settings.columns or [Column("name", "run")]
    columns += [Column("metric", objective.title.replace(" ", "\n", 1), ".5f")]
    columns += [Column("pace", "samples\n/ s", ",.0f") if pace.by_rate else Column("pace", "step,\nms", ".3g")]
    columns += [Column("half", "middle half\nof steps")]
    return page.table(rows, columns, marked=[0] if clear else []) if rows else ""


def _learned_figures(
    good: Sequence[Run],
    variants: Sequence[Variant],
    objective: Objective,
    gallery: Gallery,
) -> list[str | None]:
    without = without_effect(good, objective)
    telling = [name for name, values in told(good).items() if name not in without and len(values) > 1]
    shown = []
    for name in [name for name in telling if name != SEED] or telling:
        shown.append(gallery.show(file_of(name), title_of(name, objective), metric_by(name, good, objective)))
    for name in dict.fromkeys((objective.name, *TOLD_TWICE)):
        drawn = curves(name, variants, objective)
        shown.append(gallery.show(f"curve_of_{name}", curve_title(name), drawn))
    return shown


# ---- what it cost


def _costs(speeds: Sequence[Variant], gallery: Gallery) -> list[str]:
    """What a step costs: compared where runs differ in what changes it, told in numbers where they do not."""
    said = [page.paragraph(text, "lead" if not place else "") for place, text in enumerate(speed_verdict(speeds))]
    if len(speeds) > 1:
        shown = [gallery.show(name, TITLES[name], draw(speeds)) for name, draw in FIGURES.items()]
        return gallery.part("What a step costs", said, shown)
    for name in FIGURES:
        gallery.show(name, TITLES[name], "the runs do not differ in what changes it")
    (only,) = speeds
    held, sent = only.recorded("bytes_per_rank"), only.recorded("bytes_exchanged_per_step")
    facts = [f"The tables take {size(held.mean)} on the fullest rank." if held else ""]
    facts += [f"All ranks send each other {size(sent.mean)} for them in a step." if sent and sent.mean else ""]
    return [page.heading("What a step costs"), *said, page.paragraph(" ".join(filter(None, facts)))]


# ---- numbers


def _every_run(runs: Sequence[Run], objective: Objective) -> str:
    settings, best = _settings(runs), objective.best_runs(_good(runs))
    rows = []
    for run in runs:
        low, high = run.record["step_ms_q1"], run.record["step_ms_q3"]
        half = None if low is None else f"{low:.3g} to {high:.3g}"
        rows.append({**run.record, **settings.of(run), "metric": run.value(objective.name), "half": half})
    columns = [Column("job", "job"), Column("status", "status"), *settings.columns]
    if objective.name not in TOLD_TWICE:
        columns.append(Column("metric", objective.title.replace(" ", "\n", 1), ".5f"))
    columns += [Column(key, Objective(key).title.replace(" ", "\n", 1), ".5f") for key in TOLD_TWICE]
    columns += [
        Column("ranks", "ranks"),
        Column("step_ms", "step,\nms", ".3g"),
        Column("half", "middle half\nof steps, ms"),
        Column("samples_per_second", "samples\n/ s", ",.0f"),
        _bytes("bytes_per_rank", "on the\nfullest rank", rows),
        _bytes("bytes_exchanged_per_step", "sent in\na step", rows),
    ]
    if any(run.record["error"] for run in runs):
        columns.append(Column("error", "error"))
    marked = [place for place, run in enumerate(runs) if run in best] if len(best) < len(_good(runs)) else []
    return page.table(rows, columns, f"All {len(runs)} runs" if len(runs) > page.LONG else "", marked)


@dataclass(frozen=True)
class _Settings:
    """What was varied, as columns of a table."""

    columns: list[Column]
    texts: Mapping[str, Mapping[Any, str]]

    def of(self, run: Run) -> dict[str, str]:
        """The cells of a run."""
        values = {name: run.setting(name) for name in self.texts}
        return {name: "default" if value is None else self.texts[name][value] for name, value in values.items()}


def _settings(runs: Sequence[Run], but: Collection[str] = ()) -> _Settings:
    varied = {name: values for name, values in told(runs).items() if name not in but and len(values) > 1}
    short = short_names([name for name in varied if name != "plan"]) | {"plan": "plan"}
    texts = {name: dict(zip(values, texts_of(values), strict=True)) for name, values in varied.items()}
    return _Settings([Column(name, short[name]) for name in varied], texts)


def _bytes(key: str, title: str, rows: Sequence[dict[str, Any]]) -> Column:
    """A column of bytes in one unit, that of its largest number."""
    scale, unit = byte_unit(max((row[key] for row in rows if row[key] is not None), default=0.0))
    return Column(key, f"{unit}\n{title}", ",.1f" if scale > 1 else ",.0f", scale)


def _foot(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What all runs have in common, and what they were made with."""
    good = _good(runs)
    seeds = [run.metrics.get("seed") for run in good]
    plans = dict.fromkeys(str(run.record["plan"]) for run in runs)
    ranks = dict.fromkeys(str(run.record["ranks"]) for run in good if run.record["ranks"])
    said = [overrides_of(run.directory) for run in runs]
    same = [f"{k}={v}" for k, v in said[0].items() if k not in FIXED and all(one.get(k) == v for one in said)]
    entries = foot([run.about for run in runs], seeds)
    entries[3:3] = [("Plan", ", ".join(plans)), ("Ranks", ", ".join(ranks) or "not recorded")]
    return [*entries, ("Same in all", ", ".join(same) or "nothing was set beside what was varied")]
