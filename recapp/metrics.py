"""The metrics of a click model: AUC, log loss, normalised entropy and calibration, and on request
the area under the precision-recall curve, lift, RMSE and MAE. They take logits, use bounded memory
and work over any number of ranks.

Every state is a sum over samples, so the split into batches and ranks does not matter, and empty
batches change nothing. Sums are fp64: 10^9 samples lose no digit. A metric that is undefined (no
samples, one class only) is nan. A sample of weight w counts as w equal samples.

An exact AUC has to sort all logits, which takes unbounded memory. recapp counts clicks and
non-clicks in bins of the logit instead. A pair in one bin counts half, like a tie:

    bin          0    1    2    3     AUC = pairs (click, non-click) in the right order / all pairs
    clicks       0    1    2    4         = (1 * (5 + 3/2) + 2 * (8 + 1/2) + 4 * (9 + 0/2))
    non-clicks   5    3    1    0           / (7 * 9)

Only pairs in one bin can be wrong, each by at most a half. This gives the error bound, which is
known after counting.

Shapes: B samples of a batch on this rank, K bins.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from recapp.errors import ConfigError, suggest

BINS = 2**18  # a bin near 0 is 6e-5 logits wide; 4 MB of counts
OCTAVES = 8  # the octaves of 1 + |logit| with bins; logits beyond +-255 share the outermost bins
MANTISSA_BITS = 23  # in an IEEE fp32 number
REPLICATE_BINS = 2**11  # of a metric with many weights for each sample
BITS_OF_ONE = 127 << MANTISSA_BITS  # the number 1 as an integer


def logit_bins(logits_B: Tensor) -> Tensor:
    """Return the bin of each logit, int64 in 0..BINS, [B]; nan has the bin BINS.

    The leading bits of 1 + |logit| as an fp32 number give the bin. So bins have equal width up to
    |logit| = 1, and their width then doubles with each octave of 1 + |logit|. The bits are the same
    on every device, because no logarithm is rounded.
    """
    bits_B = (logits_B.float().abs() + 1).view(torch.int32) - BITS_OF_ONE
    step = MANTISSA_BITS - (BINS // 2 // OCTAVES).bit_length() + 1
    from_zero_B = (bits_B >> step).clamp_(max=BINS // 2 - 1)
    bins_B = torch.where(logits_B < 0, BINS // 2 - 1 - from_zero_B, BINS // 2 + from_zero_B)
    return bins_B.masked_fill_(logits_B.isnan(), BINS).long()


class _Counts(Metric):
    """The base of metrics from counts of non-clicks and clicks in bins of the logit.

    Args:
        soft_labels: Whether labels may lie between 0 and 1; if not, labels above 1/2 are clicks.
        replicates: The number of weights of each sample, R; the metric is then a value for each.
            Replicates have `REPLICATE_BINS` bins. None is one weight.
        kwargs: The arguments of `torchmetrics.Metric`.
    """

    higher_is_better = True
    full_state_update = False
    is_differentiable = False
    counts: Tensor

    def __init__(
        self, soft_labels: bool = False, replicates: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.soft_labels = soft_labels
        self._bins = REPLICATE_BINS if replicates else BINS
        counts = torch.zeros(
            2, self._bins + 1, *([replicates] if replicates else []), dtype=torch.float64
        )
        self.add_state("counts", counts, dist_reduce_fx="sum")

    def update(self, logits_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> None:
        """Count a batch.

        Args:
            logits_B: Logits of any float dtype, [B].
            labels_B: 0 or 1, of any dtype, [B]; with `soft_labels` any number from 0 to 1, which
                counts as so much of a click, and the rest of a non-click.
            weights_B: The weights of the samples, [B]; None weighs each 1. With replicates [B, R].
        """
        bin_B = logit_bins(logits_B.detach())
        if self._bins < BINS:
            bin_B = bin_B // (BINS // self._bins)
        one_B = torch.ones_like(bin_B, dtype=torch.float64)
        weight_B = one_B if weights_B is None else weights_B.double()
        if self.soft_labels:
            click_B = weight_B * labels_B.double().view(-1, *[1] * (weight_B.dim() - 1))
            self.counts[0].index_add_(0, bin_B, weight_B - click_B)
            self.counts[1].index_add_(0, bin_B, click_B)
            return
        # bincount would allocate and add 4 MB for each batch.
        bin_B = torch.add(bin_B, labels_B > 0.5, alpha=self._bins + 1)
        self.counts.view(-1, *self.counts.shape[2:]).index_add_(0, bin_B, weight_B)

    def _falling(self) -> tuple[Tensor, Tensor]:
        """Return the counts of all samples and of clicks from the highest bin to the lowest, [K];
        clicks are nan if a logit was nan.
        """
        others_K, clicks_K = self.counts[:, :-1].flip(1)
        unknown = torch.where(self.counts[:, -1].sum(0) > 0, torch.nan, 1.0)
        return others_K + clicks_K, clicks_K * unknown


class AUC(_Counts):
    """Area under the ROC curve: the share of (click, non-click) pairs in the right order.

    Ties count half. The metric counts samples in `BINS` bins of the logit, so it differs from the
    exact value by at most half of the pairs of one bin. For the logits of a trained click model
    this bound is about 1e-5, and the difference itself is far smaller. The area is nan for one
    class only, or if a logit was nan.
    """

    def compute(self) -> Tensor:
        """Return the area, an fp64 scalar."""
        others_K, clicks_K = self.counts[:, :-1]
        below_K = others_K.cumsum(0) - others_K / 2
        pairs = others_K.sum(0) * clicks_K.sum(0)
        unknown = self.counts[:, -1].sum(0) + (pairs == 0) > 0
        area: Tensor = (clicks_K * below_K).sum(0) / torch.where(unknown, torch.nan, pairs)
        return area


class PRAUC(_Counts):
    """Area under the precision-recall curve, as average precision: the mean over clicks of the
    share of clicks among the samples with logits at least as high.

    It is computed from the bins of `AUC`; samples of one bin are ties. Source: Davis and Goadrich
    2006, "The Relationship Between Precision-Recall and ROC Curves".
    """

    def compute(self) -> Tensor:
        """Return the area, an fp64 scalar; nan without a click."""
        samples_K, clicks_K = self._falling()
        found_K = clicks_K.cumsum(0)
        precision_K = found_K / samples_K.cumsum(0).clamp(min=torch.finfo(torch.float64).tiny)
        return (clicks_K * precision_K).sum(0) / found_K[-1]


class Lift(_Counts):
    """The share of clicks in the tenth of samples with the highest logits, divided by 1/10.

    2.5 means that the top 10 % have a quarter of all clicks; an order by chance has 1. A bin that
    lies partly in the tenth counts with that part.

    Args:
        top: The share of samples.
        kwargs: The arguments of `AUC`.
    """

    def __init__(self, top: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.top = top

    def compute(self) -> Tensor:
        """Return the lift, an fp64 scalar; nan without a click."""
        samples_K, clicks_K = self._falling()
        above_K = samples_K.cumsum(0) - samples_K
        room_K = self.top * samples_K.sum(0) - above_K
        tiny = torch.finfo(torch.float64).tiny
        inside_K = (room_K / samples_K.clamp(min=tiny)).clamp(0, 1)
        return (clicks_K * inside_K).sum(0) / clicks_K.sum(0) / self.top


_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "samples": lambda outputs_B, labels_B: torch.ones_like(labels_B),
    "clicks": lambda logits_B, labels_B: labels_B,
    "predicted": lambda logits_B, labels_B: logits_B.sigmoid(),
    "loss": lambda logits_B, labels_B: F.binary_cross_entropy_with_logits(
        logits_B, labels_B, reduction="none"
    ),
    "squares": lambda outputs_B, labels_B: (outputs_B - labels_B).square(),
    "distances": lambda outputs_B, labels_B: (outputs_B - labels_B).abs(),
}


class _Sums(Metric):
    """The base of metrics from fp64 sums over samples, in which counts are exact up to 2^53.

    Args:
        replicates: The number of weights of each sample, R; the metric is then a value for each.
        kwargs: The arguments of `torchmetrics.Metric`.
    """

    full_state_update = False
    is_differentiable = False
    needs: ClassVar[tuple[str, ...]]
    samples: Tensor
    clicks: Tensor
    predicted: Tensor
    loss: Tensor
    squares: Tensor
    distances: Tensor

    def __init__(self, replicates: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in self.needs:
            zeros = torch.zeros([replicates] if replicates else [], dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="sum")

    def update(self, logits_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            logits_B: Logits of any float dtype, [B].
            labels_B: 0 or 1, or any number between, of any dtype, [B].
            weights_B: The weights of the samples, [B]; None weighs each 1. With replicates [B, R].
        """
        self._add(logits_B.detach().double(), labels_B.double(), weights_B)

    def _add(self, outputs_B: Tensor, labels_B: Tensor, weights_B: Tensor | None) -> None:
        for name in self.needs:
            terms_B = _SUMS[name](outputs_B, labels_B)
            if weights_B is not None and weights_B.dim() == 2:
                getattr(self, name).add_(terms_B @ weights_B.double())
                continue
            terms_B = terms_B if weights_B is None else terms_B * weights_B
            getattr(self, name).add_(terms_B.sum())


class LogLoss(_Sums):
    """Mean cross entropy in nats: -mean(y ln p + (1 - y) ln(1 - p)).

    The metric computes it from the logit, so p = 0 and p = 1 need no clipping.
    """

    higher_is_better = False
    needs = ("loss", "samples")

    def compute(self) -> Tensor:
        """Return the mean, an fp64 scalar."""
        return self.loss / self.samples


class NormalizedEntropy(_Sums):
    """Log loss divided by the log loss of a model that always predicts the share of clicks.

    The value is below 1 if the model predicts better than that share, and nan for one class only.
    Source: He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook".
    """

    higher_is_better = False
    needs = ("loss", "samples", "clicks")

    def compute(self) -> Tensor:
        """Return the ratio, an fp64 scalar."""
        share = self.clicks / self.samples
        entropy = torch.special.entr(share) + torch.special.entr(1 - share)
        return self.loss / self.samples / torch.where(entropy == 0, torch.nan, entropy)


class Calibration(_Sums):
    """Mean prediction / mean label.

    1 is the ideal; above 1 the model predicts too many clicks. Without a click the value is nan.
    """

    higher_is_better = None
    needs = ("predicted", "clicks")

    def compute(self) -> Tensor:
        """Return the ratio, an fp64 scalar."""
        return self.predicted / torch.where(self.clicks == 0, torch.nan, self.clicks)


class _Errors(_Sums):
    """The base of metrics from differences between outputs and labels.

    Args:
        sigmoid: Whether outputs are logits, whose probabilities are compared with the labels.
        kwargs: The arguments of `torchmetrics.Metric`.
    """

    higher_is_better = False

    def __init__(self, sigmoid: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sigmoid = sigmoid

    def update(self, outputs_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            outputs_B: Outputs of any float dtype, [B].
            labels_B: The numbers to compare them with, of any dtype, [B].
            weights_B: The weights of the samples, [B]; None weighs each 1.
        """
        outputs_B = outputs_B.detach().double()
        outputs_B = outputs_B.sigmoid() if self.sigmoid else outputs_B
        self._add(outputs_B, labels_B.double(), weights_B)


class RMSE(_Errors):
    """The root of the mean squared error."""

    needs = ("squares", "samples")

    def compute(self) -> Tensor:
        """Return the root, an fp64 scalar."""
        return (self.squares / self.samples).sqrt()


class MAE(_Errors):
    """The mean absolute error."""

    needs = ("distances", "samples")

    def compute(self) -> Tensor:
        """Return the mean, an fp64 scalar."""
        return self.distances / self.samples


_METRICS: dict[str, Callable[..., Metric]] = {
    "auc": AUC,
    "log_loss": LogLoss,
    "normalized_entropy": NormalizedEntropy,
    "calibration": Calibration,
    "pr_auc": PRAUC,
    "lift": Lift,
    "rmse": partial(RMSE, sigmoid=True),
    "mae": partial(MAE, sigmoid=True),
}
_USUAL = ("auc", "log_loss", "normalized_entropy", "calibration")


def click_metrics(
    names: Sequence[str] = _USUAL,
    sync_on_compute: bool = True,
    soft_labels: bool = False,
    replicates: int | None = None,
) -> dict[str, Metric]:
    """Return new metrics.

    Args:
        names: Names out of auc, log_loss, normalized_entropy, calibration, pr_auc, lift, rmse, mae.
        sync_on_compute: Whether `compute` covers the batches of all ranks; all ranks must then call
            `compute`.
        soft_labels: Whether labels may lie between 0 and 1; a label y then counts as y of a click
            and 1 - y of a non-click. RMSE and MAE compare predictions with y itself.
        replicates: The number of weights of each sample, for a bootstrap; None is one.

    Returns:
        The metrics by name.

    Raises:
        ConfigError: A name is unknown.
    """
    for name in names:
        if name not in _METRICS:
            raise ConfigError(f"metrics.names has {name}: {suggest(name, _METRICS)}")
    metrics = {}
    for name in names:
        counted = _METRICS[name] in (AUC, PRAUC, Lift)
        options = {"soft_labels": soft_labels} if counted else {}
        metrics[name] = _METRICS[name](
            sync_on_compute=sync_on_compute, replicates=replicates, **options
        )
    return metrics
