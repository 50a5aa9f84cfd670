"""The end of a run: the summary on the terminal, and `metrics.json`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recapp.console import note, print_table, short_path
from recapp.errors import TrainingError
from recapp.processes.stopping import Stopped
from recapp.recipe.recipe import Train
from recapp.reporting.record import write_measures, write_metrics
from recapp.tasks.measures import Measures

SPLITS = {"val": "validation", "test": "test"}


def report_end(
    recipe: Train, measured: dict[str, Any], job_dir: Path, stopped: Stopped | None
) -> None:
    """Write `metrics.json` and `task.json`, and print the summary; called on rank 0.

    Args:
        recipe: The recipe of the run.
        measured: The content of `metrics.json`.
        job_dir: The directory of the run.
        stopped: The signal that has ended training early, or None.

    Raises:
        TrainingError: A metric that is defined on any rows is not a finite number.
    """
    split = measured.get("split", "val")
    measures = recipe.built_task.known_measures
    refuse_nan(measured, split, measures)
    write_measures(measures, job_dir)
    metrics = write_metrics(measured, job_dir)
    if undefined := [n for n in metrics.get("undefined", []) if n.startswith(f"{split}_")]:
        note(
            f"{', '.join(undefined)} cannot be computed: the {SPLITS[split]} rows are of one "
            "class only; choose others with "
            f"dataset.{'test_path' if split == 'test' else 'val_share or dataset.val_path'}"
        )
    if recipe.format == "text":
        print_summary(metrics, job_dir, measures)
    if stopped is not None:
        note(f"to go on: python -m recapp.train ckpt_path={short_path(metrics['last_checkpoint'])}")


def report_prediction(recipe: Train, measured: dict[str, Any], job_dir: Path) -> None:
    """Write `metrics.json` of a prediction and print its summary; called on rank 0.

    Args:
        recipe: The recipe of the run.
        measured: The content of `metrics.json`.
        job_dir: The directory of the run.
    """
    metrics = write_metrics(measured, job_dir)
    columns = [output.column for output in recipe.built_task.outputs]
    if metrics["rows"] and None in [metrics[f"mean_{column}"] for column in columns]:
        note("some scores are not finite: the model's logits are too large for its numbers")
    if recipe.format != "text":
        return
    earlier = metrics["rows"] - metrics["rows_scored"]
    shown = [
        ("rows", f"{metrics['rows']:,}" + (f", {earlier:,} of them earlier" if earlier else "")),
        ("rows a second", f"{metrics['rows_per_second']:,.0f}"),
        ("seconds", f"{metrics['seconds']:,.1f}"),
    ]
    for column in columns:
        least, largest = (_score(metrics[f"{what}_{column}"]) for what in ("least", "largest"))
        shown += [(f"mean {column}", _score(metrics[f"mean_{column}"]))]
        shown += [(f"{column}s", f"{least} to {largest}")]
    shown += [("plan", _plan(metrics))]
    print()
    print_table([{"what": what, "value": value} for what, value in shown], title="Summary")
    print(
        f"\nscores      {short_path(metrics['output'])}\nmetrics     "
        f"{short_path(job_dir / 'metrics.json')}",
        flush=True,
    )


def _plan(metrics: Mapping[str, Any]) -> str:
    return f"{metrics['plan']}, {metrics['ranks']} rank{'s' if metrics['ranks'] > 1 else ''}"


def _score(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.5f}"


def refuse_nan(metrics: Mapping[str, Any], split: str, measures: Measures) -> None:
    """Check metrics that are finite on any rows if predictions are finite, such as the log loss.

    Raises:
        TrainingError: A metric is not finite.
    """
    for measure in measures:
        value = metrics.get(f"{split}_{measure.name}")
        if measure.defined and value is not None and not math.isfinite(value):
            raise TrainingError(
                f"the {SPLITS[split]} {measure.title} is {value}: either no row was looked at, or "
                "the model's predictions are not finite; lower optimizer.sparse.lr and "
                "optimizer.dense.lr"
            )


def print_summary(metrics: Mapping[str, Any], job_dir: Path, measures: Measures) -> None:
    """Print metrics, speed, and the paths of checkpoint and metrics."""
    split = metrics.get("split", "val")
    rows = [
        {
            "what": f"{SPLITS[split]} {measure.title}",
            "value": "undefined" if (value := metrics[key]) is None else f"{value:.5f}",
        }
        for measure in measures
        if (key := f"{split}_{measure.name}") in metrics
    ]
    best = measures.get(measures.best)
    if best and (hidden := metrics.get(f"hidden_model_{best.name}")):
        what = f"{best.title} of the model that drew the labels"
        rows += [{"what": what, "value": f"{hidden:.5f}"}]
    rows += [{"what": "plan", "value": _plan(metrics)}]
    if metrics.get("samples_per_second"):
        rows += [
            {"what": "samples/s, all ranks", "value": f"{metrics['samples_per_second']:,.0f}"},
            {"what": "step, median", "value": f"{metrics['step_ms']:.1f} ms"},
        ]
    if metrics.get("train_seconds"):
        rows += [
            {"what": "training, with validation", "value": f"{metrics['train_seconds']:,.1f} s"}
        ]
    hidden = {
        key.removeprefix("hidden_share_"): share
        for key, share in metrics.items()
        if key.startswith("hidden_share_")
    }
    if hidden:
        rows += [
            {
                "what": "exchange hidden",
                "value": ", ".join(f"{phase} {share:.0%}" for phase, share in hidden.items()),
            }
        ]
    if metrics.get("stopped"):
        rows += [
            {
                "what": "stopped" if metrics["status"] == "stopped" else "stopped early",
                "value": metrics["stopped"],
            }
        ]
    behind = metrics.get("checkpoint_step")
    steps = metrics.get("steps")
    of = f" (step {behind} of {steps})" if behind != steps else ""
    print()
    print_table(rows, title="Summary")
    print(
        f"\ncheckpoint  {short_path(metrics['checkpoint'])}{of}\nmetrics     "
        f"{short_path(job_dir / 'metrics.json')}",
        flush=True,
    )
