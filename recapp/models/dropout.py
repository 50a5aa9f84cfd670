"""Dropout whose masks are drawn four entries at a time.

`torch.nn.Dropout` draws a number of the generator for each entry. On a core, for 4096 x 624
entries, that takes 25 ms, forward alone; a 64-bit number for every four entries takes 8 ms. The
share is rounded to 1 / 65536, and kept entries are scaled by the rounded share.

`FieldDropout` sets whole vectors to 0, as Gal and Ghahramani drop whole word vectors (arXiv
1512.05287) and DropoutNet whole inputs of a recommender (Volkovs et al., NIPS 2017): a model then
cannot lean on the vector of one id, and learns to do without those that it has not seen.

Shapes: B batch, F fields, K columns of all fields; those of `FastDropout` are any.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recapp.models.model_checks import check_share

STEPS = 2**16
"""The number of shares: a mask compares 16 random bits with a threshold."""


class FastDropout(nn.Module):
    """Sets a share of entries to 0 in training, and scales the others to keep the mean.

    Args:
        share: The share, at least 0 and less than 1. The attribute has torch's name, `p`.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.p = share
        self.dropped = min(round(share * STEPS), STEPS - 1)

    def forward(self, entries: Tensor) -> Tensor:
        """Return the entries, some of them 0 in training."""
        if not self.training or not self.dropped:
            return entries
        kept: Tensor = _Dropped.apply(entries, self.dropped)  # type: ignore[no-untyped-call]
        return kept

    def extra_repr(self) -> str:
        """Return the share as text."""
        return f"{self.p:.4g}"


class FieldDropout(nn.Module):
    """Sets a share of the vectors of a sample to 0 in training, and scales the others to keep the
    mean.

    Args:
        share: The share, at least 0 and less than 1.
        dims: The columns of each vector.

    Raises:
        ConfigError: The share is not allowed.

    The buffer `field_K` has the field of each column.
    """

    field_K: Tensor

    def __init__(self, share: float, dims: Sequence[int]) -> None:
        super().__init__()
        check_share("model.field_dropout", share)
        self.dims = list(dims)
        self.mask = FastDropout(share)
        # numpy, because torch could not count the columns on the meta device
        field_K = torch.tensor(np.repeat(np.arange(len(self.dims)), self.dims))
        self.register_buffer("field_K", field_K, persistent=False)

    def forward(self, vectors_BK: Tensor) -> Tensor:
        """Return the vectors side by side, some of them 0 in training."""
        if not self.training or not self.mask.dropped:
            return vectors_BK
        kept_BF: Tensor = self.mask(vectors_BK.new_ones(len(vectors_BK), len(self.dims)))
        if len(set(self.dims)) == 1:
            parts_BFD = vectors_BK.view(len(vectors_BK), len(self.dims), -1)
            return (parts_BFD * kept_BF.unsqueeze(2)).flatten(1)
        return vectors_BK * kept_BF.index_select(1, self.field_K)


class _Dropped(torch.autograd.Function):
    """Multiplies entries by 0 or by a constant above 1."""

    @staticmethod
    def forward(ctx: Any, entries: Tensor, dropped: int) -> Tensor:
        count = entries.numel()
        bits = torch.empty((count + 3) // 4, dtype=torch.int64, device=entries.device)
        bits.random_(-(2**63), None)
        bits_of_entries = bits.view(torch.int16)[:count].view(entries.shape)
        ctx.dropped = dropped
        ctx.save_for_backward(bits_of_entries)
        return _kept(entries, bits_of_entries, dropped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (bits_of_entries,) = ctx.saved_tensors
        return _kept(grad, bits_of_entries, ctx.dropped), None


def _kept(entries: Tensor, bits_of_entries: Tensor, dropped: int) -> Tensor:
    """Return entries times 0 or times a constant, by 16 bits of each."""
    least = dropped - STEPS // 2
    factor = STEPS / (STEPS - dropped)
    factors = (bits_of_entries >= least).to(entries.dtype) * factor
    return entries * factors
