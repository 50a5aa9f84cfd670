"""Products of pairs of vectors, as factorisation machines have them.

    fm_term            sum over pairs i < j of <v_i, v_j>         a vector per field
    FwFMTerm           the same, each pair with a weight r_ij     a vector per field

Sources: FM, "Factorization Machines", Rendle, ICDM 2010. FwFM, arXiv 1806.03514.

Shapes: B batch, F fields, D columns of a vector, P = F (F - 1) / 2 pairs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from recapp.models.layers import DotInteraction
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
