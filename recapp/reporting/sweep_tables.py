"""Tables of a sweep: its variants, with the best one marked, and its runs; each column has one
unit.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recapp.console import Column
from recapp.reporting import page
from recapp.reporting.comparison import SEED, short_names, texts_of
from recapp.reporting.drawing import byte_unit, spec_of
from recapp.reporting.objective import Objective, without_effect
from recapp.reporting.speed_verdict import pace_of, tied_with_fastest
from recapp.reporting.variants import Interval, Run, Variant, same_speed, varied_settings

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
