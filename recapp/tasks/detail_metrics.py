"""What the group `metrics` adds to the metrics of a task: the AUC within groups, and details of
validation.

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
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from recapp.errors import ConfigError
from recapp.metrics import BINS, logit_bins
from recapp.sparse.keyed_jagged_tensor import MISSING, Batch
from recapp.tasks.task import Sample

SLICES = 20
SLICE_BINS = 2**10
BUCKET_BINS = 2**12
OTHER = "other"


class Detail(Metric):
    """A detail of validation: more than one number."""

    column = ""
    """The sparse column whose frequent values it needs to know before the first batch."""

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
    values = jagged.values().long()
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
        sums = torch.zeros(SLICES + 1, 5, dtype=torch.float64)
        self.add_state("sums", sums, dist_reduce_fx="sum")
        counts = torch.zeros(2, SLICES + 1, SLICE_BINS + 1, dtype=torch.float64)
        self.add_state("counts", counts, dist_reduce_fx="sum")

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
        sums = torch.zeros(BUCKET_BINS + 1, 3, dtype=torch.float64)
        self.add_state("sums", sums, dist_reduce_fx="sum")

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


# constants of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers
STEP = 0x9E3779B97F4A7C15 - 2**64
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
BITS = 31  # of a uniform number
LIMITS = [  # P(Poisson(1) <= n), in units of 2^-31
    round(2**BITS * math.exp(-1) * sum(1 / math.factorial(k) for k in range(n + 1)))
    for n in range(12)
]


def _mixed(numbers: Tensor) -> Tensor:
    """Return SplitMix64's mix of int64 numbers."""
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, shift: int) -> Tensor:
    """Return int64 numbers shifted to the right, filled with zeros."""
    return (numbers >> shift) & ((1 << (64 - shift)) - 1)


def poisson_weights(row_numbers_B: Tensor, replicates: int) -> Tensor:
    """Return numbers with the distribution Poisson(1), fp64 [B, R], which follow from the number of
    a row.
    """
    keys_B = _mixed(row_numbers_B * STEP)
    numbers_R = torch.arange(1, replicates + 1, device=keys_B.device) * STEP
    uniform_BR = _shifted(_mixed(keys_B[:, None] + numbers_R), 64 - BITS)
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
        zeros = torch.zeros(replicates, dtype=torch.float64)
        self.add_state("weights", zeros, dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(1, dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, sample: Sample) -> None:
        row_numbers_B = sample.batch.row_numbers_B
        if row_numbers_B is None:
            raise ConfigError(
                f"metrics.bootstrap={self.replicates}: draws rows by number, and the batches "
                "have none: read them with ClickData(number_rows=True)"
            )
        bits_B = sample.label_B.float().view(torch.int32).long()
        self.rows += _mixed(_mixed(row_numbers_B * STEP) ^ bits_B).sum()
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
        group_N = _run_numbers(groups_N[1:] != groups_N[:-1], len(groups_N))
        tie_N = _run_numbers(
            (groups_N[1:] != groups_N[:-1]) | (logits_N[1:] != logits_N[:-1]), len(group_N)
        )
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


def _run_numbers(changes: Tensor, rows: int) -> Tensor:
    """Return the number of the run of equal neighbours of each row, [rows]."""
    numbers = torch.zeros(rows, dtype=torch.int64, device=changes.device)
    numbers[1:] = changes.cumsum(0)
    return numbers


def _sums(values_N: Tensor, number_N: Tensor) -> Tensor:
    """Return the sum of the values of each number."""
    count = int(number_N[-1]) + 1 if len(number_N) else 0
    return values_N.new_zeros(count).index_add_(0, number_N, values_N)
