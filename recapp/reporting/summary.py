"""The end of a run: the summary on the terminal, and `metrics.json`. Rank 0 writes them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recapp.console import note, print_table, short_path
from recapp.errors import TrainingError
from recapp.reporting.data_read import files_of, left_out_of
from recapp.reporting.details import print_slices, read_details, with_interval
from recapp.reporting.record import METRICS_FILE, write_measures, write_metrics
from recapp.tasks.measures import Measures
from recapp.tasks.metric_settings import GAUC
from recapp.tasks.task import Output, Task

SPLITS = {"val": "validation", "test": "test"}
HIDDEN_SHARE = "hidden_share_"
CALIBRATION = ", predicted over real share: 1 is right"


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
    split = measured.get("split", "val")
    measures = task.known_measures
    _refuse_nan(measured, split, measures)
    write_measures(measures, directory)
    metrics = write_metrics(measured, directory)
    of_task = {f"{split}_{measure.name}" for measure in task.known}
    undefined = [name for name in metrics.get("undefined", []) if name.startswith(f"{split}_")]
    if own := [name for name in undefined if name in of_task]:
        note(
            f"{', '.join(own)} cannot be computed: the {SPLITS[split]} rows are of one "
            "class only; choose others with "
            f"dataset.{'test_path' if split == 'test' else 'val_share or dataset.val_path'}"
        )
    if added := [name for name in undefined if name not in of_task]:
        note(
            f"{', '.join(added)} cannot be computed on the {SPLITS[split]} rows"
            + (": no group has both classes" if f"{split}_{GAUC}" in added else "")
        )
    if format == "text":
        behind = metrics.get("checkpoint_step")
        steps = metrics.get("steps")
        of = f" (step {behind} of {steps})" if behind != steps else ""
        result = f"checkpoint  {short_path(metrics['checkpoint'])}{of}"
        _print(_lines_of_run(metrics, split, measures), result, directory)
        print_slices(read_details(directory, behind))


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
    metrics = write_metrics(measured, directory)
    columns = [output.column for output in outputs]
    if metrics["rows"] and None in [metrics[f"mean_{column}"] for column in columns]:
        note("some scores are not finite: the logits of the model are too large for its dtype")
    if format == "text":
        result = f"scores      {short_path(metrics['output'])}"
        _print(_lines_of_prediction(metrics, columns), result, directory)


def _refuse_nan(metrics: Mapping[str, Any], split: str, measures: Measures) -> None:
    """Check metrics that are finite on any rows if predictions are finite, such as the log loss.

    Raises:
        TrainingError: A metric is not finite.
    """
    for measure in measures:
        value = metrics.get(f"{split}_{measure.name}")
        if measure.defined and value is not None and not math.isfinite(value):
            raise TrainingError(
                f"the {SPLITS[split]} {measure.title} is {value}: either there were no rows, or "
                "the model's predictions are not finite; lower optimizer.sparse.lr and "
                "optimizer.dense.lr"
            )


def _lines_of_run(
    metrics: Mapping[str, Any], split: str, measures: Measures
) -> Iterator[tuple[str, str]]:
    for measure in measures:
        if (key := f"{split}_{measure.name}") in metrics:
            found = _score(metrics[key]) + with_interval(metrics, key)
            found += CALIBRATION if measure.name == "calibration" else ""
            yield f"{SPLITS[split]} {measure.title}", found
    if better := metrics.get("better_epoch"):
        yield "better than these joined models", better
    if "split" in metrics:
        yield from _rows_read(metrics["rows_read"], rows=True)
    best = measures.get(measures.best)
    if best and (drawn := metrics.get(f"hidden_model_{best.name}")):
        yield f"{best.title} of the model that drew the labels", _score(drawn)
    yield "plan", _plan(metrics)
    if metrics.get("samples_per_second"):
        yield "samples/s, all ranks", f"{metrics['samples_per_second']:,.0f}"
        yield "step, median", f"{metrics['step_ms']:.1f} ms"
    if seconds := metrics.get("train_seconds"):
        yield "training, with validation", f"{seconds:,.1f} s"
    shares = [
        f"{name.removeprefix(HIDDEN_SHARE)} {share:.0%}"
        for name, share in metrics.items()
        if name.startswith(HIDDEN_SHARE)
    ]
    if shares:
        yield "exchange hidden", ", ".join(shares)
    if reason := metrics.get("stopped"):
        yield "stopped" if metrics["status"] == "stopped" else "stopped early", reason


def _lines_of_prediction(
    metrics: Mapping[str, Any], columns: Sequence[str]
) -> Iterator[tuple[str, str]]:
    earlier = metrics["rows"] - metrics["rows_scored"]
    yield "rows", f"{metrics['rows']:,}" + (f", {earlier:,} of them earlier" if earlier else "")
    yield from _rows_read(metrics["rows_read"], rows=False)
    yield "rows a second", f"{metrics['rows_per_second']:,.0f}"
    yield "seconds", f"{metrics['seconds']:,.1f}"
    for column in columns:
        least, largest = (_score(metrics[f"{end}_{column}"]) for end in ("least", "largest"))
        yield f"mean {column}", _score(metrics[f"mean_{column}"])
        yield f"range of {column}", f"{least} to {largest}"
    yield "plan", _plan(metrics)


def _rows_read(record: Mapping[str, Any], *, rows: bool) -> Iterator[tuple[str, str]]:
    """Yield the files of an evaluation or a prediction, and what is left out beside them."""
    for split in record["splits"].values():
        if rows:
            yield "rows", f"{split['rows']:,}"
        yield "files", files_of(split)
    if out := left_out_of(record):
        yield "left out", out


def _print(lines: Iterable[tuple[str, str]], result: str, directory: Path) -> None:
    print()
    print_table([{"what": what, "value": value} for what, value in lines], title="Summary")
    print(f"\n{result}\nmetrics     {short_path(directory / METRICS_FILE)}", flush=True)


def _plan(metrics: Mapping[str, Any]) -> str:
    return f"{metrics['plan']}, {metrics['ranks']} rank{'s' if metrics['ranks'] > 1 else ''}"


def _score(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.5f}"
