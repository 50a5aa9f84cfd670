"""The report of a sweep, a training run or an evaluation: `report.html`.

    FOLDER/**/{metrics.json, performance.json, predicted.json, csv/metrics.csv} -> runs -> variants
        -> verdicts and pictures -> FOLDER/report.html

Each call makes the report again from the directories, so runs need not know each other. The report
lists failed runs with their errors, and covers all other runs. The page of a sweep shows the varied
settings, the best run, metrics, curves and costs; the page of a run what its summary says, curves,
costs, and the settings of its command line.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recapp.console import Column, byte_unit
from recapp.errors import ConfigError
from recapp.reporting import page
from recapp.reporting.drawing import spec_of
from recapp.reporting.phases import PHASES
from recapp.reporting.run_figures import (
    COSTS,
    Drawn,
    curves,
    memory,
    metric_by,
    phases,
)
from recapp.reporting.run_record import finite, read_yaml
from recapp.reporting.runs import (
    PLAN,
    SEED,
    Run,
    jobs_of,
    read_runs,
    short_names,
    texts_of,
    varied_settings,
)
from recapp.reporting.summary import (
    SPLITS,
    VERSION,
    WORST,
    columns_of_slices,
    lines_of_run,
    read_details,
    slices_of,
    step_of_checkpoint,
)
from recapp.reporting.variants import (
    Objective,
    Variant,
    by_speed,
    learned_variants_of,
    listed,
    metric_verdict,
    objective_of,
    speed_variants_of,
    speed_verdict,
    without_effect,
)

REPORT_FILE = "report.html"
SHOWN_VARIANTS = 40  # the most variants in pictures of the cost of a step
BUCKETS = [
    Column("rows", "rows", ","),
    Column("predicted", "mean\nprediction", ".5f"),
    Column("clicks", "share of\nclicks", ".5f"),
]
FACTS = (  # about runs, at the foot of a page
    *("dataset", "rows_train", "rows_val", "model", "precision", "tables", "table_rows", "plan"),
    *("ranks", "batch_size", "seed", "hosts", "device", "date"),
)
VALUES_LISTED = 6  # the most listed values of a setting, before "and 12 more"


def write_report(folder: Path) -> Path:
    """Write the report of a sweep or a run into its directory, and return its file.

    Args:
        folder: The directory of a sweep or of a run.

    Raises:
        ConfigError: The directory does not exist, has no run, or has a prediction.
    """
    runs = read_runs(folder)
    if any(run.results.rows_scored is not None for run in runs):
        raise ConfigError(
            f"path={folder}: is the directory of a prediction, which has no page; its numbers "
            "are in metrics.json"
        )
    title, parts = sweep_page(runs) if jobs_of(folder) else run_page(runs[0])
    return page.write_page(folder / REPORT_FILE, title, parts)


# ---- the page of a sweep


def sweep_page(runs: Sequence[Run]) -> tuple[str, list[str]]:
    """Return the title and the parts of a sweep's page.

    Args:
        runs: All runs of the sweep, with failed runs.
    """
    good = [run for run in runs if run.ended_well]
    title = f"Sweep of {len(runs)} run{'s' if len(runs) > 1 else ''}"
    objective = objective_of(good[0]) if good else Objective()
    first, *later = (run.overrides for run in runs)
    same = {k: v for k, v in first.items() if all(other.get(k) == v for other in later)}
    shared = ", ".join(f"{name}={value}" for name, value in same.items() if name != PLAN)
    foot = page.footer([*_facts(runs), *([("same in all", shared)] if shared else [])])
    end = [page.heading("Every run"), table_of_runs(runs, objective), foot]
    settings = [f"{name} ({_values(values)})" for name, values in varied_settings(runs).items()]
    varied = page.paragraph(f"Varied: {listed(settings)}." if settings else "Nothing was varied.")
    if not good:
        nothing = page.paragraph("No run ended well.", "lead")
        return title, [nothing, varied, *_failures(runs), *end]
    variants = learned_variants_of(good, objective)
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
    learned = page.part("What was learned", [], _learned(good, variants, objective))
    table = [table_by_metric(good, variants, objective)] if len(variants) > 1 else []
    opening = page.columns(["".join(top), *table])
    return title, [opening, *learned, *_costs(speed_variants_of(good)), *end]


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
    ends: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        if not run.ended_well:
            stopped = run.results.stopped or ("before its end" if run.ended else None)
            why = run.failure.error if run.failure else stopped or "it ended without a word"
            ends.setdefault((run.status, why), []).append(f"{run.job} ({run.name})")
    return [
        page.paragraph(f"Job{'s' * (len(jobs) > 1)} {', '.join(jobs)} {status}: {why}", "failed")
        for (status, why), jobs in ends.items()
    ]


def _learned(good: Sequence[Run], variants: Sequence[Variant], objective: Objective) -> list[Drawn]:
    without = without_effect(good, objective)
    settings = varied_settings(good).items()
    changing = [n for n, values in settings if n not in without and len(values) > 1]
    runs = [run for variant in variants for run in variant.runs]
    metrics = dict.fromkeys((objective.name, *objective.measures.shown))
    return [
        *(metric_by(n, runs, objective) for n in [n for n in changing if n != SEED] or changing),
        *(curves(name, variants, objective) for name in metrics),
    ]


def _costs(speeds: Sequence[Variant]) -> list[str]:
    """Return the part about the cost of a step. The top of the page names the fastest variant, so
    this part does not.
    """
    texts = speed_verdict(speeds) if len(speeds) == 1 else []
    if len(speeds) > SHOWN_VARIANTS:
        speeds = [variant for variant, _ in by_speed(speeds)[:SHOWN_VARIANTS]]
        texts = [f"The pictures show the fastest {SHOWN_VARIANTS}; the table has all runs."]
    return page.part("What a step costs", texts, [draw(speeds) for draw in COSTS])


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
    settings, cells_of = _varied_columns(runs, {SEED, *without_effect(runs, objective)})
    rows: list[dict[str, Any]] = []
    for number, (variant, metric) in enumerate(ranked):
        others = {key: value.mean for key in always if (value := variant.recorded(key))}
        start = {"mark": "" if number else "★ best", "name": variant.name, "metric": metric.mean}
        reach = {"reach": f"{metric.low:.5f} to {metric.high:.5f}", "seeds": len(metric.values)}
        rows.append(others | start | cells_of(variant.runs[0]) | reach)
    columns = [
        Column("mark", ""),
        _metric("metric", objective),
        *(settings or [Column("name", "run")]),
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
    settings, cells_of = _varied_columns(runs)
    best = objective.best_runs(good)
    always = objective.measures.shown
    rows = [
        run.flat()
        | cells_of(run)
        | {
            "metric": run.value(objective.name),
            "predicted_ms": run.predicted and run.predicted.step_ms,
        }
        for run in runs
    ]
    other = [] if objective.name in always else [_metric("metric", objective)]
    spec = spec_of(run.results.step_ms for run in runs)
    columns = [
        Column("job", "job"),
        Column("status", "status"),
        *settings,
        *other,
        *(_metric(key, objective.named(key)) for key in always),
        Column("ranks", "ranks"),
        Column("step_ms", "step,\nms", spec),
        Column("predicted_ms", "step as\npredicted", spec),
        Column("samples_per_second", "samples\n/ s", ",.0f"),
        _bytes("bytes_per_rank", "on the\nfullest rank", rows),
        _bytes("bytes_exchanged_per_step", "sent in\na step", rows),
        *([Column("error", "error")] if any(run.failure for run in runs) else []),
    ]
    differ = len(best) < len(good)
    marked = [number for number, run in enumerate(runs) if differ and run in best]
    title = f"All {len(runs)} runs" if len(runs) > page.LONG else ""
    return page.table(rows, columns, title, marked)


def _varied_columns(
    runs: Sequence[Run], but: Collection[str] = ()
) -> tuple[list[Column], Callable[[Run], dict[str, str]]]:
    """Return the varied settings as columns of a table, and a function from a run to its cells."""
    settings = varied_settings(runs).items()
    varied = {n: values for n, values in settings if n not in but and len(values) > 1}
    short = short_names(varied)
    texts = {
        name: {v: text for v, text in zip(values, texts_of(values), strict=True) if v is not None}
        for name, values in varied.items()
    }
    return [Column(name, short[name]) for name in varied], lambda run: {
        name: of_values.get(run.setting(name), "default") for name, of_values in texts.items()
    }


def _metric(key: str, objective: Objective) -> Column:
    return Column(key, objective.title.replace(" ", "\n", 1), ".5f")


def _bytes(key: str, title: str, rows: Sequence[Mapping[str, Any]]) -> Column:
    """Return a column of bytes, all in the unit of the column's largest number."""
    scale, unit = byte_unit(max((row[key] for row in rows if row[key] is not None), default=0.0))
    return Column(key, f"{unit}\n{title}", ",.1f" if scale > 1 else ",.0f", scale)


# ---- the page of a run


def run_page(run: Run) -> tuple[str, list[str]]:
    """Return the title and the parts of the page of a training run or an evaluation.

    Args:
        run: A run that has ended, with or without success.
    """
    split = _split(run)
    if run.ended:
        of_run = lines_of_run(run.results, split or "val", run.measures)
        step = step_of_checkpoint(run.results)
        lines = [("checkpoint", f"{run.results.checkpoint}{step}"), *of_run]
        parts = [page.paragraph(_lead(run, split), "lead"), _pairs(lines, "summary")]
    else:
        parts = [page.paragraph(run.failure.error if run.failure else "It ended early.", "failed")]
    variants = [Variant(run.name, (run,))]
    if not split:
        objective = objective_of(run)
        names = dict.fromkeys((objective.name, *objective.measures.shown[::-1]))
        parts += page.part("Training", [], [curves(n, variants, objective) for n in names])
    parts += part_of_page(read_details(run.directory, run.results.checkpoint_step))
    if run.ended and not split:
        costs = [phases(variants), memory(variants)]
        parts += [*page.part("What a step costs", [], costs), _by_phase(run)]
    parts += [
        page.heading("Settings of the command line"),
        _pairs(run.overrides.items(), "setting"),
    ]
    facts = [("directory", str(run.directory)), *([] if split else _facts([run]))]
    return _title(run, split), [*parts, page.footer(facts)]


def _pairs(lines: Iterable[tuple[str, str]], title: str) -> str:
    rows = [{"what": what, "value": value} for what, value in lines]
    return page.table(rows, [Column("what", title), Column("value", "")])


def _split(run: Run) -> str | None:
    """Return the rows of an evaluation, `val` or `test`; None for a training run."""
    asked = read_yaml(run.directory / ".hydra" / "config.yaml") or {}
    split = run.results.split or run.settings.get("split") or asked.get("split")
    return str(split) if split else None


def _title(run: Run, split: str | None) -> str:
    end = {"ok": "", "undefined": "", "failed": " that failed"}.get(run.status, " that was stopped")
    if split:
        return f"Evaluation on {SPLITS[split]} data{end}"
    steps = run.results.steps
    if run.ended:
        end = "" if steps is None else f" of {steps:,} steps"
    return f"Training run{end}"


def _lead(run: Run, split: str | None) -> str:
    best = f"{split}_{run.measures.best}"
    objective = Objective(best, measures=run.measures) if split else objective_of(run)
    value = run.value(objective.name)
    if value is None:
        return f"No {objective.title} was measured{'' if run.ended_well else ' yet'}."
    return f"{objective.heading}: {value:.5f}."


def _by_phase(run: Run) -> str:
    """Return a table of the measured milliseconds of each phase and of a step, beside those that
    the planner predicted.
    """
    if run.performance is None:
        return ""
    measured = run.performance.mean_phases() | {"step": run.performance.step_ms}
    plan = run.predicted
    predicted = {p: plan.mean_ms(p) for p in PHASES} | {"step": plan.step_ms} if plan else {}
    rows = [
        {"phase": p, "ms": ms, "predicted": predicted.get(p)}
        | ({"error": predicted[p] / ms - 1} if plan and ms else {})
        for p, ms in measured.items()
    ]
    spec = spec_of(measured.values())
    columns = [
        Column("phase", "phase"),
        Column("ms", "measured,\nms", spec),
        Column("predicted", "predicted,\nms", spec),
        Column("error", "error", "+.0%"),
    ]
    return page.table(rows, columns, "A step by phase, mean of the ranks")


def part_of_page(details: Mapping[str, Any]) -> list[str]:
    """Return the part of a page about the details of a validation as HTML; empty if there are
    none.
    """
    tables = []
    if buckets := details.get("buckets"):
        tables.append(page.table(buckets, BUCKETS, "Calibration by bucket"))
    for column, slices in slices_of(details):
        title = f"Worst slices by {column}"
        tables.append(page.table(slices[:WORST], columns_of_slices(slices, column), title))
    return [page.heading("Where the model is wrong"), page.columns(tables)] if tables else []


# ---- the foot


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    records = [run.results for run in runs]
    versions = sorted({n for one in records for n in one.more if n.startswith(VERSION)})
    entries = {
        name: dict.fromkeys(
            ", ".join(value) if isinstance(value, list) else value
            for one in records
            if (value := one.entry(name)) is not None
        )
        for name in (*FACTS, *versions)
    }
    return [
        (name.replace("_", " "), _values([*values])) for name, values in entries.items() if values
    ]
