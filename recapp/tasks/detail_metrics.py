"""What the group `metrics` adds to the metrics of a task: the AUC within groups, metrics of
torchmetrics, and details of validation. This file imports torch; only settings that add something
need it.

    GroupAUC     the mean of the AUC of each group
    Slices       sums of the rows of each frequent value of a column
    Buckets      sums of the rows of each bucket of the prediction
    Bootstrap    the metrics of R samples of the rows, in one pass

A detail is more than one number, plain values in details.json. Memory is bounded: a column has its
`SLICES` most frequent values and `other`, a slice's AUC comes from `SLICE_BINS` bins of the logit.

A bootstrap draws N of N rows with replacement; a row is then drawn Poisson(1) times, nearly. So
each row gets R such numbers as weights, and each metric becomes R values. Sums need no other row,
so batches and ranks do not matter (Hanley and MacGibbon 2006, "Creating non-parametric bootstrap
samples using Poisson frequencies"; Chamandy et al. 2012, "Estimating Uncertainty for Massive Data
Streams"). The numbers of a row follow from its place in the data set. Thus they are the same for
another model (also one of other columns), number of ranks and batch size, and the difference of two
models on the same samples of rows is known by subtraction.

Shapes: B samples of a batch on this rank, V values of a column and `other`, K bins, 5 or 3 sums, R
replicates; N samples of all batches and ranks, G groups, T sets of samples of one group with equal
logits.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from recapp.errors import ConfigError
from recapp.metrics import BINS, MAE, RMSE, click_metrics, logit_bins
from recapp.settings.records import Constructor
from recapp.sparse.keyed_jagged_tensor import Batch, as_int64
from recapp.sparse.missing_ids import MISSING
from recapp.tables.positions import positions_of as mixed  # SplitMix64's mix
from recapp.tables.positions import shifted
from recapp.tasks.measures import GAUC, Measure, MetricSettings
from recapp.tasks.task import Added, Output, Sample, Task

SLICES = 20
SLICE_BINS = 2**10
BUCKET_BINS = 2**12
OTHER = "other"


class Detail(Metric):
    """A detail of validation: more than one number."""

    # The sparse column whose frequent values it needs to know before the first batch.
    column = ""

    def _add_sums(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> None:
        self.add_state(name, torch.zeros(shape, dtype=dtype), dist_reduce_fx="sum")

    @abstractmethod
    def record(self) -> Any:
        """Return the plain values over the batches of all ranks, for a file. Each rank calls it."""


def ids_of(batch: Batch, column: str) -> Tensor:
    """Return the id of each sample in a sparse column of single ids, int64 [B].

    Raises:
        ConfigError: A row has a list of ids.
    """
    jagged = batch.sparse[column]
    lengths_B = jagged.lengths()
    values = as_int64(jagged.values())
    if len(values) == len(lengths_B) and bool((lengths_B == 1).all()):
        return values
    if bool((lengths_B > 1).any()):
        raise ConfigError(
            f"metrics: the column {column} has a list of ids in a row: choose one of single ids"
        )
    ids_B = torch.full_like(lengths_B, MISSING, dtype=torch.int64)
    ids_B[lengths_B == 1] = values
    return ids_B


class Slices(Detail):
    """Metrics of the rows of each frequent value of a column, and of all other rows.

    Clicks have AUC, log loss and calibration; numbers have RMSE and the mean difference.

    Args:
        column: The sparse column.
        clicks: Whether outputs are logits of clicks; if not, they are numbers.
        soft_labels: Whether labels of clicks may lie between 0 and 1.
        kwargs: The arguments of `torchmetrics.Metric`.
    """

    full_state_update = False
    sums: Tensor
    counts: Tensor

    def __init__(
        self, column: str, clicks: bool = True, soft_labels: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.column = column
        self.clicks = clicks
        self.soft_labels = soft_labels
        self.names: list[str] = []
        self._ids = torch.empty(0, dtype=torch.int64)
        self._add_sums("sums", SLICES + 1, 5)
        self._add_sums("counts", 2, SLICES + 1, SLICE_BINS + 1)

    def set_values(self, values: Sequence[tuple[str, int]]) -> None:
        """Set the values, before the first batch.

        Args:
            values: Text and id of the most frequent values.
        """
        ordered = sorted(values[:SLICES], key=lambda value: value[1])
        self.names = [text for text, _ in ordered]
        self._ids = torch.tensor([number for _, number in ordered], dtype=torch.int64)

    @override
    def update(self, sample: Sample) -> None:
        output_B = sample.output_B.double()
        score_B = sample.score_B.double()
        label_B = sample.label_B.double()
        one_B = torch.ones_like(output_B)
        weight_B = one_B if sample.weight_B is None else sample.weight_B.double()
        if self.clicks:
            loss_B = torch.nn.functional.binary_cross_entropy_with_logits(
                output_B, label_B, reduction="none"
            )
        else:
            loss_B = (output_B - label_B).square()
        slot_B = self._slots(ids_of(sample.batch, self.column))
        terms_B5 = torch.stack(
            [one_B, weight_B, weight_B * label_B, weight_B * score_B, weight_B * loss_B], 1
        )
        self.sums.index_add_(0, slot_B, terms_B5)
        if self.clicks:
            share_B = label_B if self.soft_labels else (label_B > 0.5).double()
            at_B = slot_B * (SLICE_BINS + 1) + logit_bins(output_B) // (BINS // SLICE_BINS)
            self.counts[0].view(-1).index_add_(0, at_B, weight_B * (1 - share_B))
            self.counts[1].view(-1).index_add_(0, at_B, weight_B * share_B)

    def _slots(self, ids_B: Tensor) -> Tensor:
        """Return the number of the slice of each sample, [B]."""
        if not self.names:
            return torch.full_like(ids_B, SLICES)
        known = self._ids = self._ids.to(ids_B.device)
        place_B = torch.searchsorted(known, ids_B).clamp_(max=len(known) - 1)
        return torch.where(known[place_B] == ids_B, place_B, SLICES)

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return the sums, [V, 5], and the AUC of each slice, [V]."""
        others_VK, clicks_VK = self.counts[:, :, :-1]
        below_VK = others_VK.cumsum(1) - others_VK / 2
        pairs_V = others_VK.sum(1) * clicks_VK.sum(1)
        unknown_V = (pairs_V == 0) | (self.counts[:, :, -1].sum(0) > 0)
        auc_V = (clicks_VK * below_VK).sum(1) / torch.where(unknown_V, torch.nan, pairs_V)
        return self.sums, auc_V

    def record(self) -> list[dict[str, Any]]:
        """Return the slices that have rows, the most frequent first and `other` last."""
        sums_V5, auc_V = self.compute()
        names = [*self.names, *[""] * (SLICES - len(self.names)), OTHER]
        slices = []
        for slot, (name, sums) in enumerate(zip(names, sums_V5.tolist(), strict=True)):
            rows, weight, label, score, loss = sums
            if not rows:
                continue
            auc = float(auc_V[slot])
            if self.clicks:
                metrics = {
                    "auc": _finite(auc),
                    "log_loss": _ratio(loss, weight),
                    "calibration": _ratio(score, label),
                }
            else:
                square = _ratio(loss, weight)
                difference = _ratio(score - label, weight)
                rmse = None if square is None else square**0.5
                metrics = {"rmse": rmse, "difference": difference}
            slices.append({"value": name, "rows": int(rows), **metrics, "other": slot == SLICES})
        return sorted(slices, key=lambda one: (one["other"], -one["rows"]))


class Buckets(Detail):
    """The calibration of buckets of predictions with equal numbers of rows.

    Args:
        buckets: The number of buckets.
        kwargs: The arguments of `torchmetrics.Metric`.
    """

    full_state_update = False
    sums: Tensor

    def __init__(self, buckets: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.buckets = buckets
        self._add_sums("sums", BUCKET_BINS + 1, 3)

    @override
    def update(self, sample: Sample) -> None:
        score_B = sample.score_B.double()
        one_B = torch.ones_like(score_B)
        weight_B = one_B if sample.weight_B is None else sample.weight_B.double()
        bin_B = logit_bins(sample.output_B) // (BINS // BUCKET_BINS)
        terms_B3 = torch.stack([weight_B, weight_B * sample.label_B, weight_B * score_B], 1)
        self.sums.index_add_(0, bin_B, terms_B3)

    def compute(self) -> Tensor:
        """Return the sums of weights, labels and predictions of each bucket, [buckets, 3].

        A bin belongs to the bucket that has its middle.
        """
        weight_K = self.sums[:, 0]
        middle_K = weight_K.cumsum(0) - weight_K / 2
        share_K = middle_K / weight_K.sum().clamp(min=torch.finfo(torch.float64).tiny)
        bucket_K = (share_K * self.buckets).long().clamp_(0, self.buckets - 1)
        return self.sums.new_zeros(self.buckets, 3).index_add_(0, bucket_K, self.sums)

    def record(self) -> list[dict[str, Any]]:
        """Return weight, mean prediction and mean label of each bucket that has rows."""
        return [
            {"rows": weight, "predicted": score / weight, "clicks": label / weight}
            for weight, label, score in self.compute().tolist()
            if weight > 0
        ]


def _ratio(above: float, below: float) -> float | None:
    return _finite(above / below) if below else None


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


STEP = 0x9E3779B97F4A7C15 - 2**64  # of SplitMix64 (Steele, Lea and Flood 2014), as a signed number
BITS = 31  # of a uniform number
LIMITS = [  # P(Poisson(1) <= n), in units of 2^-31
    round(2**BITS * math.exp(-1) * sum(1 / math.factorial(k) for k in range(n + 1)))
    for n in range(12)
]


def poisson_weights(row_numbers_B: Tensor, replicates: int) -> Tensor:
    """Return numbers with the distribution Poisson(1), fp64 [B, R], which follow from the number of
    a row.
    """
    keys_B = mixed(row_numbers_B * STEP)
    numbers_R = torch.arange(1, replicates + 1, device=keys_B.device) * STEP
    uniform_BR = shifted(mixed(keys_B[:, None] + numbers_R), 64 - BITS)
    limits = torch.tensor(LIMITS, device=keys_B.device)
    return torch.bucketize(uniform_BR, limits, right=True).double()


class Bootstrap(Detail):
    """The values of metrics over samples of the rows.

    Args:
        metrics: Metrics by name, each made with `replicates`.
        replicates: The number of samples of the rows, R.
        kwargs: The arguments of `torchmetrics.Metric`.
    """

    full_state_update = False
    weights: Tensor
    rows: Tensor

    def __init__(self, metrics: Mapping[str, Metric], replicates: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.metrics: Any = torch.nn.ModuleDict(metrics)
        self.replicates = replicates
        self._add_sums("weights", replicates)
        self._add_sums("rows", 1, dtype=torch.int64)

    @override
    def update(self, sample: Sample) -> None:
        row_numbers_B = sample.batch.row_numbers_B
        if row_numbers_B is None:
            raise ConfigError(
                f"metrics.bootstrap={self.replicates}: draws rows by number, and the batches "
                "have none: read them with ClickData(number_rows=True)"
            )
        bits_B = sample.label_B.float().view(torch.int32).long()
        self.rows += mixed(mixed(row_numbers_B * STEP) ^ bits_B).sum()
        weight_BR = poisson_weights(row_numbers_B, self.replicates)
        self.weights += weight_BR.sum(0)
        if sample.weight_B is not None:
            weight_BR = weight_BR * sample.weight_B.double()[:, None]
        for metric in self.metrics.values():
            metric.update(sample.output_B, sample.label_B, weights_B=weight_BR)

    @override
    def reset(self) -> None:
        super().reset()
        for metric in self.metrics.values():
            metric.reset()

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return the number of drawn rows of each sample, [R], and the sum of a hash of the number
        and the label of each row, int64 [1].
        """
        return self.weights, self.rows

    def record(self) -> dict[str, Any]:
        """Return the values of each metric, the numbers of drawn rows, and the sum of hashes of the
        rows: two models that were measured on the same rows agree in both.
        """
        drawn, rows = self.compute()
        values = {name: metric.compute().tolist() for name, metric in self.metrics.items()}
        return {"drawn": drawn.tolist(), "rows": int(rows), "metrics": values}


class GroupAUC(Metric):
    """The mean of the AUC within groups, such as the impressions of each user, weighted by their
    impressions.

        group    A     A     A     B     B     C          A has an AUC, B has one, C has one class
        label    1     0     0     0     1     1          gAUC = (3 AUC_A + 2 AUC_B) / (3 + 2)

    A ranking is only shown within a group, so an order between groups should not count. The mean
    leaves out groups of one class (Zhou et al. 2018, "Deep Interest Network for Click-Through Rate
    Prediction", arXiv 1706.06978). Groups are not sums: the rows of one group may be anywhere, so
    all rows are kept, 20 bytes each.

    It is exact. Ties count half. A logit that is nan makes it nan, as does a log in which no group
    has both classes.

    Args:
        column: The sparse column whose ids are the groups.
        soft_labels: Whether labels may lie between 0 and 1; if not, labels above 1/2 are clicks.
        kwargs: The arguments of `torchmetrics.Metric`.
    """

    higher_is_better = True
    full_state_update = False
    is_differentiable = False
    groups: list[Tensor]
    samples: list[Tensor]

    def __init__(self, column: str, soft_labels: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.column = column
        self.soft_labels = soft_labels
        self.add_state("groups", [], dist_reduce_fx="cat")
        self.add_state("samples", [], dist_reduce_fx="cat")

    @override
    def update(self, sample: Sample) -> None:
        clicks_B = sample.label_B.float() if self.soft_labels else (sample.label_B > 0.5).float()
        weight_B = sample.weight_B
        weight_B = torch.ones_like(clicks_B) if weight_B is None else weight_B.float()
        self.groups.append(ids_of(sample.batch, self.column))
        self.samples.append(torch.stack([sample.output_B, clicks_B, weight_B], 1))

    def compute(self) -> Tensor:
        """Return the mean, an fp64 scalar."""
        if isinstance(self.groups, list) and not self.groups:
            return torch.tensor(torch.nan, dtype=torch.float64, device=self.device)
        logits_N, clicks_N, weights_N = dim_zero_cat(self.samples).unbind(1)
        groups_N = dim_zero_cat(self.groups)
        order_N = logits_N.argsort(stable=True)
        order_N = order_N[groups_N[order_N].argsort(stable=True)]
        logits_N = logits_N[order_N]
        groups_N = groups_N[order_N]
        weights_N = weights_N[order_N].double()
        click_N = clicks_N[order_N].double() * weights_N
        other_N = weights_N - click_N
        group_N = _blocks(groups_N)
        tie_N = _blocks(group_N + _blocks(logits_N))  # both ascend
        other_T = _sums(other_N, tie_N)
        below_T = other_T.cumsum(0) - other_T / 2  # non-clicks below, of earlier groups as well
        click_G, other_G, weight_G = (
            _sums(one_N, group_N) for one_N in (click_N, other_N, weights_N)
        )
        before_G = other_G.cumsum(0) - other_G
        right_G = _sums(click_N * (below_T[tie_N] - before_G[group_N]), group_N)
        pairs_G = click_G * other_G
        weight_G = torch.where(pairs_G > 0, weight_G, 0.0)
        auc_G = right_G / torch.where(pairs_G > 0, pairs_G, 1.0)
        mean = (weight_G * auc_G).sum() / weight_G.sum()
        return torch.where(logits_N.isnan().any(), torch.nan, mean)


def _blocks(values_N: Tensor) -> Tensor:
    """Return the number of the block of equal neighbours that each value is in, [N]."""
    return torch.unique_consecutive(values_N, return_inverse=True)[1]  # type: ignore[no-any-return]


def _sums(values_N: Tensor, number_N: Tensor) -> Tensor:
    """Return the sum of the values of each number."""
    count = int(number_N[-1]) + 1 if len(number_N) else 0
    return values_N.new_zeros(count).index_add_(0, number_N, values_N)


# ---- what the settings add

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
