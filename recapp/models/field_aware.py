"""Field-aware vectors: a vector of each field for each field, [B, F, F, D].

A row of a table has the vectors of its id for all F fields side by side, so tables have F D columns
(Juan et al., RecSys 2016). A number has such vectors, too, times its value.

    v_2,1 . v_1,2    v_3,1 . v_1,3    v_3,2 . v_2,3   ...    the products of FFM and ONN
                                                             (arXiv 1904.12579)

Shapes: B batch, F fields, D columns of a vector, P = F (F - 1) / 2 pairs, K = F D + P columns of
own vectors and pairs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from recapp.models.fields import FieldVectors
from recapp.models.layers import indices_of_pairs
from recapp.models.model_checks import check_field_aware
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


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
        products_BFF = (vectors_BFFD * vectors_BFFD.transpose(1, 2)).sum(3)
        dots_BP = products_BFF.flatten(1).index_select(1, pair_P)
        return torch.cat([_own(vectors_BFFD).flatten(1), dots_BP], 1) if own else dots_BP

    @staticmethod
    def backward(ctx: Any, grad_BK: Tensor) -> tuple[Tensor, None, None, None]:
        vectors_BFFD, entry_FF = ctx.saved_tensors
        _, fields, _, dim = vectors_BFFD.shape
        grad_BP = grad_BK[:, fields * dim :] if ctx.own else grad_BK
        padded_BP1 = torch.cat([grad_BP, grad_BP.new_zeros(len(grad_BP), 1)], 1)
        grad_BFF = padded_BP1.index_select(1, entry_FF).view(-1, fields, fields)
        grad_BFFD = grad_BFF[..., None] * vectors_BFFD.transpose(1, 2)
        if ctx.own:
            grad_BFD = grad_BK[:, : fields * dim].reshape(-1, fields, dim)
            grad_BFFD = grad_BFFD + torch.diag_embed(grad_BFD.mT, dim1=1, dim2=2)
        return grad_BFFD, None, None, None


def _own(vectors_BFFD: Tensor) -> Tensor:
    """Return the vector of each field for itself, a view [B, F, D]."""
    return vectors_BFFD.diagonal(dim1=1, dim2=2).mT


class FieldAwareVectors(nn.Module):
    """The vectors of each field for each field.

    Attributes:
        count: The number of fields, F.
        dim: The columns of a vector, D.

    Args:
        embedding_bag_collection: The vectors of ids: all tables have F D columns.
        dense_in_features: The number of dense features of a sample.

    Raises:
        ConfigError: The columns of the tables are no multiple of F.
    """

    def __init__(self, embedding_bag_collection: BagCollection, dense_in_features: int) -> None:
        super().__init__()
        self.side_by_side = FieldVectors(embedding_bag_collection, dense_in_features)
        self.count = self.side_by_side.count
        lookups = self.count - dense_in_features
        dims = [self.side_by_side.dim] * lookups
        self.dim = check_field_aware(dims, dense_in_features)

    def forward(self, batch: Batch) -> Tensor:
        """Return the vector of field i for field j at [:, i, j], [B, F, F, D]."""
        rows_BFK: Tensor = self.side_by_side(batch)
        return rows_BFK.view(-1, self.count, self.count, self.dim)
