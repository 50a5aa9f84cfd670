"""The dot products of field-aware vectors, as in FFM and ONN.

    v_2,1 . v_1,2    v_3,1 . v_1,3    v_3,2 . v_2,3   ...    field i has a vector for each field j

On a CPU they are computed for a block of samples at a time, whose vectors stay in the cache of a
core. The vectors are as large as all else in such a model together, and short: so each is moved as
one element, and the vectors of a block are put in the order of their partners before they are
multiplied.

Shapes: B batch, N samples of a block, F fields, D columns of a vector, P = F (F - 1) / 2 pairs,
K = F D + P columns of vectors and pairs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from recapp.models.layers import indices_of_pairs
from recapp.models.linear_stack import are_several

BLOCK = 64
"""The samples of a block. With 39 fields of 4 columns it has 1.6 MB; 32 to 128 take the same time,
256 a quarter more.
"""
WHOLE = {8: torch.complex64, 16: torch.complex128}
"""Types of one element, by bytes, in which short vectors are moved."""


class FieldAwarePairs(nn.Module):
    """The dot product <v_i,j, v_j,i> of each pair of fields: [B, F, F, D] -> [B, P].

    Field i has a vector for each field, and the pair of i and j takes that of i for j and that of j
    for i. A field's vector for itself is in no pair. The order of pairs is `DotInteraction`'s.

    Args:
        fields: The number of fields, F.
        own: Whether the vectors of all fields for themselves come before the pairs, [B, K].
    """

    pair_P: Tensor
    entry_FF: Tensor

    def __init__(self, fields: int, own: bool = False) -> None:
        super().__init__()
        self.fields = fields
        self.own = own
        pair_P, entry_FF = indices_of_pairs(fields)
        self.register_buffer("pair_P", pair_P, persistent=False)
        self.register_buffer("entry_FF", entry_FF, persistent=False)

    @property
    def pairs(self) -> int:
        """The number of pairs."""
        return self.fields * (self.fields - 1) // 2

    def forward(self, vectors_BFFD: Tensor) -> Tensor:
        """Return the dot products, [B, P], or [B, K] with the fields' own vectors before them.

        Args:
            vectors_BFFD: The vectors of field i for field j at [:, i, j].
        """
        dots_BP = _FieldAwareDots.apply(  # type: ignore[no-untyped-call]
            vectors_BFFD, self.pair_P, self.entry_FF, self.own
        )
        assert isinstance(dots_BP, Tensor)
        return dots_BP

    def extra_repr(self) -> str:
        """Return the numbers of fields and pairs as text."""
        return f"{self.fields} fields, {self.pairs} pairs"


class _FieldAwareDots(torch.autograd.Function):
    """Computes the dot products of field-aware pairs, and copies the fields' own vectors.

    The gradient for v_i,j is v_j,i times the gradient of the pair, which backward computes for all
    vectors at once: no gradient is scattered.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, vectors_BFFD: Tensor, pair_P: Tensor, entry_FF: Tensor, own: bool
    ) -> Tensor:
        ctx.save_for_backward(vectors_BFFD, entry_FF)
        ctx.own = own  # type: ignore[attr-defined]
        if _fits_blocks(vectors_BFFD):
            return _dots_of_blocks(vectors_BFFD, pair_P, own)
        products_BFF = (vectors_BFFD * vectors_BFFD.transpose(1, 2)).sum(3)
        dots_BP = products_BFF.flatten(1).index_select(1, pair_P)
        return torch.cat([_own(vectors_BFFD).flatten(1), dots_BP], 1) if own else dots_BP

    @staticmethod
    def backward(ctx: Any, grad_BK: Tensor) -> tuple[Tensor, None, None, None]:
        vectors_BFFD, entry_FF = ctx.saved_tensors
        _, fields, _, dim = vectors_BFFD.shape
        grad_BP = grad_BK
        grad_BFD = None
        if ctx.own:
            grad_BFD = grad_BK[:, : fields * dim].reshape(-1, fields, dim)
            grad_BP = grad_BK[:, fields * dim :]
        padded_BP1 = torch.cat([grad_BP, grad_BP.new_zeros(len(grad_BP), 1)], 1)
        alone = not torch.is_grad_enabled() and not are_several(grad_BK)
        if alone and _fits_blocks(vectors_BFFD):
            grad_BFFD = _grad_of_blocks(vectors_BFFD, padded_BP1, entry_FF, grad_BFD)
            return grad_BFFD, None, None, None
        grad_BFF = padded_BP1.index_select(1, entry_FF).view(-1, fields, fields)
        grad_BFFD = grad_BFF[..., None] * vectors_BFFD.transpose(1, 2)
        if grad_BFD is not None:
            grad_BFFD = grad_BFFD + torch.diag_embed(grad_BFD.mT, dim1=1, dim2=2)
        return grad_BFFD, None, None, None


def _own(vectors_BFFD: Tensor) -> Tensor:
    """Return the vector of each field for itself, a view [B, F, D]."""
    return vectors_BFFD.diagonal(dim1=1, dim2=2).mT


def _fits_blocks(vectors_BFFD: Tensor) -> bool:
    """Return whether vectors can be computed in blocks: plain floats on a CPU, while torch neither
    compiles nor transforms functions.
    """
    return (
        not torch.compiler.is_compiling()
        and type(vectors_BFFD) is Tensor
        and vectors_BFFD.device.type == "cpu"
        and vectors_BFFD.dtype in (torch.float32, torch.float64)
        and vectors_BFFD.is_contiguous()
        and vectors_BFFD.storage_offset() % max(vectors_BFFD.shape[3], 1) == 0
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _blocks(samples: int) -> Iterator[slice]:
    return (slice(first, min(first + BLOCK, samples)) for first in range(0, samples, BLOCK))


def _dots_of_blocks(vectors_BFFD: Tensor, pair_P: Tensor, own: bool) -> Tensor:
    """Return the dot products, and the fields' own vectors before them where asked for."""
    samples, fields, _, dim = vectors_BFFD.shape
    first = fields * dim if own else 0
    found_BK = vectors_BFFD.new_empty(samples, first + len(pair_P))
    ones_D = vectors_BFFD.new_ones(dim)
    room_NFFD = torch.empty_like(vectors_BFFD[:BLOCK])
    for block in _blocks(samples):
        own_NFFD = vectors_BFFD[block]
        partner_NFFD = room_NFFD[: len(own_NFFD)]
        _swap(own_NFFD, partner_NFFD)
        sums_NX = (partner_NFFD.mul_(own_NFFD).view(-1, dim) @ ones_D).view(len(own_NFFD), -1)
        found_BK[block, first:] = sums_NX.index_select(1, pair_P)
        if own:
            found_BK[block, :first] = _own(own_NFFD).flatten(1)
    return found_BK


def _grad_of_blocks(
    vectors_BFFD: Tensor, padded_BP1: Tensor, entry_FF: Tensor, grad_BFD: Tensor | None
) -> Tensor:
    """Return the gradient for vectors.

    Args:
        vectors_BFFD: The vectors.
        padded_BP1: The gradients of the pairs, and a 0.
        entry_FF: The pair of each vector, or that of the 0.
        grad_BFD: The gradients of the fields' own vectors, if these were copied.
    """
    dim = vectors_BFFD.shape[3]
    # index_select repeats a number faster than a product stretches it
    entry_X = entry_FF[:, None].expand(-1, dim).reshape(-1)
    found_BFFD = torch.empty_like(vectors_BFFD)
    for block in _blocks(len(vectors_BFFD)):
        found_NFFD = found_BFFD[block]
        _swap(vectors_BFFD[block], found_NFFD)
        found_NFFD.mul_(padded_BP1[block].index_select(1, entry_X).view_as(found_NFFD))
        if grad_BFD is not None:
            _own(found_NFFD).copy_(grad_BFD[block])
    return found_BFFD


def _swap(vectors_NFFD: Tensor, into_NFFD: Tensor) -> None:
    """Write the vectors of field j for field i where those of i for j stand."""
    whole = WHOLE.get(vectors_NFFD.shape[3] * vectors_NFFD.itemsize)
    if whole is None:
        into_NFFD.copy_(vectors_NFFD.transpose(1, 2))
        return
    into_NFFD.view(whole).squeeze(3).copy_(vectors_NFFD.view(whole).squeeze(3).mT)
