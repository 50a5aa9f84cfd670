"""The page of a sweep: varied settings, the best run, metrics and curves, the cost of a step."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recapp.console import Column, byte_unit, size
from recapp.reporting import page
from recapp.reporting.about import foot
from recapp.reporting.drawing import spec_of
from recapp.reporting.page import Gallery
from recapp.reporting.run_figures import COSTS, curve_title, curves, dots_title, metric_by
from recapp.reporting.run_record import finite
from recapp.reporting.runs import PLAN, SEED, Run, short_names, texts_of, varied_settings
from recapp.reporting.variants import (
    Objective,
    Variant,
    learned_variants_of,
    metric_verdict,
    objective_of,
    pace_of,
    speed_variants_of,
    speed_verdict,
    without_effect,
)

SHOWN_FAILURES = 5  # the most different errors that are listed before the first picture
SHOWN_VARIANTS = 40  # the most variants in pictures of the cost of a step
VALUES_LISTED = 6  # the most listed values of a setting, before "and 12 more"


def sweep_page(runs: Sequence[Run], gallery: Gallery) -> tuple[str, list[str]]:
    """Return the title and the parts of a sweep's page.

    Args:
        runs: All runs of the sweep, with failed runs.
        gallery: Collects the pictures.
    """
    good = [run for run in runs if run.ended_well]
    title = f"Sweep of {len(runs)} run{'s' if len(runs) > 1 else ''}"
    objective = objective_of(good[0]) if good else Objective()
    end = [page.heading("Every run"), table_of_runs(runs, objective), page.footer(_foot(runs))]
    varied = page.paragraph(_varied(runs))
    if not good:
        nothing = page.paragraph("No run ended well.", "lead")
        return title, [nothing, varied, *_failures(runs), *end]
    variants = learned_variants_of(good, objective)
    speeds = speed_variants_of(good)
    verdict, *more = verdicts(good)
    if any(len(v.runs) > 1 for v in variants) and (best := objective.best_runs(good)):
        value = best[0].value(objective.name)
        more.append(f"Best single run: job {best[0].job} ({best[0].name}), {value:.5f}.")
    others = dict.fromkeys(
        objective_of(run).title for run in good if objective_of(run) != objective
    )
    if others:
        more.append(f"Some runs chose their checkpoint by {', '.join(others)} instead.")
    top = [page.paragraph(verdict, "lead"), varied, *map(page.paragraph, more), *_failures(runs)]
    learned = gallery.part("What was learned", [], _learned(good, variants, objective))
    table = [table_by_metric(good, variants, objective)] if len(variants) > 1 else []
    opening = page.columns(["".join(top), *table])
    return title, [opening, *learned, *_costs(speeds, gallery), *end]


def verdicts(good: Sequence[Run]) -> list[str]:
    """Return sentences about the best runs of a sweep by the metric, and about the fastest runs;
    the first sentence is the verdict.

    Args:
        good: The sweep's runs that ended well, at least one.
    """
    objective = objective_of(good[0])
    variants = learned_variants_of(good, objective)
    speeds = speed_variants_of(good)
    by_metric = metric_verdict(variants, objective, without_effect(good, objective))
    return [*by_metric, *(speed_verdict(speeds)[:1] if len(speeds) > 1 else [])]


def _varied(runs: Sequence[Run]) -> str:
    texts = [f"{name} ({_values(values)})" for name, values in varied_settings(runs).items()]
    if not texts:
        return "Nothing was varied."
    last = f" and {texts[-1]}" if len(texts) > 1 else texts[-1]
    return f"Varied: {', '.join(texts[:-1])}{last}."


def _values(values: Sequence[Any]) -> str:
    """Return the values of a setting as text; for many numbers only the least and the greatest."""
    known = [value for value in values if value is not None]
    if len(known) > VALUES_LISTED and all(finite(value) is not None for value in known):
        return f"{len(known)} values from {min(known):.3g} to {max(known):.3g}"
    pairs = zip(values, texts_of(values), strict=True)
    texts = ["default" if value is None else text for value, text in pairs]
    more = [f"{len(texts) - VALUES_LISTED} more"] if len(texts) > VALUES_LISTED else []
    return ", ".join([*texts[:VALUES_LISTED], *more])


def _failures(runs: Sequence[Run]) -> list[str]:
    """Return a paragraph for each different error, with the jobs that had it."""
    ends: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        if not run.ended_well:
            stopped = run.results.stopped or ("before its end" if run.ended else None)
            why = run.failure.error if run.failure else stopped or "it ended without a word"
            ends.setdefault((run.status, why), []).append(f"{run.job} ({run.name})")
    texts = [
        f"Job{'s' if len(jobs) > 1 else ''} {', '.join(jobs)} {status}: {why}"
        for (status, why), jobs in list(ends.items())[:SHOWN_FAILURES]
    ]
    if len(ends) > SHOWN_FAILURES:
        texts.append(f"{len(ends) - SHOWN_FAILURES} more errors stand below, among all runs.")
    return [page.paragraph(text, "failed") for text in texts]


def _learned(
    good: Sequence[Run], variants: Sequence[Variant], objective: Objective
) -> dict[str, Any]:
    """Draw the metric against each setting that changes it, and the curves."""
    without = without_effect(good, objective)
    settings = varied_settings(good).items()
    changing = [n for n, values in settings if n not in without and len(values) > 1]
    runs = [run for variant in variants for run in variant.runs]
    pictures: dict[str, Any] = {
        dots_title(name, objective): metric_by(name, runs, objective)
        for name in [name for name in changing if name != SEED] or changing
    }
    return pictures | {
        curve_title(name, objective): curves(name, variants, objective)
        for name in dict.fromkeys((objective.name, *objective.measures.shown))
    }


def _costs(speeds: Sequence[Variant], gallery: Gallery) -> list[str]:
    """Return the part about the cost of a step: pictures if the runs differ in it, else only
    numbers.

    The top of the page names the fastest variant, so this part does not.
    """
    title = "What a step costs"
    if len(speeds) > 1:
        many = []
        if len(speeds) > SHOWN_VARIANTS:
            ranked = [variant for variant, _ in pace_of(speeds).ranked(speeds)]
            text = f"The pictures show the fastest {SHOWN_VARIANTS} of {len(ranked)}"
            many = [page.paragraph(f"{text}; the table has all.", "quiet")]
            speeds = ranked[:SHOWN_VARIANTS]
        return gallery.part(title, many, {name: draw(speeds) for name, draw in COSTS.items()})
    gallery.left_out |= dict.fromkeys(COSTS, "the runs do not differ in what changes it")
    memory = speeds[0].recorded("bytes_per_rank")
    sent = speeds[0].recorded("bytes_exchanged_per_step")
    texts = speed_verdict(speeds)
    if memory:
        texts.append(f"The tables take {size(memory.mean)} on the fullest rank.")
    if sent and sent.mean:
        texts.append(f"All ranks send each other {size(sent.mean)} for them in a step.")
    return [page.heading(title), *map(page.paragraph, texts)]


def _foot(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the entries of the foot: the facts about the runs, and the settings that they
    share.
    """
    first, *others = (run.overrides for run in runs)
    common = {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}
    same = ", ".join(f"{name}={value}" for name, value in common.items() if name != PLAN)
    entries = foot([run.results for run in runs])
    return [*entries, ("Same in all", same)] if same else entries


# ---- tables


def table_by_metric(runs: Sequence[Run], variants: Sequence[Variant], objective: Objective) -> str:
    """Return the table of variants by metric as HTML, the best first and marked.

    Args:
        runs: The runs that ended well.
        variants: The variants of these runs that may differ in their metric.
        objective: The metric, and whether its highest value is best.
    """
    always = objective.measures.shown
    ranked = objective.ranked(variants)
    settings = _settings(runs, {SEED, *without_effect(runs, objective)})
    rows: list[dict[str, Any]] = []
    for number, (variant, metric) in enumerate(ranked):
        others = {key: value.mean for key in always if (value := variant.recorded(key))}
        start = {"mark": "" if number else "★ best", "name": variant.name, "metric": metric.mean}
        reach = {"reach": f"{metric.low:.5f} to {metric.high:.5f}", "seeds": len(metric.values)}
        rows.append(others | start | settings.of(variant.runs[0]) | reach)
    columns = [
        Column("mark", ""),
        _metric("metric", objective),
        *(settings.columns or [Column("name", "run")]),
    ]
    if any(len(metric.values) > 1 for _, metric in ranked):
        columns += [Column("reach", "lowest to\nhighest seed"), Column("seeds", "seeds")]
    columns += [_metric(key, objective.named(key)) for key in always if key != objective.name]
    return page.table(rows, columns, marked=[0]) if rows else ""


def table_of_runs(runs: Sequence[Run], objective: Objective) -> str:
    """Return the table of all runs of a sweep as HTML; the runs with the best metric are marked.

    Args:
        runs: All runs of the sweep, with failed runs.
        objective: The metric, and whether its highest value is best.
    """
    good = [run for run in runs if run.ended_well]
    settings = _settings(runs)
    best = objective.best_runs(good)
    always = objective.measures.shown
    rows = [run.flat() | settings.of(run) | {"metric": run.value(objective.name)} for run in runs]
    other = [] if objective.name in always else [_metric("metric", objective)]
    columns = [
        Column("job", "job"),
        Column("status", "status"),
        *settings.columns,
        *other,
        *(_metric(key, objective.named(key)) for key in always),
        Column("ranks", "ranks"),
        Column("step_ms", "step,\nms", spec_of(run.results.step_ms for run in runs)),
        Column("samples_per_second", "samples\n/ s", ",.0f"),
        _bytes("bytes_per_rank", "on the\nfullest rank", rows),
        _bytes("bytes_exchanged_per_step", "sent in\na step", rows),
    ]
    if any(run.failure for run in runs):
        columns.append(Column("error", "error"))
    differ = len(best) < len(good)
    marked = [number for number, run in enumerate(runs) if differ and run in best]
    title = f"All {len(runs)} runs" if len(runs) > page.LONG else ""
    return page.table(rows, columns, title, marked)


@dataclass(frozen=True)
class _Settings:
    """The varied settings, as columns of a table with the texts of their values."""

    columns: list[Column]
    texts: Mapping[str, Mapping[Any, str]]

    def of(self, run: Run) -> dict[str, str]:
        """Return the cells of a run."""
        return {name: texts.get(run.setting(name), "default") for name, texts in self.texts.items()}


def _settings(runs: Sequence[Run], but: Collection[str] = ()) -> _Settings:
    settings = varied_settings(runs).items()
    varied = {n: values for n, values in settings if n not in but and len(values) > 1}
    short = short_names(varied)
    texts = {
        name: {v: text for v, text in zip(values, texts_of(values), strict=True) if v is not None}
        for name, values in varied.items()
    }
    return _Settings([Column(name, short[name]) for name in varied], texts)


def _metric(key: str, objective: Objective) -> Column:
    return Column(key, objective.title.replace(" ", "\n", 1), ".5f")


def _bytes(key: str, title: str, rows: Sequence[Mapping[str, Any]]) -> Column:
    """Return a column of bytes, all in the unit of the column's largest number."""
    scale, unit = byte_unit(max((row[key] for row in rows if row[key] is not None), default=0.0))
    return Column(key, f"{unit}\n{title}", ",.1f" if scale > 1 else ",.0f", scale)
