"""The losses of a task's outputs: sums over the samples of a batch that is on this rank.

    cross entropy      y ln p + (1 - y) ln(1 - p), with weights of clicks, smoothed labels, focus
    pairs              ln(1 + e^(s_j - s_i)) for each click i and each non-click j of the batch
    squared error      (output - label)^2

A label y between 0 and 1 counts as y of a click and 1 - y of a non-click.

Shapes: B samples of a batch, I of them that are clicks (at least in part), J that are non-clicks, K
clicks of a block.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softplus

BLOCK_PAIRS = 2**22  # pairs whose differences are in memory at once: 16 MB of fp32


def click_loss(
    logits_B: Tensor,
    labels_B: Tensor,
    weights_B: Tensor | None,
    *,
    label_smoothing: float = 0.0,
    pos_weight: float = 1.0,
    focal: float = 0.0,
    ranking: float = 0.0,
) -> Tensor:
    """Return the loss of click logits, a scalar; 0 for an empty batch.

    The part of single samples is a sum divided by B; the pairwise part is a weighted mean over the
    pairs of the batch, without smoothing, times the mean weight, so that the share is the same for
    weights of any size.

    Args:
        logits_B: The logits, [B].
        labels_B: The labels, from 0 to 1, [B].
        weights_B: The weights of the samples, [B]; None weighs each 1.
        label_smoothing: The share of each label that is replaced by 1/2 (Szegedy et al. 2016, arXiv
            1512.00567, with two classes).
        pos_weight: The factor on the loss of clicks.
        focal: The exponent of the focal loss (Lin et al. 2017, arXiv 1708.02002): the entropy of a
            class is multiplied by (1 - its probability)^focal. 0 is the cross entropy.
        ranking: The share of the pairwise loss (Lin et al. 2024, arXiv 2403.14144); the rest is the
            loss of single samples.
    """
    smooth_B = labels_B
    if label_smoothing:
        smooth_B = labels_B * (1 - label_smoothing) + label_smoothing / 2
    if focal:
        full_B = _full(logits_B)
        click_B = logsigmoid(full_B)  # ln p
        other_B = logsigmoid(-full_B)  # ln(1 - p)
        of_click_B = smooth_B * (focal * other_B).exp() * click_B * pos_weight
        losses_B = -of_click_B - (1 - smooth_B) * (focal * click_B).exp() * other_B
        alone = (losses_B if weights_B is None else losses_B * weights_B).sum()
    else:
        factor = None
        if pos_weight != 1:
            factor = torch.full((), pos_weight, device=logits_B.device)
        alone = binary_cross_entropy_with_logits(
            logits_B, smooth_B, weights_B, reduction="sum", pos_weight=factor
        )
    alone = alone / max(len(logits_B), 1)
    if not ranking:
        return alone
    pairs = mean_of_pairs(logits_B, labels_B, weights_B)
    if weights_B is not None:
        pairs = pairs * (weights_B.sum() / max(len(weights_B), 1))
    return (1 - ranking) * alone + ranking * pairs


def mean_of_pairs(logits_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> Tensor:
    """Return the mean of ln(1 + e^(s_j - s_i)) over the pairs of a click i and a non-click j of a
    batch, a scalar; 0 without a pair.

    Pairs are those of the rows of this rank: the batch of another number of ranks has other pairs.
    A pair has the weight w_i y_i w_j (1 - y_j). All I * J pairs are computed, in blocks, so that
    memory is bounded; time is that of 2 I J exponentials.

    Args:
        logits_B: The logits, [B].
        labels_B: The labels, from 0 to 1, [B].
        weights_B: The weights of the samples, [B]; None weighs each 1.
    """
    logits_B = _full(logits_B)
    labels_B = labels_B.to(logits_B.dtype)
    clicks_B = labels_B if weights_B is None else labels_B * weights_B
    others_B = 1 - labels_B if weights_B is None else (1 - labels_B) * weights_B
    return _MeanOfPairs.apply(  # type: ignore[no-any-return, no-untyped-call]
        logits_B, clicks_B, others_B
    )


class _MeanOfPairs(torch.autograd.Function):
    """The mean over pairs. Forward also computes the gradient, so that no pair is kept. There
    are no second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, logits_B: Tensor, clicks_B: Tensor, others_B: Tensor) -> Tensor:
        at_I = clicks_B.nonzero().squeeze(1)
        at_J = others_B.nonzero().squeeze(1)
        grad_B = torch.zeros_like(logits_B)
        loss = logits_B.new_zeros(())
        if len(at_I) and len(at_J):
            weight_J = others_B[at_J]
            logits_J = logits_B[at_J]
            grad_J = torch.zeros_like(logits_J)
            with torch.autocast(logits_B.device.type, enabled=False):
                for at_K in torch.split(at_I, max(BLOCK_PAIRS // len(at_J), 1)):
                    weight_K = clicks_B[at_K]
                    wrong_KJ = logits_J - logits_B[at_K].unsqueeze(1)
                    loss += weight_K @ softplus(wrong_KJ) @ weight_J
                    slope_KJ = wrong_KJ.sigmoid_()
                    grad_B[at_K] = -weight_K * (slope_KJ @ weight_J)
                    grad_J += weight_K @ slope_KJ
            grad_B.index_add_(0, at_J, grad_J * weight_J)
            total = clicks_B.sum() * others_B.sum()
            loss /= total
            grad_B /= total
        ctx.save_for_backward(grad_B)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_B,) = ctx.saved_tensors
        return grads[0] * grad_B, None, None


def mean_squared_error(outputs_B: Tensor, labels_B: Tensor, weights_B: Tensor | None) -> Tensor:
    """Return the sum of (weighted) squared errors divided by B, a scalar; 0 for an empty batch."""
    squares_B = (_full(outputs_B) - labels_B).square()
    return (squares_B if weights_B is None else squares_B * weights_B).sum() / max(
        len(squares_B), 1
    )


def _full(values_B: Tensor) -> Tensor:
    """Return values as fp32, or as they are in fp64: powers and squares need more than 16 bits."""
    return values_B if values_B.dtype == torch.float64 else values_B.float()
