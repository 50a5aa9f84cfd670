"""Products of pairs of vectors, as factorisation machines have them.

    fm_term            sum over pairs i < j of <v_i, v_j>         a vector per field
    FwFMTerm           the same, each pair with a weight r_ij     a vector per field
    FieldAwarePairs    <v_i,j, v_j,i> of each pair                F vectors per field, one for each

Sources: FM, "Factorization Machines", Rendle, ICDM 2010. FwFM, arXiv 1806.03514. FFM, "Field-aware
Factorization Machines for CTR Prediction", Juan et al., RecSys 2016.

Shapes: B batch, F fields, D columns of a vector, P = F (F - 1) / 2 pairs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from recapp.models.layers import DotInteraction, indices_of_pairs
from recapp.models.linear_stack import are_several


def fm_term(vectors_BFD: Tensor) -> Tensor:
    """Return the sum of the dot products of all pairs of vectors, [B].

    It takes F D multiplications instead of P D, because of Rendle's identity, lemma 3.1:

        sum over i < j of <v_i, v_j>  =  1/2 (|sum over i of v_i|^2 - sum over i of |v_i|^2)

    Args:
        vectors_BFD: The vectors of the fields, [B, F, D].
    """
    term_B = _FMTerm.apply(vectors_BFD)  # type: ignore[no-untyped-call]
    assert isinstance(term_B, Tensor)
    return term_B


class _FMTerm(torch.autograd.Function):
    """Computes the term of an FM; its gradient for v_i is the sum of the other vectors.

    The difference of two large squares is computed in float32 at least.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, vectors_BFD: Tensor) -> Tensor:
        exact_BFD = vectors_BFD.float() if vectors_BFD.itemsize < 4 else vectors_BFD
        sum_BD = exact_BFD.sum(1)
        ctx.save_for_backward(vectors_BFD, sum_BD)
        return (sum_BD.square().sum(1) - exact_BFD.square().sum((1, 2))) / 2

    @staticmethod
    def backward(ctx: Any, grad_B: Tensor) -> Tensor:
        vectors_BFD, sum_BD = ctx.saved_tensors
        if torch.is_grad_enabled():
            # the derivatives of this gradient also pass through the sum
            sum_BD = vectors_BFD.to(sum_BD.dtype).sum(1)
        others_BFD: Tensor = sum_BD[:, None] - vectors_BFD
        grad_B11 = grad_B[:, None, None]
        found_BFD = others_BFD * grad_B11 if are_several(grad_B) else others_BFD.mul_(grad_B11)
        return found_BFD.to(vectors_BFD.dtype)


class FwFMTerm(nn.Module):
    """The field-weighted term: the sum over pairs of r_ij <v_i, v_j>, [B].

    The weight r_ij is one learnt number for each pair of fields (arXiv 1806.03514, equation 5). The
    weights start at 1 / F: the term of a normalised FM.

    Args:
        fields: The number of fields, F.
    """

    def __init__(self, fields: int) -> None:
        super().__init__()
        self.pairs = DotInteraction(fields)
        self.weight_P = nn.Parameter(torch.full((self.pairs.pairs,), 1 / fields))

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        """Return the term, [B]."""
        dots_BP: Tensor = self.pairs(vectors_BFD)
        return dots_BP @ self.weight_P.to(dots_BP.dtype)


class FieldAwarePairs(nn.Module):
    """The dot product <v_i,j, v_j,i> of each pair of fields: [B, F, F, D] -> [B, P].

    Field i has a vector for each field, and the pair of i and j takes that of i for j and that of j
    for i. A field's vector for itself is in no pair. The order of pairs is `DotInteraction`'s.

    Args:
        fields: The number of fields, F.
    """

    pair_P: Tensor
    entry_FF: Tensor

    def __init__(self, fields: int) -> None:
        super().__init__()
        self.fields = fields
        pair_P, entry_FF = indices_of_pairs(fields)
        self.register_buffer("pair_P", pair_P, persistent=False)
        self.register_buffer("entry_FF", entry_FF, persistent=False)

    @property
    def pairs(self) -> int:
        """The number of pairs, equal to the number of output columns."""
        return self.fields * (self.fields - 1) // 2

    def forward(self, vectors_BFFD: Tensor) -> Tensor:
        """Return the dot products, [B, P].

        Args:
            vectors_BFFD: The vectors of field i for field j at [:, i, j].
        """
        dots_BP = _FieldAwareDots.apply(  # type: ignore[no-untyped-call]
            vectors_BFFD, self.pair_P, self.entry_FF
        )
        assert isinstance(dots_BP, Tensor)
        return dots_BP

    def extra_repr(self) -> str:
        """Return the numbers of fields and pairs as text."""
        return f"{self.fields} fields, {self.pairs} pairs"


class _FieldAwareDots(torch.autograd.Function):
    """Computes the dot products of field-aware pairs.

    The gradient for v_i,j is v_j,i times the gradient of the pair, which backward computes for all
    vectors at once: no vector is gathered, and no gradient scattered.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, vectors_BFFD: Tensor, pair_P: Tensor, entry_FF: Tensor) -> Tensor:
        ctx.save_for_backward(vectors_BFFD, entry_FF)
        products_BFF = (vectors_BFFD * vectors_BFFD.transpose(1, 2)).sum(3)
        return products_BFF.flatten(1).index_select(1, pair_P)

    @staticmethod
    def backward(ctx: Any, grad_BP: Tensor) -> tuple[Tensor, None, None]:
        vectors_BFFD, entry_FF = ctx.saved_tensors
        padded_BP1 = torch.cat([grad_BP, grad_BP.new_zeros(len(grad_BP), 1)], 1)
        fields = vectors_BFFD.shape[1]
        grad_BFF = padded_BP1.index_select(1, entry_FF).view(-1, fields, fields)
        return grad_BFF[..., None] * vectors_BFFD.transpose(1, 2), None, None
