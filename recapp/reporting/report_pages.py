"""The report of a sweep, a training run or an evaluation: `report.html`.

    FOLDER/**/{metrics.json, performance.json, predicted.json, csv/metrics.csv} -> runs -> variants
        -> verdicts and pictures -> FOLDER/report.html

Each call makes the report again from the directories, so runs need not know each other. The report
lists failed runs with their errors, and covers all other runs. The page of a sweep shows the varied
settings, the best run, metrics, curves and costs; the page of a run what its summary says, curves,
costs, and the settings that differ from the defaults.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from recapp.console import Column, byte_unit, size
from recapp.errors import ConfigError
from recapp.reporting import page
from recapp.reporting.details import part_of_page, read_details
from recapp.reporting.drawing import spec_of
from recapp.reporting.page import Gallery
from recapp.reporting.phases import PHASES
from recapp.reporting.run_figures import (
    COSTS,
    curve_title,
    curves,
    dots_title,
    memory,
    metric_by,
    phases,
)
from recapp.reporting.run_record import RunRecord, finite, read_yaml
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
from recapp.reporting.summary import SPLITS, VERSION, entries_of, lines_of_run, step_of_checkpoint
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
from recapp.settings.records import leaves

REPORT_FILE = "report.html"
SHOWN_FAILURES = 5  # the most different errors that are listed before the first picture
SHOWN_VARIANTS = 40  # the most variants in pictures of the cost of a step
VALUES_LISTED = 6  # the most listed values of a setting, before "and 12 more"
SHOWN_ELSEWHERE = ("ckpt_path", "split")  # settings that other parts of an evaluation's page show
CHOICES = "choices"  # the key in resolved.yaml of the options of groups
ABSENT = object()
Defaults = Callable[[Mapping[str, str]], Mapping[str, Any]]
"""A function from the options of groups to the default settings under these options, in the form of
`resolved.yaml`: `{"plan": "mixed"}` -> `{"plan": {...}, "tables": {...}, ...}`.
"""


def write_report(folder: Path, defaults: Defaults = lambda choices: {}) -> list[dict[str, Any]]:
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


# ---- the page of a sweep


def sweep_page(runs: Sequence[Run], gallery: Gallery) -> tuple[str, list[str]]:
    """Return the title and the parts of a sweep's page.

    Args:
        runs: All runs of the sweep, with failed runs.
        gallery: Collects the pictures.
    """
    good = [run for run in runs if run.ended_well]
    title = f"Sweep of {len(runs)} run{'s' if len(runs) > 1 else ''}"
    objective = objective_of(good[0]) if good else Objective()
    end = [page.heading("Every run"), table_of_runs(runs, objective), page.footer(_facts(runs))]
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


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the entries of the foot: the facts about the runs, and the settings that they
    share.
    """
    first, *others = (run.overrides for run in runs)
    common = {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}
    same = ", ".join(f"{name}={value}" for name, value in common.items() if name != PLAN)
    entries = _foot([run.results for run in runs])
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
    settings = _varied_columns(runs, {SEED, *without_effect(runs, objective)})
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
    settings = _varied_columns(runs)
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
class _VariedColumns:
    """The varied settings, as columns of a table with the texts of their values."""

    columns: list[Column]
    texts: Mapping[str, Mapping[Any, str]]

    def of(self, run: Run) -> dict[str, str]:
        """Return the cells of a run."""
        return {name: texts.get(run.setting(name), "default") for name, texts in self.texts.items()}


def _varied_columns(runs: Sequence[Run], but: Collection[str] = ()) -> _VariedColumns:
    settings = varied_settings(runs).items()
    varied = {n: values for n, values in settings if n not in but and len(values) > 1}
    short = short_names(varied)
    texts = {
        name: {v: text for v, text in zip(values, texts_of(values), strict=True) if v is not None}
        for name, values in varied.items()
    }
    return _VariedColumns([Column(name, short[name]) for name in varied], texts)


def _metric(key: str, objective: Objective) -> Column:
    return Column(key, objective.title.replace(" ", "\n", 1), ".5f")


def _bytes(key: str, title: str, rows: Sequence[Mapping[str, Any]]) -> Column:
    """Return a column of bytes, all in the unit of the column's largest number."""
    scale, unit = byte_unit(max((row[key] for row in rows if row[key] is not None), default=0.0))
    return Column(key, f"{unit}\n{title}", ",.1f" if scale > 1 else ",.0f", scale)


# ---- the page of a run


def run_page(run: Run, gallery: Gallery, defaults: Defaults) -> tuple[str, list[str]]:
    """Return the title and the parts of the page of a training run or an evaluation.

    Args:
        run: A run that has ended, with or without success.
        gallery: Collects the pictures.
        defaults: Composes the default settings for some options of groups.
    """
    split = _split(run)
    if run.ended:
        lines = [{"what": what, "value": value} for what, value in _lines(run, split or "val")]
        summary = page.table(lines, [Column("what", "summary"), Column("value", "")])
        parts = [page.paragraph(_lead(run, split), "lead"), summary]
    else:
        parts = [page.paragraph(run.failure.error if run.failure else "It ended early.", "failed")]
    if not split:
        objective = objective_of(run)
        variant = Variant(run.name, (run,))
        names = dict.fromkeys((objective.name, *objective.measures.shown[::-1]))
        drawn = {curve_title(n, objective): curves(n, [variant], objective) for n in names}
        parts += gallery.part("Training", [], drawn)
    parts += part_of_page(read_details(run.directory, run.results.checkpoint_step))
    if run.ended and not split:
        costs = {"Where a step's time goes": phases([variant]), "Memory": memory([variant])}
        parts += [*gallery.part("What a step costs", [], costs), _phases(run)]
    parts += [page.heading("Settings that differ from the defaults"), _settings(run, defaults)]
    facts = [("Directory", str(run.directory)), *([] if split else _foot([run.results]))]
    return _title(run, split), [*parts, page.footer(facts)]


def _split(run: Run) -> str | None:
    """Return the rows of an evaluation, `val` or `test`; None for a training run."""
    asked = read_yaml(run.directory / ".hydra" / "config.yaml") or {}
    split = run.results.split or run.settings.get("split") or asked.get("split")
    return str(split) if split else None


def _title(run: Run, split: str | None) -> str:
    end = {"ok": "", "undefined": "", "failed": " that failed"}.get(run.status, " that was stopped")
    if split:
        return f"Evaluation on {SPLITS[split]} data{end}"
    if run.ended:
        steps = run.results.steps
        return "Training run" if steps is None else f"Training run of {steps:,} steps"
    return f"Training run{end}"


def _lead(run: Run, split: str | None) -> str:
    """Return the sentence at the top: the best metric of the run."""
    objective = objective_of(run)
    title = objective.title
    value = run.value(objective.name)
    if split:
        best = run.measures.get(run.measures.best)
        title = f"{SPLITS[split]} {best.title if best else run.measures.best}"
        value = run.results.value(f"{split}_{run.measures.best}")
    if value is None:
        return f"No {title} was measured{'' if run.ended_well else ' yet'}."
    return f"{title[0].upper()}{title[1:]}: {value:.5f}."


def _lines(run: Run, split: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of the run's summary, with its checkpoint, and its step as the planner
    predicted it.
    """
    yield "checkpoint", f"{run.results.checkpoint}{step_of_checkpoint(run.results)}"
    yield from lines_of_run(run.results, split, run.measures)
    if run.predicted and run.results.step_ms:
        error = run.predicted.step_ms / run.results.step_ms - 1
        yield "step, predicted by the planner", f"{run.predicted.step_ms:.1f} ms ({error:+.0%})"


def _phases(run: Run) -> str:
    if run.performance is None:
        return ""
    every = run.performance.phases_ms
    rows = [spent | {"rank": rank} for rank, spent in enumerate(every)]
    columns = [Column(p, f"{p}, ms", spec_of(spent[p] for spent in every)) for p in PHASES]
    return page.table(rows, [Column("rank", "rank"), *columns], "Medians of each rank's phases")


def _settings(run: Run, defaults: Defaults) -> str:
    if not run.settings:
        return page.paragraph("Its settings were not left (resolved.yaml).", "quiet")
    choices = _choices(run.settings)
    usual = _choices(defaults({}))
    of_run, of_default = (
        dict(leaves({key: each[key] for key in each if key not in (CHOICES, *SHOWN_ELSEWHERE)}))
        for each in (run.settings, defaults(choices))
    )
    rows = [
        {"name": name, "run": _shown(ours, name), "default": _shown(theirs, name)}
        for ours, theirs in ((choices, usual), (of_run, of_default))
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name, ABSENT) != theirs.get(name, ABSENT)
    ]
    if not rows:
        return page.paragraph("None: everything is as it comes.")
    columns = [Column("name", "setting"), Column("run", "this run"), Column("default", "default")]
    return page.table(rows, columns, f"{len(rows)} settings" if len(rows) > page.LONG else "")


def _choices(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the option of each group."""
    return dict(settings.get(CHOICES) or {})


def _shown(settings: Mapping[str, Any], name: str) -> str | None:
    """Return a setting as one line of YAML; None if there is no setting of this name."""
    value = settings.get(name, ABSENT)
    if value is ABSENT or isinstance(value, str):
        return None if value is ABSENT else str(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("...\n").strip()


# ---- the foot


def _foot(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return the facts about some runs as pairs of a name and a text. If the runs differ in a fact,
    the text lists all values, but of dates the first and the last.

    Args:
        runs: The results of the runs; those of a run that ended early have no facts.
    """
    known = [run for run in runs if run.date is not None]

    def each(text_of: Callable[[RunRecord], Any]) -> str:
        return "; ".join(dict.fromkeys(str(text_of(run)) for run in known)) or "not recorded"

    def versions(run: RunRecord) -> str:
        names = [name for name in run.more if name.startswith(VERSION)]
        return ", ".join(f"{name.removeprefix(VERSION)} {run.more[name]}" for name in names)

    reads = [entries_of(run.rows_read) for run in known if run.rows_read]
    names = dict.fromkeys(name for read in reads for name, text in read.items() if text)
    plans = dict.fromkeys(run.plan for run in runs if run.plan)
    ranks = dict.fromkeys(str(run.ranks) for run in runs if run.ranks)
    dates = sorted(str(run.date).replace("T", " ") for run in known)
    return [
        ("Data", each(lambda r: r.dataset if isinstance(r.dataset, str) else ", ".join(r.dataset))),
        ("Rows", each(lambda r: f"{r.rows_train:,} to train on, {r.rows_val:,} to validate on")),
        ("Model", each(lambda r: f"{r.model}, {r.precision}")),
        ("Tables", each(lambda r: f"{r.tables:,} of {r.table_rows:,} rows")),
        ("Plan", ", ".join(plans) or "not recorded"),
        ("Ranks", ", ".join(ranks) or "not recorded"),
        ("Batch", each(lambda run: f"{run.batch_size:,} samples, all ranks together")),
        *((n, "; ".join(dict.fromkeys(r[n] for r in reads if r.get(n)))) for n in names),
        ("Seed", each(lambda run: run.seed)),
        ("Versions", each(versions)),
        ("Host", each(lambda run: f"{', '.join(run.hosts)} ({run.device})")),
        ("Date", " to ".join(dict.fromkeys(dates[:1] + dates[-1:])) or "not recorded"),
    ]
