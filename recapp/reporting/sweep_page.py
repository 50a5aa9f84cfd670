"""The page of a sweep: varied settings, the best run, metrics and curves, the cost of a step."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recapp.console import Column, byte_unit, size
from recapp.reporting import page
from recapp.reporting.about import foot
from recapp.reporting.comparison import (
    SEED,
    finite,
    is_setting,
    overrides_of,
    short_names,
    texts_of,
)
from recapp.reporting.drawing import spec_of
from recapp.reporting.metric_figures import (
    curve_file,
    curve_title,
    curves,
    dots_file,
    dots_title,
    metric_by,
)
from recapp.reporting.page import Gallery
from recapp.reporting.speed_figures import FIGURES, TITLES
from recapp.reporting.speed_verdict import pace_of, speed_verdict, tied_with_fastest
from recapp.reporting.variants import (
    Interval,
    Objective,
    Run,
    Variant,
    learned_variants_of,
    metric_verdict,
    objective_of,
    objectives_of,
    same_speed,
    speed_variants_of,
    varied_settings,
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
    every = [page.heading("Every run"), table_of_runs(runs, objective), page.footer(_foot(runs))]
    varied = page.paragraph(_varied(runs))
    if not good:
        nothing = page.paragraph("No run ended well.", "lead")
        return title, [nothing, varied, *_failures(runs), *every]
    variants = learned_variants_of(good, objective)
    speeds = speed_variants_of(good)
    verdict, *more = verdicts(good)
    more += _best_run(good, variants, objective)
    said = [page.paragraph(verdict, "lead"), varied, *map(page.paragraph, more), *_failures(runs)]
    table = table_by_metric if len(variants) > 1 else table_by_speed
    shown = variants if len(variants) > 1 else speeds
    opening = page.columns(["".join(said), table(good, shown, objective)])
    learned = gallery.part("What was learned", [], _learned(good, variants, objective, gallery))
    return title, [opening, *learned, *_costs(speeds, gallery), *every]


def verdicts(good: Sequence[Run]) -> list[str]:
    """Return sentences about the best runs of a sweep by the metric, and about the fastest runs;
    the first sentence is the verdict.

    Args:
        good: The sweep's runs that ended well, at least one.
    """
    objective = objective_of(good[0])
    variants = learned_variants_of(good, objective)
    speeds = speed_variants_of(good)
    said = metric_verdict(variants, objective, without_effect(good, objective))
    return [*said, *(speed_verdict(speeds)[:1] if len(speeds) > 1 else [])]


# ---- metrics


def _varied(runs: Sequence[Run]) -> str:
    varied = [f"{name} ({_values(values)})" for name, values in varied_settings(runs).items()]
    if not varied:
        return "Nothing was varied."
    last = f" and {varied[-1]}" if len(varied) > 1 else varied[-1]
    return f"Varied: {', '.join(varied[:-1])}{last}."


def _values(values: Sequence[Any]) -> str:
    """Return the values of a setting as text; for many numbers only the least and the greatest."""
    known = [value for value in values if value is not None]
    if len(known) > VALUES_LISTED and all(finite(value) is not None for value in known):
        return f"{len(known)} values from {min(known):.3g} to {max(known):.3g}"
    given = zip(values, texts_of(values), strict=True)
    texts = ["default" if value is None else text for value, text in given]
    more = [f"{len(texts) - VALUES_LISTED} more"] if len(texts) > VALUES_LISTED else []
    return ", ".join([*texts[:VALUES_LISTED], *more])


def _best_run(good: Sequence[Run], variants: Sequence[Variant], objective: Objective) -> list[str]:
    """Return sentences about the best single run, if variants have several runs, and about the
    metrics of other runs.

    Runs may have chosen their checkpoints by another metric than the first run.
    """
    said = []
    if any(len(v.runs) > 1 for v in variants) and (best := objective.best_runs(good)):
        value = best[0].value(objective.name)
        said.append(f"Best single run: job {best[0].record['job']} ({best[0].name}), {value:.5f}.")
    if others := [one.title for one in objectives_of(good) if one != objective]:
        said.append(f"Some runs chose their checkpoint by {', '.join(others)} instead.")
    return said


def _failures(runs: Sequence[Run]) -> list[str]:
    """Return a paragraph for each different error, with the jobs that had it."""
    ends: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        if not run.ended_well:
            stopped = run.metrics.get("stopped") or ("before its end" if run.metrics else None)
            why = run.record["error"] or stopped or "it ended without a word"
            jobs = ends.setdefault((run.record["status"], why), [])
            jobs.append(f"{run.record['job']} ({run.name})")
    said = []
    for (status, why), jobs in list(ends.items())[:SHOWN_FAILURES]:
        named = f"Job{'s' if len(jobs) > 1 else ''} {', '.join(jobs)}"
        said.append(page.paragraph(f"{named} {status}: {why}", "failed"))
    if len(ends) > SHOWN_FAILURES:
        more = f"{len(ends) - SHOWN_FAILURES} more errors stand below, among all runs."
        said.append(page.paragraph(more, "failed"))
    return said


def _learned(
    good: Sequence[Run], variants: Sequence[Variant], objective: Objective, gallery: Gallery
) -> list[str | None]:
    """Draw the metric against each setting that changes it, and the curves."""
    without = without_effect(good, objective)
    varied = varied_settings(good).items()
    changing = [n for n, values in varied if n not in without and len(values) > 1]
    runs = [run for variant in variants for run in variant.runs]
    shown = [
        gallery.show(dots_file(n), dots_title(n, objective), metric_by(n, runs, objective))
        for n in [name for name in changing if name != SEED] or changing
    ]
    shown += [
        gallery.show(curve_file(n), curve_title(n, objective), curves(n, variants, objective))
        for n in dict.fromkeys((objective.name, *objective.measures.shown))
    ]
    return shown


# ---- the cost of a step


def _costs(speeds: Sequence[Variant], gallery: Gallery) -> list[str]:
    """Return the part about the cost of a step: pictures if the runs differ in it, else only
    numbers.

    The top of the page names the fastest variant, so this part does not.
    """
    said = [*map(page.paragraph, speed_verdict(speeds)[1 if len(speeds) > 1 else 0 :])]
    if len(speeds) > SHOWN_VARIANTS:
        ranked = [variant for variant, _ in pace_of(speeds).ranked(speeds)]
        many = (
            f"The pictures show the fastest {SHOWN_VARIANTS} of {len(ranked)}; the table has all."
        )
        said = [*said, page.paragraph(many, "quiet")]
        speeds = ranked[:SHOWN_VARIANTS]
    if len(speeds) > 1:
        shown = [gallery.show(name, TITLES[name], draw(speeds)) for name, draw in FIGURES.items()]
        return gallery.part("What a step costs", said, shown)
    for name in FIGURES:
        gallery.show(name, TITLES[name], "the runs do not differ in what changes it")
    (only,) = speeds
    held = only.recorded("bytes_per_rank")
    sent = only.recorded("bytes_exchanged_per_step")
    sizes = [f"The tables take {size(held.mean)} on the fullest rank."] if held else []
    if sent and sent.mean:
        sizes.append(f"All ranks send each other {size(sent.mean)} for them in a step.")
    return [page.heading("What a step costs"), *said, page.paragraph(" ".join(sizes))]


def _foot(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the entries of the foot: the facts about the runs, and the settings that they
    share.
    """
    seeds = [run.metrics.get("seed") for run in runs]
    plans = dict.fromkeys(str(run.record["plan"]) for run in runs)
    ranks = dict.fromkeys(str(run.record["ranks"]) for run in runs if run.record["ranks"])
    first, *others = (overrides_of(run.directory) for run in runs)
    common = {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}
    same = ", ".join(f"{name}={value}" for name, value in common.items() if is_setting(name))
    entries = foot([run.about for run in runs], seeds)
    entries[3:3] = [("Plan", ", ".join(plans)), ("Ranks", ", ".join(ranks) or "not recorded")]
    return [*entries, ("Same in all", same)] if same else entries


MARK = Column("mark", "")


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
    for number, (variant, found) in enumerate(ranked):
        others = {key: value.mean for key in always if (value := variant.recorded(key))}
        own = {"mark": "" if number else "★ best", "name": variant.name, "metric": found.mean}
        reach = f"{found.low:.5f} to {found.high:.5f}"
        cells = settings.of(variant.runs[0])
        rows.append(others | own | cells | {"reach": reach, "seeds": len(found.values)})
    columns = [MARK, _metric("metric", objective), *(settings.columns or [Column("name", "run")])]
    if any(len(found.values) > 1 for _, found in ranked):
        columns += [Column("reach", "lowest to\nhighest seed"), Column("seeds", "seeds")]
    columns += [_metric(key, objective.named(key)) for key in always if key != objective.name]
    return page.table(rows, columns, marked=[0]) if rows else ""


def table_by_speed(runs: Sequence[Run], speeds: Sequence[Variant], objective: Objective) -> str:
    """Return the table of variants by speed as HTML, the fastest first, and marked unless the order
    is noise.

    Args:
        runs: The runs that ended well.
        speeds: The variants of these runs that may differ in speed.
        objective: The metric, which also has a column.
    """
    pace = pace_of(speeds)
    ranked = pace.ranked(speeds)
    settings = _settings(runs, same_speed(runs))
    clear = len(ranked) > 1 and not tied_with_fastest(speeds)
    rows: list[dict[str, Any]] = []
    for number, (variant, found) in enumerate(ranked):
        metric = objective.of(variant) or Interval(())
        reach = pace.spread(variant)
        cells = {"mark": "★ fastest" if clear and not number else "", "name": variant.name}
        numbers = {"metric": metric.mean if metric.values else None, "pace": found.mean}
        half = pace.between(reach) if reach else None
        rows.append(cells | settings.of(variant.runs[0]) | numbers | {"half": half})
    speed = ("samples\n/ s", ",.0f") if pace.by_rate else ("step,\nms", pace.spec)
    columns = [
        *([MARK] if clear else []),
        _metric("metric", objective),
        *(settings.columns or [Column("name", "run")]),
        Column("pace", *speed),
        Column("half", "middle half\nof steps"),
    ]
    return page.table(rows, columns, marked=[0] if clear else []) if rows else ""


def table_of_runs(runs: Sequence[Run], objective: Objective) -> str:
    """Return the table of all runs of a sweep as HTML; the runs with the best metric are marked.

    Args:
        runs: All runs of the sweep, with failed runs.
        objective: The metric, and whether its highest value is best.
    """
    good = [run for run in runs if run.ended_well]
    settings = _settings(runs)
    best = objective.best_runs(good)
    spec = spec_of(run.record["step_ms"] for run in runs)
    rows = [_row(run, settings, objective, spec) for run in runs]
    always = objective.measures.shown
    other = [] if objective.name in always else [_metric("metric", objective)]
    columns = [
        Column("job", "job"),
        Column("status", "status"),
        *settings.columns,
        *other,
        *(_metric(key, objective.named(key)) for key in always),
        Column("ranks", "ranks"),
        Column("step_ms", "step,\nms", spec),
        Column("half", "middle half\nof steps, ms"),
        Column("samples_per_second", "samples\n/ s", ",.0f"),
        _bytes("bytes_per_rank", "on the\nfullest rank", rows),
        _bytes("bytes_exchanged_per_step", "sent in\na step", rows),
    ]
    if any(run.record["error"] for run in runs):
        columns.append(Column("error", "error"))
    differ = len(best) < len(good)
    marked = [number for number, run in enumerate(runs) if differ and run in best]
    title = f"All {len(runs)} runs" if len(runs) > page.LONG else ""
    return page.table(rows, columns, title, marked)


def _row(run: Run, settings: "_Settings", objective: Objective, spec: str) -> dict[str, Any]:
    low = run.record["step_ms_q1"]
    high = run.record["step_ms_q3"]
    half = None if low is None else f"{low:{spec}} to {high:{spec}}"
    own = {"metric": run.value(objective.name), "half": half}
    return run.record | settings.of(run) | own


@dataclass(frozen=True)
class _Settings:
    """The varied settings, as columns of a table with the texts of their values."""

    columns: list[Column]
    texts: Mapping[str, Mapping[Any, str]]

    def of(self, run: Run) -> dict[str, str]:
        """Return the cells of a run."""
        return {name: texts.get(run.setting(name), "default") for name, texts in self.texts.items()}


def _settings(runs: Sequence[Run], but: Collection[str] = ()) -> _Settings:
    found = varied_settings(runs).items()
    varied = {n: values for n, values in found if n not in but and len(values) > 1}
    short = short_names([name for name in varied if name != "plan"]) | {"plan": "plan"}
    texts = {}
    for name, values in varied.items():
        given = zip(values, texts_of(values), strict=True)
        texts[name] = {value: text for value, text in given if value is not None}
    return _Settings([Column(name, short[name]) for name in varied], texts)


def _metric(key: str, objective: Objective) -> Column:
    return Column(key, objective.title.replace(" ", "\n", 1), ".5f")


def _bytes(key: str, title: str, rows: Sequence[Mapping[str, Any]]) -> Column:
    """Return a column of bytes, all in the unit of the column's largest number."""
    scale, unit = byte_unit(max((row[key] for row in rows if row[key] is not None), default=0.0))
    return Column(key, f"{unit}\n{title}", ",.1f" if scale > 1 else ",.0f", scale)
