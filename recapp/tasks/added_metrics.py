"""The metrics and details that the group `metrics` adds to those of a task.

This file imports torch; only settings that add something need it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from recapp.errors import ConfigError
from recapp.metrics import MAE, RMSE, click_metrics
from recapp.settings.records import Constructor
from recapp.tasks.detail_metrics import Bootstrap, Buckets, GroupAUC, Slices, ids_of
from recapp.tasks.measures import GAUC, Measure, MetricSettings
from recapp.tasks.task import Added, Output, Sample, Task

# The metrics of recapp that a bootstrap measures, by their usual names.
REPLICATED = (
    "auc",
    "log_loss",
    "normalized_entropy",
    "calibration",
    "pr_auc",
    "lift",
    "rmse",
    "mae",
)
# calls a constructor of the settings, which lie at a dotted name
Make = Callable[[Constructor, str], Any]


def added_metrics(task: Task, output: Output, settings: MetricSettings, make: Make) -> list[Added]:
    """Return the metrics and details to add.

    Args:
        task: The task.
        output: The output of the task that they read.
        settings: The group `metrics`.
        make: Makes the metrics of `metrics.extra`.

    Raises:
        ConfigError: A metric does not fit the task.
    """
    clicks = output.activation == "sigmoid"
    for name, value in (("group", settings.group), ("buckets", settings.buckets)):
        if value is not None and not clicks:
            raise ConfigError(
                f"metrics.{name}={value}: the output {output.name} is a number and no click: "
                f"leave metrics.{name}=null"
            )
    added = []
    if group := settings.group:
        measure = Measure(GAUC, f"gAUC by {group}", "max", output.name)
        make_gauc = partial(GroupAUC, group, soft_labels=output.soft)
        added.append(Added(GAUC, output, make_gauc, measure=measure))
    for name, constructor in settings.extra.items():
        added.append(_extra(task, output, name, constructor, group, make))
    for column in settings.by:
        make_slices = partial(Slices, column, clicks=clicks, soft_labels=output.soft)
        added.append(Added(f"by {column}", output, make_slices))
    if settings.buckets:
        added.append(Added("buckets", output, partial(Buckets, settings.buckets)))
    if settings.bootstrap:
        added.append(Added("bootstrap", output, _bootstrap(task, output, settings.bootstrap)))
    return added


def _bootstrap(task: Task, output: Output, replicates: int) -> Any:
    """Return the function that makes the bootstrap of a task's chosen metrics.

    Raises:
        ConfigError: None of them can be measured on samples of the rows.
    """
    clicks = output.activation == "sigmoid"
    kinds = {"rmse": RMSE, "mae": MAE}
    able = REPLICATED if clicks else tuple(kinds)
    names = [
        one.name
        for one in task.measures
        if one.name in able and (one.output or task.outputs[0].name) == output.name
    ]
    if not names:
        raise ConfigError(
            f"metrics.bootstrap={replicates}: none of the metrics "
            f"{', '.join(one.name for one in task.measures)} has intervals for the output "
            f"{output.name}; these have: {', '.join(able)}"
        )

    def make_bootstrap(sync_on_compute: bool) -> Metric:
        if clicks:
            metrics = click_metrics(names, sync_on_compute, output.soft, replicates)
        else:
            metrics = {
                name: kinds[name](sync_on_compute=sync_on_compute, replicates=replicates)
                for name in names
            }
        return Bootstrap(metrics, replicates, sync_on_compute=sync_on_compute)

    return make_bootstrap


# ---- torchmetrics


def _extra(
    task: Task, output: Output, name: str, settings: Constructor, group: str | None, make: Make
) -> Added:
    """Return a metric of torchmetrics, after it was tried on a few samples.

    Raises:
        ConfigError: It does not fit.
    """
    where = f"metrics.extra.{name}"
    taken_names = hasattr(MetricCollection({}), name) or name in ("buckets", "bootstrap")
    if taken_names or "." in name or " " in name:
        raise ConfigError(f"{where}: cannot be a name: choose another without dots and blanks")
    if name in (GAUC, *(one.name for one in task.known)):
        raise ConfigError(f"{where}: is a metric of the task: give yours another name")
    metric = make(settings, where)
    says = f"{where} ({settings.target})"
    if not isinstance(metric, Metric):
        raise ConfigError(f"{says}: must make a torchmetrics.Metric")
    parameters = list(signature(type(metric).update).parameters)[1:]
    if parameters[:2] != ["preds", "target"]:
        raise ConfigError(
            f"{says}: its update takes ({', '.join(parameters)}): must take (preds, target), the "
            "predictions and the labels of a batch"
        )
    if type(metric).__name__.startswith(("Multiclass", "Multilabel")):
        raise ConfigError(f"{says}: is of several classes: choose its Binary one, or task: binary")
    if "indexes" in parameters and group is None:
        raise ConfigError(f"{says}: measures groups: set metrics.group=COLUMN")
    whole = any(
        kind.__module__.startswith(("torchmetrics.classification", "torchmetrics.retrieval"))
        for kind in type(metric).__mro__
    )
    if whole and (output.soft or output.real):
        kind = "any number" if output.real else "between 0 and 1"
        raise ConfigError(f"{says}: needs labels of 0 or 1, and those of the task may be {kind}")
    indexes = "indexes" in parameters
    empty = _try(metric, says, whole=whole, indexes=indexes)
    update = partial(_add_extra, whole=whole, column=group if indexes else None, empty=empty)
    better = {True: "max", False: "min", None: None}[metric.higher_is_better]
    measure = Measure(name, name.replace("_", " "), better, output.name)

    def make_synced(sync_on_compute: bool) -> Metric:
        synced: Metric = make(settings, where)
        synced.sync_on_compute = sync_on_compute
        synced._to_sync = sync_on_compute
        for state, default in synced._defaults.items():
            if isinstance(default, list) and synced._reductions[state] is None:
                synced._reductions[state] = dim_zero_cat  # one exchange whatever a rank's batches
        return synced

    return Added(name, output, make_synced, measure, update)


def _add_extra(
    metric: Any, sample: Sample, whole: bool, column: str | None, empty: Mapping[str, Tensor]
) -> None:
    if not len(sample.label_B):  # some metrics of torchmetrics refuse an empty batch
        for state, values in empty.items():  # a rank without rows exchanges the same dtypes
            getattr(metric, state).append(values.to(sample.label_B.device))
        metric._update_count += 1  # else it warns that it had no batch
        return
    target_B = sample.label_B.long() if whole else sample.label_B
    indexes = {"indexes": ids_of(sample.batch, column)} if column else {}
    metric.update(sample.score_B, target_B, **indexes)


def _try(metric: Any, says: str, *, whole: bool, indexes: bool) -> dict[str, Tensor]:
    """Update a metric with a few samples, and return its lists of rows, without rows.

    Raises:
        ConfigError: It refuses them, or its value is not one number.
    """
    scores = torch.tensor([0.1, 0.9, 0.4, 0.6])
    target = torch.tensor([0, 1, 1, 0])
    try:
        groups = {"indexes": torch.zeros(4, dtype=torch.int64)} if indexes else {}
        metric._to_sync = False  # also where one rank alone makes the task
        metric.update(scores, target if whole else target.float(), **groups)
        value = metric.compute()
    except Exception as error:
        raise ConfigError(f"{says}: {' '.join(str(error).split())}") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        is_tensor = isinstance(value, Tensor)
        kind = f"a tensor of shape {list(value.shape)}" if is_tensor else type(value).__name__
        raise ConfigError(f"{says}: its value is {kind}: must be one number")
    lists = {name: getattr(metric, name) for name in metric._defaults}
    return {
        name: rows[0].new_empty(0, *rows[0].shape[1:])
        for name, rows in lists.items()
        if isinstance(rows, list) and rows
    }
