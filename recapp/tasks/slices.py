"""Details of validation that are sums over rows: metrics by the values of a column, and calibration
by buckets of the prediction.

Memory is bounded: a column has its `SLICES` most frequent values and `other`, a slice's AUC comes
from `SLICE_BINS` bins of the logit.

Shapes: B samples of a batch on this rank, V values of a column and `other`, K bins, 5 or 3 sums.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recapp.metrics import BINS, logit_bins
from recapp.tasks.added import Detail, Sample

SLICES = 20
SLICE_BINS = 2**10
BUCKET_BINS = 2**12
OTHER = "other"


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

    def update(self, sample: Sample) -> None:
        """Add a batch.

        Args:
            sample: The samples.
        """
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
        slot_B = self._slots(sample.ids(self.column))
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
        found = []
        for slot, (name, sums) in enumerate(zip(names, sums_V5.tolist(), strict=True)):
            rows, weight, label, score, loss = sums
            if not rows:
                continue
            auc = float(auc_V[slot])
            if self.clicks:
                own = {
                    "auc": _finite(auc),
                    "log_loss": _ratio(loss, weight),
                    "calibration": _ratio(score, label),
                }
            else:
                square = _ratio(loss, weight)
                difference = _ratio(score - label, weight)
                own = {"rmse": None if square is None else square**0.5, "difference": difference}
            found.append({"value": name, "rows": int(rows), **own, "other": slot == SLICES})
        return sorted(found, key=lambda one: (one["other"], -one["rows"]))


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

    def update(self, sample: Sample) -> None:
        """Add a batch.

        Args:
            sample: The samples.
        """
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
