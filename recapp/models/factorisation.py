"""Products of pairs of vectors, as factorisation machines have them.

    fm_term            sum over pairs i < j of <v_i, v_j>         a vector per field
    FwFMTerm           the same, each pair with a weight r_ij     a vector per field
    FieldAwarePairs    <v_i,j, v_j,i> of each pair                a vector per field for each field

Sources: FM, "Factorization Machines", Rendle, ICDM 2010. FwFM, arXiv 1806.03514. FFM, Juan et al.,
RecSys 2016. ONN, arXiv 1904.12579.

A row of a field-aware table has the vectors of its id for all F fields side by side, so such tables
have F D columns. A number has such vectors, too, times its value.

Shapes: B batch, F fields, D columns of a vector, P = F (F - 1) / 2 pairs, K = F D + P columns of
own vectors and pairs.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from recapp.errors import ConfigError
from recapp.models.fields import FieldVectors
from recapp.models.layers import DotInteraction, indices_of_pairs
from recapp.models.linear_stack import are_several
from recapp.models.logistic import LogisticRegression
from recapp.models.model_checks import check_settings
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


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
        grad_BFD = others_BFD * grad_B11 if are_several(grad_B) else others_BFD.mul_(grad_B11)
        return grad_BFD.to(vectors_BFD.dtype)


def scale_of_pairs(fields: int, normalise: bool) -> float:
    """Return the factor of the sum over pairs: 1 / F if it is normalised, else 1.

    Raises:
        ConfigError: `normalise` is no truth value.
    """
    check_settings(normalise=normalise)
    return 1 / fields if normalise else 1.0


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


class FactorisationModel(nn.Module, ABC):
    """The base of FM, FwFM, DeepFM and xDeepFM: a linear part, and an interaction of the vectors of
    the fields, which `interaction` computes.

    Args:
        embedding_bag_collection: The vectors of ids; all tables have one dim.
        wide: The weights of ids: tables of dim 1 that start at 0.
        dense_in_features: The number of dense features of a sample.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: The tables have several dims.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        wide: BagCollection,
        dense_in_features: int,
        field_dropout: float,
    ) -> None:
        super().__init__()
        self.vectors = FieldVectors(
            embedding_bag_collection,
            dense_in_features,
            model=type(self).__name__,
            dropout=field_dropout,
        )
        self.linear = LogisticRegression(wide, dense_in_features)

    @abstractmethod
    def interaction(self, vectors_BFD: Tensor) -> Tensor:
        """Return the logits of the interaction, [B]."""

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        vectors_BFD: Tensor = self.vectors(batch)
        linear_B: Tensor = self.linear(batch)
        return linear_B + self.interaction(vectors_BFD)


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
        columns = self.side_by_side.dim
        self.dim = columns // self.count
        if columns % self.count:
            raise ConfigError(
                f"tables.dim={columns}: a row of this model has a vector for each of the "
                f"{self.count} fields (numbers and lookups), so tables.dim must be a multiple of "
                f"{self.count}, e.g. {4 * self.count} for vectors of 4 columns"
            )

    def forward(self, batch: Batch) -> Tensor:
        """Return the vector of field i for field j at [:, i, j], [B, F, F, D]."""
        rows_BFK: Tensor = self.side_by_side(batch)
        return rows_BFK.view(-1, self.count, self.count, self.dim)
