"""The page of a sweep: varied settings, the best run, metrics and curves, the cost of a step."""

from collections.abc import Sequence
from typing import Any

from recapp.reporting import curve_figures, metric_figures, page
from recapp.reporting.about import foot
from recapp.reporting.comparison import SEED, finite, is_setting, overrides_of, texts_of
from recapp.reporting.drawing import size
from recapp.reporting.gallery import Gallery
from recapp.reporting.objective import (
    Objective,
    learned_variants_of,
    metric_verdict,
    objective_of,
    objectives_of,
    without_effect,
)
from recapp.reporting.speed_figures import FIGURES, TITLES
from recapp.reporting.speed_verdict import pace_of, speed_verdict
from recapp.reporting.sweep_tables import table_by_metric, table_by_speed, table_of_runs
from recapp.reporting.variants import Run, Variant, speed_variants_of, varied_settings

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
    shown = []
    runs = [run for variant in variants for run in variant.runs]
    for name in [name for name in changing if name != SEED] or changing:
        title = metric_figures.title_of(name, objective)
        file = metric_figures.file_of(name)
        shown.append(gallery.show(file, title, metric_figures.metric_by(name, runs, objective)))
    for name in dict.fromkeys((objective.name, *objective.measures.shown)):
        title = curve_figures.title_of(name, objective)
        file = curve_figures.file_of(name)
        shown.append(gallery.show(file, title, curve_figures.curves(name, variants, objective)))
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
