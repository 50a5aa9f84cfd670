"""What a run says of its results: the details of its validations, what it prints at its end (the
summary), its facts, and the rows that it reads. Rank 0 prints, and writes `metrics.json` and
`details.json`: metrics by slice, calibration by bucket, values of a bootstrap.

    {"validations": [{"step": 400, "by C1": [{"value": "a1", "rows": 120, "auc": .71, ...}, ...],
                      "buckets": [{"rows": ..., "predicted": .03, "clicks": .02}, ...],
                      "bootstrap": {"drawn": [...], "metrics": {"auc": [...], ...}}}, ...]}
"""

import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import quantiles
from textwrap import wrap
from typing import Any

from recapp.console import Column, json_value, note, print_table, readable, short_path
from recapp.dataset.data_settings import DataSettings
from recapp.errors import TrainingError
from recapp.reporting.run_record import (
    DETAILS_FILE,
    METRICS_FILE,
    RowsRead,
    RunRecord,
    SplitRead,
    read_document,
    write_measures,
    write_metrics,
)
from recapp.settings.records import record
from recapp.settings.uris import URI
from recapp.settings.whole_file import write_whole
from recapp.tables.config import EmbeddingConfig
from recapp.tasks.measures import GAUC, Measures
from recapp.tasks.task import Output, Task

SPLITS = {"val": "validation", "test": "test"}
HIDDEN_SHARE = "hidden_share_"
CALIBRATION = ", predicted over real share: 1 is right"
WIDTH = 80
VERSION = "version_"  # prefix of a package's name
PACKAGES = ("recapp", "torch", "lightning")
USES = {"train": "train", "val": "validate", "test": "test", "input": "score"}

KEPT = 50  # validations of a run
WORST = 10  # slices of a column that are shown
BY = "by "
ORDERS = {
    "auc": 1,
    "rmse": -1,
}  # the first metric that slices have orders them: 1 if larger is better
TITLES = {"auc": "AUC", "log_loss": "log loss", "rmse": "RMSE"}


# ---- the details of validations


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
    validations = [*of_best, *earlier[1 - KEPT :], {"step": step, **details}]
    text = json.dumps(json_value({"validations": validations}), allow_nan=False)
    write_whole(directory / DETAILS_FILE, f"{text}\n")


def read_details(directory: Path, step: object = None) -> dict[str, Any]:
    """Return the details of the validation after a step; None is the last one. The result is empty
    if there are none.
    """
    every = _validations(directory)
    same = [one for one in every if step is None or one.get("step") == step]
    return dict((same or [{}])[-1])


def _validations(directory: Path) -> list[dict[str, Any]]:
    return list((read_document(directory / DETAILS_FILE) or {}).get("validations", []))


def slices_of(details: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each column of `metrics.by`, with its slices, the worst first."""
    for name, slices in details.items():
        if name.startswith(BY) and slices:
            key = next(known for known in ORDERS if known in slices[0])
            # those in which the metric is not known come last
            orders = [(one.get(key) is None, (one.get(key) or 0.0) * ORDERS[key]) for one in slices]
            pairs = sorted(zip(orders, slices, strict=True), key=lambda pair: pair[0])
            yield name.removeprefix(BY), [dict(one) for _, one in pairs]


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
    and `val_auc_high`; print the metrics that have none.
    """
    samples: Mapping[str, list[float]] = details.get("bootstrap", {}).get("metrics", {})
    ends = {name: interval(values) for name, values in samples.items()}
    if unknown := [name for name, known in ends.items() if known is None]:
        note(
            f"{', '.join(unknown)}: no interval, as it cannot be computed on some of the samples "
            "of the rows, such as those of one class only: measure more rows"
        )
    return {
        f"{split}_{name}_{end}": value
        for name, known in ends.items()
        for end, value in zip(("low", "high"), known or (), strict=False)
    }


def with_interval(run: RunRecord, key: str) -> str:
    """Return the interval of a metric in words, ` (.73 to .75)`; empty if there is none."""
    low, high = (run.value(f"{key}_{end}") for end in ("low", "high"))
    return "" if low is None or high is None else f" ({low:.5f} to {high:.5f})"


# ---- the summary


def report_end(measured: Mapping[str, Any], task: Task, directory: Path, format: str) -> None:
    """Write `metrics.json` and `task.json` of a training run or an evaluation, and print its
    summary.

    Args:
        measured: The content of `metrics.json`.
        task: The task.
        directory: The directory of the run.
        format: The format of the printed result; `json` prints no summary.

    Raises:
        TrainingError: A metric that is defined on any rows is not a finite number.
    """
    measures = task.known_measures
    split = measured.get("split", "val")
    for measure in measures:  # some are finite on any rows if predictions are, as the log loss
        value = measured.get(f"{split}_{measure.name}")
        if measure.defined and value is not None and not math.isfinite(value):
            raise TrainingError(
                f"the {SPLITS[split]} {measure.title} is {value}: either there were no rows, or "
                "the model's predictions are not finite; lower optimizer.sparse.lr and "
                "optimizer.dense.lr"
            )
    write_measures(measures, directory)
    run = record(RunRecord, write_metrics(measured, directory))
    of_task = {f"{split}_{measure.name}" for measure in task.known}
    undefined = [name for name in run.undefined if name.startswith(f"{split}_")]
    if one_class := [name for name in undefined if name in of_task]:
        note(
            f"{', '.join(one_class)} cannot be computed: the {SPLITS[split]} rows are of one "
            "class only; choose others with "
            f"dataset.{'test_path' if split == 'test' else 'val_share or dataset.val_path'}"
        )
    if added := [name for name in undefined if name not in of_task]:
        note(
            f"{', '.join(added)} cannot be computed on the {SPLITS[split]} rows"
            + (": no group has both classes" if f"{split}_{GAUC}" in added else "")
        )
    if format == "text":
        result = f"checkpoint  {short_path(run.checkpoint or '')}{step_of_checkpoint(run)}"
        _print(lines_of_run(run, split, measures), result, directory)
        print_slices(read_details(directory, run.checkpoint_step))


def report_prediction(
    measured: Mapping[str, Any], outputs: Sequence[Output], directory: Path, format: str
) -> None:
    """Write `metrics.json` of a prediction, and print its summary.

    Args:
        measured: The content of `metrics.json`.
        outputs: The outputs of the task.
        directory: The directory of the run.
        format: The format of the printed result; `json` prints no summary.
    """
    run = record(RunRecord, write_metrics(measured, directory))
    columns = [output.column for output in outputs]
    if run.rows and None in [run.value(f"mean_{column}") for column in columns]:
        note("some scores are not finite: the logits of the model are too large for its dtype")
    if format == "text":
        result = f"scores      {short_path(run.output or '')}"
        _print(_lines_of_prediction(run, columns), result, directory)


def step_of_checkpoint(run: RunRecord) -> str:
    """Return the step of a run's checkpoint in words, ` (step 400 of 800)`; empty for the last."""
    last = run.checkpoint_step == run.steps
    return "" if last else f" (step {run.checkpoint_step} of {run.steps})"


def lines_of_run(run: RunRecord, split: str, measures: Measures) -> Iterator[tuple[str, str]]:
    """Yield the lines of a summary, as a name and a text.

    Args:
        run: The results of a training run or an evaluation.
        split: The measured rows, `val` or `test`.
        measures: The metrics of the task.
    """
    for measure in measures:
        if (key := f"{split}_{measure.name}") in run.more:
            text = _score(run.value(key)) + with_interval(run, key)
            text += CALIBRATION if measure.name == "calibration" else ""
            yield f"{SPLITS[split]} {measure.title}", text
    if run.better_epoch:
        yield "better than these joined models", run.better_epoch
    if run.split:
        yield from _rows_read(run.rows_read, rows=True)
    yield "plan", _plan(run)
    if run.samples_per_second:
        yield "samples/s, all ranks", f"{run.samples_per_second:,.0f}"
        yield "step, median", f"{run.step_ms:.1f} ms"
    if run.train_seconds:
        yield "training, with validation", f"{run.train_seconds:,.1f} s"
    shares = [
        f"{name.removeprefix(HIDDEN_SHARE)} {share:.0%}"
        for name, share in run.more.items()
        if name.startswith(HIDDEN_SHARE)
    ]
    if shares:
        yield "exchange hidden", ", ".join(shares)
    if run.stopped:
        yield "stopped" if run.status == "stopped" else "stopped early", run.stopped


def _lines_of_prediction(run: RunRecord, columns: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield "rows", f"{run.rows:,}"
    yield from _rows_read(run.rows_read, rows=False)
    yield "rows a second", f"{run.rows_per_second:,.0f}"
    yield "seconds", f"{run.seconds:,.1f}"
    for column in columns:
        least, largest = (_score(run.value(f"{end}_{column}")) for end in ("least", "largest"))
        yield f"mean {column}", _score(run.value(f"mean_{column}"))
        yield f"range of {column}", f"{least} to {largest}"
    yield "plan", _plan(run)


def _rows_read(read: RowsRead | None, *, rows: bool) -> Iterator[tuple[str, str]]:
    """Yield the files of an evaluation or a prediction, and what is left out beside them."""
    for split in read.splits.values() if read else ():
        if rows:
            yield "rows", f"{split.rows:,}"
        yield "files", files_of(split)
    if read and (out := left_out_of(read)):
        yield "left out", out


def _print(lines: Iterable[tuple[str, str]], result: str, directory: Path) -> None:
    print()
    print_table([{"what": what, "value": value} for what, value in lines], title="Summary")
    print(f"\n{result}\nmetrics     {short_path(directory / METRICS_FILE)}", flush=True)


def _plan(run: RunRecord) -> str:
    return f"{run.plan}, {run.ranks} rank{'' if run.ranks == 1 else 's'}"


def _score(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.5f}"


# ---- the facts that a person needs to repeat a run, or to doubt it


def about(
    dataset: DataSettings,
    model: str,
    precision: object,
    *,
    rows: tuple[int, int],
    rows_read: Mapping[str, Any],
    hosts: Sequence[str],
    tables: Sequence[EmbeddingConfig],
    device: str,
) -> dict[str, Any]:
    """Return the facts about a training run that has just ended, for `metrics.json`.

        {"dataset": "/data/clicks", "rows_train": 5142, "rows_val": 858, "model": "DLRM",
         "tables": 26, "table_rows": 1008234, "batch_size": 1024, "precision": "32-true",
         "hosts": ["node7"], "device": "cpu", "version_recapp": "0.1.0", ...,
         "date": "2026-11-22T10:15:00+00:00"}

    Args:
        dataset: The settings of the data set.
        model: The dotted class of the model.
        precision: The precision of the trainer.
        rows: The number of training rows and the number of validation rows.
        rows_read: The record of their files (`recapp/dataset/click_rows.py`), as plain values.
        hosts: The host of each rank.
        tables: The embedding tables of the model.
        device: The device of rank 0.
    """
    small = dataset.scaled
    return {
        "dataset": small.path if isinstance(small.path, str) else list(small.path),
        "rows_train": rows[0],
        "rows_val": rows[1],
        "rows_read": rows_read,
        "model": model.rpartition(".")[2],
        "tables": len(tables),
        "table_rows": sum(table.num_embeddings for table in tables),
        "table_parameters": sum(table.num_embeddings * table.embedding_dim for table in tables),
        "batch_size": small.batch_size,
        "precision": precision,
        "hosts": list(dict.fromkeys(hosts)),
        "device": str(device),
        **{f"{VERSION}{name}": text for name, text in versions().items()},
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which a run's results depend."""
    of_packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # imported from a directory, not installed
            of_packages[name] = version(name)
    return {**of_packages, "python": platform.python_version()}


# ---- the rows that a run reads


def print_rows_read(plain: Mapping[str, Any]) -> None:
    """Print the files and rows of each split as a table, and lines of labels and what is left
    out below.

    Args:
        plain: The record of `recapp/dataset/click_rows.py`.
    """
    read = record(RowsRead, plain)
    splits = read.splits
    files = [path for split in splits.values() for path in (split.first, split.last)]
    top = _common_folder(files)
    rows = [
        {
            "what": USES.get(name, name),
            "files": split.files,
            "rows": split.rows,
            **{f"share of {label}": share for label, share in split.positives.items()},
            "first": _below(split.first, top),
            "last": _below(split.last, top) if split.files > 1 else "",
        }
        for name, split in splits.items()
    ]
    labels = dict.fromkeys(label for split in splits.values() for label in split.positives)
    columns = [
        Column("what", "rows to"),
        Column("files", "files"),
        Column("rows", "rows"),
        *(Column(f"share of {label}", f"share of\n{label}", ".2%") for label in labels),
        Column("first", "first file"),
        Column("last", "last file"),
    ]
    print_table(rows, columns, title=f"Data in {top}")
    sampled = [
        f"the first {split.positives_of:,} of {split.rows:,} rows to {USES.get(name, name)}"
        for name, split in splits.items()
        if split.positives and split.positives_of < split.rows
    ]
    lines = [f"shares: counted on {', '.join(sampled)}"] if sampled else []
    lines += [f"left out: {out}"] if (out := left_out_of(read)) else []
    for line in lines:
        for part in wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False):
            print(readable(part))


def _common_folder(files: Sequence[str]) -> str:
    """Return the directory of all files; empty if there is none, as for a disk and a bucket."""
    schemes = {uri[1] if (uri := URI.match(path)) else "" for path in files}
    if len(schemes) != 1:
        return ""
    top = os.path.commonpath([Path(path).parent for path in files])
    return top if schemes == {""} else top.replace(":/", "://", 1)


def _below(path: str, top: str) -> str:
    return os.path.relpath(path, top) if top else path


def files_of(split: SplitRead) -> str:
    """Return the files of a split in words: `3 files, a.parquet to c.parquet`."""
    first, last = (Path(getattr(split, end)).name for end in ("first", "last"))
    return f"{split.files:,} files, {first} to {last}" if split.files > 1 else first


def left_out_of(read: RowsRead) -> str:
    """Return what is left out in words: `hidden 2 (_SUCCESS, _metadata)`; empty for nothing."""
    return "; ".join(
        f"{one.why} {one.count:,} "
        f"({', '.join(one.names)}{', ..' if one.count > len(one.names) else ''})"
        for one in read.left_out
    )
