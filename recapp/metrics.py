"""The metrics of a click model: AUC, log loss, normalised entropy and calibration. They take
logits, use bounded memory and work over any number of ranks.

Every state is a sum over samples, so the split into batches and ranks does not matter, and empty
batches change nothing. Sums are fp64 or integers: 10^9 samples lose no digit. A metric that is
undefined (no samples, one class only) is nan.

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
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from recapp.errors import ConfigError, suggest

BINS = 2**18  # a bin near 0 is 6e-5 logits wide; 4 MB of counts
OCTAVES = 8  # the octaves of 1 + |logit| with bins; logits beyond +-255 share the outermost bins
MANTISSA_BITS = 23  # in an IEEE fp32 number
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
    return torch.where(logits_B.isnan(), BINS, bins_B).long()


class AUC(Metric):
    """Area under the ROC curve: the share of (click, non-click) pairs in the right order.

    Ties count half. The metric counts samples in `BINS` bins of the logit, so it differs from the
    exact value by at most `error_bound()`. For the logits of a trained click model this bound is
    about 1e-5, and the difference itself is far smaller. The area is nan for one class only, or if
    a logit was nan.
    """

    higher_is_better = True
    full_state_update = False
    is_differentiable = False
    counts: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("counts", torch.zeros(2, BINS + 1, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits_B: Tensor, labels_B: Tensor) -> None:
        """Count a batch.

        Args:
            logits_B: Logits of any float dtype, [B].
            labels_B: 0 or 1, of any dtype, [B].
        """
        bin_B = logit_bins(logits_B.detach()) + (labels_B > 0.5) * (BINS + 1)
        # bincount would allocate and add 4 MB for each batch.
        self.counts.view(-1).index_add_(0, bin_B, torch.ones_like(bin_B))

    def compute(self) -> Tensor:
        """Return the area, an fp64 scalar."""
        others_K, clicks_K, pairs = self._pairs()
        below_K = others_K.cumsum(0) - others_K
        return (clicks_K * (below_K + others_K / 2)).sum() / pairs

    def error_bound(self) -> Tensor:
        """Return the largest possible error of `compute`, an fp64 scalar."""
        others_K, clicks_K, pairs = self._pairs()
        return (clicks_K * others_K).sum() / 2 / pairs

    def _pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the counts of non-clicks and clicks by bin, and the number of pairs.

        All are fp64, because a product of counts overflows int64.
        """
        others_K, clicks_K = self.counts[:, :-1].double()
        pairs = others_K.sum() * clicks_K.sum()
        return (
            others_K,
            clicks_K,
            torch.where(self.counts[:, -1].sum() + (pairs == 0) > 0, torch.nan, pairs),
        )


_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "samples": lambda logits_B, labels_B: labels_B.new_full((), len(labels_B)),
    "clicks": lambda logits_B, labels_B: labels_B.sum(),
    "predicted": lambda logits_B, labels_B: logits_B.sigmoid().sum(),
    "loss": lambda logits_B, labels_B: F.binary_cross_entropy_with_logits(
        logits_B, labels_B, reduction="sum"
    ),
}


class _Sums(Metric):
    """The base of metrics from fp64 sums over samples, in which counts are exact up to 2^53."""

    full_state_update = False
    is_differentiable = False
    needs: ClassVar[tuple[str, ...]]
    samples: Tensor
    clicks: Tensor
    predicted: Tensor
    loss: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in self.needs:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits_B: Tensor, labels_B: Tensor) -> None:
        """Add a batch.

        Args:
            logits_B: Logits of any float dtype, [B].
            labels_B: 0 or 1, of any dtype, [B].
        """
        logits_B = logits_B.detach().double()
        labels_B = labels_B.double()
        for name in self.needs:
            getattr(self, name).add_(_SUMS[name](logits_B, labels_B))


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


_METRICS: dict[str, type[Metric]] = {
    "auc": AUC,
    "log_loss": LogLoss,
    "normalized_entropy": NormalizedEntropy,
    "calibration": Calibration,
}


def click_metrics(
    names: Sequence[str] = tuple(_METRICS), sync_on_compute: bool = True
) -> dict[str, Metric]:
    """Return new metrics.

    Args:
        names: Names out of auc, log_loss, normalized_entropy, calibration.
        sync_on_compute: Whether `compute` covers the batches of all ranks; all ranks must then call
            `compute`.

    Returns:
        The metrics by name.

    Raises:
        ConfigError: A name is unknown.
    """
    for name in names:
        if name not in _METRICS:
            raise ConfigError(f"metrics.names has {name}: {suggest(name, _METRICS)}")
    return {name: _METRICS[name](sync_on_compute=sync_on_compute) for name in names}
