"""The details of validations in a run's directory, `details.json`: metrics by slice, calibration by
bucket, values of a bootstrap.

    {"validations": [{"step": 400, "by C1": [{"value": "a1", "rows": 120, "auc": .71, ...}, ...],
                      "buckets": [{"rows": ..., "predicted": .03, "clicks": .02}, ...],
                      "bootstrap": {"drawn": [...], "metrics": {"auc": [...], ...}}}, ...]}
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from recapp.console import Column, note, print_table
from recapp.reporting import page
from recapp.reporting.run_record import DETAILS_FILE, RunRecord, read_document, write_whole

KEPT = 50  # validations of a run
WORST = 10  # slices of a column that are shown
BY = "by "
ORDERS = {
    "auc": 1,
    "rmse": -1,
}  # the first metric that slices have orders them: 1 if larger is better
BUCKETS = [
    Column("rows", "rows", ","),
    Column("predicted", "mean\nprediction", ".5f"),
    Column("clicks", "share of\nclicks", ".5f"),
]
TITLES = {"auc": "AUC", "log_loss": "log loss", "rmse": "RMSE"}


def write_details(
    details: Mapping[str, Any], directory: Path, step: int, best: int | None = None
) -> None:
    """Add the details of a validation to `details.json`, which keeps the last `KEPT` ones.

    Args:
        details: The details by name. A number that is not finite becomes null.
        directory: The directory of the run.
        step: The step of training after which they were measured.
        best: The step of the best checkpoint so far, whose details are kept, too.
    """
    earlier = [one for one in _validations(directory) if one.get("step") != step]
    of_best = [one for one in earlier[: 1 - KEPT] if best is not None and one.get("step") == best]
    validations = [*of_best, *earlier[1 - KEPT :], {"step": step, **_finite(details)}]
    text = json.dumps({"validations": validations}, allow_nan=False)
    write_whole(directory / DETAILS_FILE, f"{text}\n")


def _finite(value: Any) -> Any:
    """Return plain values with None for each number that is not finite."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_details(directory: Path, step: object = None) -> dict[str, Any]:
    """Return the details of the validation after a step; None is the last one. The result is empty
    if there are none.
    """
    every = _validations(directory)
    same = [one for one in every if step is None or one.get("step") == step]
    return dict((same or [{}])[-1])


def _validations(directory: Path) -> list[dict[str, Any]]:
    validations: list[dict[str, Any]] = (read_document(directory / DETAILS_FILE) or {}).get(
        "validations", []
    )
    return validations


def slices_of(details: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each column of `metrics.by`, with its slices, the worst first."""
    for name, slices in details.items():
        if name.startswith(BY) and slices:
            yield name.removeprefix(BY), worst_first(slices)


def worst_first(slices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the slices in which the metric is known, the worst first, then the others."""
    key = key_of(slices)

    def order(one: Mapping[str, Any]) -> tuple[bool, float]:
        value = one.get(key)
        return value is None, (value or 0.0) * ORDERS[key]

    return [dict(one) for one in sorted(slices, key=order)]


def key_of(slices: Sequence[Mapping[str, Any]]) -> str:
    """Return the metric that orders slices."""
    return next(name for name in ORDERS if name in slices[0])


def columns_of_slices(slices: Sequence[Mapping[str, Any]], column: str) -> list[Column]:
    """Return the columns of a table of slices."""
    numbers = [name for name in slices[0] if name not in ("value", "rows", "other")]
    return [
        Column("value", column),
        Column("rows", "rows", ","),
        *(Column(name, TITLES.get(name, name), ".5f") for name in numbers),
    ]


def print_slices(details: Mapping[str, Any]) -> None:
    """Print the worst slices of each column."""
    for column, slices in slices_of(details):
        print()
        shown = slices[:WORST]
        of = f"{len(shown)} of {len(slices)}" if len(slices) > WORST else f"{len(slices)}"
        print_table(
            shown, columns_of_slices(slices, column), title=f"Worst slices by {column}: {of}"
        )


def interval(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Return the 95 % interval of the values of a bootstrap: their quantiles .025 and .975, as
    `numpy.quantile` interpolates; None if a value is not finite.
    """
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if len(numbers) < max(len(values), 2):
        return None
    ends = quantiles(numbers, n=40, method="inclusive")
    return ends[0], ends[-1]


def intervals(details: Mapping[str, Any], split: str) -> dict[str, float]:
    """Return the ends of the intervals of a bootstrap, as entries of `metrics.json`: `val_auc_low`
    and `val_auc_high`.
    """
    entries: dict[str, float] = {}
    for name, values in _samples(details).items():
        if ends := interval(values):
            entries |= {f"{split}_{name}_low": ends[0], f"{split}_{name}_high": ends[1]}
    return entries


def _samples(details: Mapping[str, Any]) -> Mapping[str, list[float]]:
    """Return the values of a bootstrap by metric; empty without one."""
    samples: Mapping[str, list[float]] = details.get("bootstrap", {}).get("metrics", {})
    return samples


def note_no_interval(details: Mapping[str, Any]) -> None:
    """Print the metrics of a bootstrap that have no interval."""
    samples = _samples(details)
    if unknown := [name for name, values in samples.items() if interval(values) is None]:
        note(
            f"{', '.join(unknown)}: no interval, as it cannot be computed on some of the samples "
            "of the rows, such as those of one class only: measure more rows"
        )


def with_interval(run: RunRecord, key: str) -> str:
    """Return the interval of a metric in words, ` (.73 to .75)`; empty if there is none."""
    low, high = (run.value(f"{key}_{end}") for end in ("low", "high"))
    return "" if low is None or high is None else f" ({low:.5f} to {high:.5f})"


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
