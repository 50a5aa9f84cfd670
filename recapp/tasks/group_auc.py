"""The AUC within groups, such as the impressions of each user.

    group    A     A     A     B     B     C          A has an AUC, B has one, C has one class only
    label    1     0     0     0     1     1          gAUC = (3 AUC_A + 2 AUC_B) / (3 + 2)

A ranking is only shown within a group, so an order between groups should not count. The mean weighs
each group by its impressions and leaves out groups of one class (Zhou et al. 2018, "Deep Interest
Network for Click-Through Rate Prediction", arXiv 1706.06978). Groups are not sums: the rows of one
group may be anywhere, so all rows are kept, 20 bytes each.

Shapes: B samples of a batch on this rank, N samples of all batches and ranks, G groups, T sets of
samples of one group with equal logits.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class GroupAUC(Metric):
    """The mean of the AUC of each group, weighted by the groups' impressions.

    It is exact. Ties count half. A logit that is nan makes it nan, as does a log in which no group
    has both classes.

    Args:
        soft_labels: Whether labels may lie between 0 and 1; if not, labels above 1/2 are clicks.
        kwargs: The arguments of `torchmetrics.Metric`.
    """

    higher_is_better = True
    full_state_update = False
    is_differentiable = False
    groups: list[Tensor]
    samples: list[Tensor]

    def __init__(self, soft_labels: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.soft_labels = soft_labels
        self.add_state("groups", [], dist_reduce_fx="cat")
        self.add_state("samples", [], dist_reduce_fx="cat")

    def update(
        self,
        logits_B: Tensor,
        labels_B: Tensor,
        groups_B: Tensor,
        weights_B: Tensor | None = None,
    ) -> None:
        """Keep the rows of a batch.

        Args:
            logits_B: Logits of any float dtype, [B].
            labels_B: 0 or 1, of any dtype, [B]; with `soft_labels` any number from 0 to 1.
            groups_B: The number of each sample's group, int64 [B].
            weights_B: The weights of the samples, [B]; None weighs each 1.
        """
        logits_B = logits_B.detach().float()
        clicks_B = labels_B.float() if self.soft_labels else (labels_B > 0.5).float()
        weight_B = torch.ones_like(logits_B) if weights_B is None else weights_B.float()
        self.groups.append(groups_B)
        self.samples.append(torch.stack([logits_B, clicks_B, weight_B], 1))

    def compute(self) -> Tensor:
        """Return the mean, an fp64 scalar."""
        if isinstance(self.groups, list) and not self.groups:
            return torch.tensor(torch.nan, dtype=torch.float64, device=self.device)
        samples_N3 = dim_zero_cat(self.samples)
        logits_N, clicks_N, weights_N = samples_N3.unbind(1)
        return group_auc(logits_N, clicks_N, weights_N, dim_zero_cat(self.groups))


def group_auc(logits_N: Tensor, clicks_N: Tensor, weights_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return the mean AUC of groups, weighted by impressions, an fp64 scalar.

    Args:
        logits_N: The logits, [N].
        clicks_N: The labels, from 0 to 1, [N].
        weights_N: The weights of the samples, [N].
        groups_N: The number of each sample's group, [N].
    """
    order_N = logits_N.argsort(stable=True)
    order_N = order_N[groups_N[order_N].argsort(stable=True)]
    logits_N = logits_N[order_N]
    groups_N = groups_N[order_N]
    weights_N = weights_N[order_N].double()
    click_N = clicks_N[order_N].double() * weights_N
    other_N = weights_N - click_N
    group_N = _numbers(groups_N[1:] != groups_N[:-1], len(groups_N))
    tie_N = _numbers(
        (groups_N[1:] != groups_N[:-1]) | (logits_N[1:] != logits_N[:-1]), len(group_N)
    )
    other_T = _sums(other_N, tie_N)
    below_T = other_T.cumsum(0) - other_T / 2  # non-clicks below, of earlier groups as well
    click_G, other_G, weight_G = (_sums(one_N, group_N) for one_N in (click_N, other_N, weights_N))
    before_G = other_G.cumsum(0) - other_G
    right_G = _sums(click_N * (below_T[tie_N] - before_G[group_N]), group_N)
    pairs_G = click_G * other_G
    weight_G = torch.where(pairs_G > 0, weight_G, 0.0)
    auc_G = right_G / torch.where(pairs_G > 0, pairs_G, 1.0)
    mean = (weight_G * auc_G).sum() / weight_G.sum()
    return torch.where(logits_N.isnan().any(), torch.nan, mean)


def _numbers(changes: Tensor, rows: int) -> Tensor:
    """Return the number of the run of equal neighbours of each row, [rows]."""
    numbers = torch.zeros(rows, dtype=torch.int64, device=changes.device)
    numbers[1:] = changes.cumsum(0)
    return numbers


def _sums(values_N: Tensor, number_N: Tensor) -> Tensor:
    """Return the sum of the values of each number."""
    count = int(number_N[-1]) + 1 if len(number_N) else 0
    return values_N.new_zeros(count).index_add_(0, number_N, values_N)
