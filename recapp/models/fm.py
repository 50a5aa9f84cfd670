"""Products of pairs of vectors, and the models made of them: FM, FwFM, DeepFM, FFM and ONN.

    fm_term            sum over pairs i < j of <v_i, v_j>         a vector per field
    FwFMTerm           the same, each pair with a weight r_ij     a vector per field
    FieldAwarePairs    <v_i,j, v_j,i> of each pair                a vector per field for each field

A row of a field-aware table has the vectors of its id for all F fields side by side, so such tables
have F D columns. A number has such vectors, too, times its value.

Shapes: B batch, F fields, D columns of a vector, P = F (F - 1) / 2 pairs, K = F D + P columns of
own vectors and pairs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear

from recapp.errors import ConfigError
from recapp.models.layers import (
    DotInteraction,
    FieldVectors,
    Layer,
    Numbers,
    check_settings,
    check_widths,
    logit_mlp,
    numbers_of,
    xavier,
    xavier_linear,
)
from recapp.models.linear_stack import are_several
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tables.collections import BagCollection


def fm_term(vectors_BFD: Tensor) -> Tensor:
    """Return the sum of the dot products of all pairs of vectors, [B].

    It takes F D multiplications instead of P D, because of Rendle's identity, lemma 3.1:

        sum over i < j of <v_i, v_j>  =  1/2 (|sum over i of v_i|^2 - sum over i of |v_i|^2)

    Args:
        vectors_BFD: The vectors of the fields, [B, F, D].
    """
    return _FMTerm.apply(vectors_BFD)  # type: ignore[no-any-return, no-untyped-call]


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


class FwFMTerm(Layer):
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
        dots_BP = self.pairs(vectors_BFD)
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
        vectors_BFD = self.vectors(batch)
        return self.linear(batch) + self.interaction(vectors_BFD)


class FieldAwarePairs(DotInteraction):
    """The dot product <v_i,j, v_j,i> of each pair of fields: [B, F, F, D] -> [B, P].

    Field i has a vector for each field, and the pair of i and j takes that of i for j and that of j
    for i. A field's vector for itself is in no pair. The order of pairs is `DotInteraction`'s.

    Args:
        fields: The number of fields, F.
        own_vectors: Whether the vectors of all fields for themselves come before the pairs, [B, K].
    """

    def __init__(self, fields: int, own_vectors: bool = False) -> None:
        super().__init__(fields)
        self.own_vectors = own_vectors

    def forward(self, vectors_BFFD: Tensor) -> Tensor:
        """Return the dot products, [B, P], or [B, K] with the fields' own vectors before them.

        Args:
            vectors_BFFD: The vectors of field i for field j at [:, i, j].
        """
        return _FieldAwareDots.apply(  # type: ignore[no-any-return, no-untyped-call]
            vectors_BFFD, self.pair_P, self.entry_FF, self.own_vectors
        )


class _FieldAwareDots(torch.autograd.Function):
    """Computes the dot products of field-aware pairs, and copies the fields' own vectors.

    The gradient for v_i,j is v_j,i times the gradient of the pair, which backward computes for all
    vectors at once: no gradient is scattered.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, vectors_BFFD: Tensor, pair_P: Tensor, entry_FF: Tensor, own_vectors: bool
    ) -> Tensor:
        ctx.save_for_backward(vectors_BFFD, entry_FF)
        ctx.own_vectors = own_vectors  # type: ignore[attr-defined]
        products_BFF = (vectors_BFFD * vectors_BFFD.transpose(1, 2)).sum(3)
        dots_BP = products_BFF.flatten(1).index_select(1, pair_P)
        if not own_vectors:
            return dots_BP
        diagonal_BFD = vectors_BFFD.diagonal(dim1=1, dim2=2).mT
        return torch.cat([diagonal_BFD.flatten(1), dots_BP], 1)

    @staticmethod
    def backward(ctx: Any, grad_BK: Tensor) -> tuple[Tensor, None, None, None]:
        vectors_BFFD, entry_FF = ctx.saved_tensors
        _, fields, _, dim = vectors_BFFD.shape
        grad_BP = grad_BK[:, fields * dim :] if ctx.own_vectors else grad_BK
        padded_BP1 = torch.cat([grad_BP, grad_BP.new_zeros(len(grad_BP), 1)], 1)
        grad_BFF = padded_BP1.index_select(1, entry_FF).view(-1, fields, fields)
        grad_BFFD = grad_BFF[..., None] * vectors_BFFD.transpose(1, 2)
        if ctx.own_vectors:
            grad_BFD = grad_BK[:, : fields * dim].reshape(-1, fields, dim)
            grad_BFFD = grad_BFFD + torch.diag_embed(grad_BFD.mT, dim1=1, dim2=2)
        return grad_BFFD, None, None, None


class FieldAwareVectors(Layer):
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
        return self.side_by_side(batch).view(-1, self.count, self.count, self.dim)


class FM(FactorisationModel):
    """Click logits of a linear part and the dot products of all pairs of vectors.

    FM as published: "Factorization Machines", Rendle, ICDM 2010, equation 1.

        logit = w_0 + sum over i of w_i x_i + sum over i < j of <v_i, v_j> x_i x_j

    An id has the value 1, a number its own, and each has a weight and a vector. With `normalise`,
    the sum over pairs is divided by F. This is the rule of libffm and of the paper of FFM (Juan et
    al., RecSys 2016) for a sample with one id in each field: they divide by the sum of the squared
    values. At first all F vectors move in one direction, so without `normalise` they need a rate
    that is several times lower.

    Shapes: B batch, F fields, D columns of a vector.

    Args:
        embedding_bag_collection: The vectors of ids; all tables have one dim.
        wide: The weights of ids: tables of dim 1 that start at 0.
        dense_in_features: The number of dense features of a sample.
        normalise: Whether the sum over pairs is divided by the number of fields.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: The tables have several dims.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        wide: BagCollection,
        dense_in_features: int,
        normalise: bool = True,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__(embedding_bag_collection, wide, dense_in_features, field_dropout)
        self.scale = scale_of_pairs(self.vectors.count, normalise)

    def interaction(self, vectors_BFD: Tensor) -> Tensor:
        """Return the logits of the interaction, [B]."""
        return self.scale * fm_term(vectors_BFD)


class FwFM(FactorisationModel):
    """Click logits of a linear part and the weighted dot products of all pairs of vectors.

    FwFM as published: "Field-weighted Factorization Machines for Click-Through Rate Prediction in
    Display Advertising", arXiv 1806.03514.

        logit = w_0 + sum over i of w_i x_i + sum over i < j of r_F(i)F(j) <v_i, v_j> x_i x_j

    The weight r of a pair of fields says how strongly the two interact. The paper also tries a
    linear part made of the vectors; this is the one with a weight per id.

    Shapes: B batch, F fields, D columns of a vector.

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
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__(embedding_bag_collection, wide, dense_in_features, field_dropout)
        self.pairs = FwFMTerm(self.vectors.count)
        self.flops_per_sample = 4.0 * self.vectors.count**2 * self.vectors.dim

    def interaction(self, vectors_BFD: Tensor) -> Tensor:
        """Return the logits of the interaction, [B]."""
        return self.pairs(vectors_BFD)


class DeepFM(FM):
    """Click logits of a factorisation machine and an MLP over the same vectors.

    DeepFM as published: "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction",
    arXiv 1703.04247.

        logit = FM(x) + MLP(v_1 .. v_F side by side)

    The FM and the MLP share the vectors. With `normalise`, the sum over pairs is divided by the
    number of fields.

    Shapes: B batch, F fields, D columns of a vector.

    Args:
        embedding_bag_collection: The vectors of ids; all tables have one dim.
        wide: The weights of ids: tables of dim 1 that start at 0.
        dense_in_features: The number of dense features of a sample.
        layers: The widths of the hidden layers of the MLP; the logit follows them.
        activation: The activation of the hidden layers.
        batch_norm: Whether the hidden layers have batch normalisation.
        dropout: The share of the hidden layers' outputs that training sets to 0.
        normalise: Whether the sum over pairs is divided by the number of fields.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: The tables have several dims, or a width is not allowed.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        wide: BagCollection,
        dense_in_features: int,
        layers: Sequence[int],
        activation: str,
        batch_norm: bool,
        dropout: float,
        normalise: bool = True,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            embedding_bag_collection, wide, dense_in_features, normalise, field_dropout
        )
        self.deep = logit_mlp(
            self.vectors.count * self.vectors.dim,
            layers,
            activation=activation,
            batch_norm=batch_norm,
            dropout=dropout,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        vectors_BFD = self.vectors(batch)
        linear_B = self.linear(batch)
        deep_B1 = self.deep(vectors_BFD.flatten(1))
        return linear_B + self.interaction(vectors_BFD) + deep_B1.squeeze(1)


class FFM(nn.Module):
    """Click logits of a linear part and the dot products of all pairs of field-aware vectors.

    FFM as published: "Field-aware Factorization Machines for CTR Prediction", Juan et al., RecSys
    2016, equation 4.

        logit = linear part + sum over i < j of <v_i,F(j), v_j,F(i)> x_i x_j

    Each id has one vector for each of the F fields, and meets the id of field j with its vector for
    j. A row of a table holds the F vectors side by side, so a table has F D columns. The paper
    leaves out the linear part for brevity.

    With `normalise`, samples have the length 1, as in the paper: with one id in each field, the
    value of an id is 1 / sqrt(F), and the sum is divided by F.

    Shapes: B batch, F fields, D columns of a vector for one field.

    Args:
        embedding_bag_collection: The vectors of ids: all tables have F D columns.
        wide: The weights of ids: tables of dim 1 that start at 0.
        dense_in_features: The number of dense features of a sample.
        normalise: Whether the sum over pairs is divided by the number of fields.

    Raises:
        ConfigError: The columns of the tables are no multiple of the number of fields.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        wide: BagCollection,
        dense_in_features: int,
        normalise: bool = True,
    ) -> None:
        super().__init__()
        self.vectors = FieldAwareVectors(embedding_bag_collection, dense_in_features)
        self.scale = scale_of_pairs(self.vectors.count, normalise)
        self.linear = LogisticRegression(wide, dense_in_features)
        self.pairs = FieldAwarePairs(self.vectors.count)

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        vectors_BFFD = self.vectors(batch)
        return self.linear(batch) + self.scale * self.pairs(vectors_BFFD).sum(1)


class ONN(nn.Module):
    """Click logits of an MLP over copied vectors and the products of all pairs.

    ONN as published: "Operation-aware Neural Networks for User Response Prediction", arXiv
    1904.12579.

        logit = MLP([v_1,1 .. v_F,F,  <v_i,j, v_j,i> of all pairs])

    An id has one vector for each operation: one that is copied to the MLP, and one for the product
    with each other field. A row of a table holds the F vectors side by side, and that of the field
    itself is the copied one.

    Shapes: B batch, F fields, D columns of a vector for one operation, P pairs.

    Args:
        embedding_bag_collection: The vectors of ids: all tables have F D columns.
        dense_in_features: The number of dense features of a sample.
        layers: The widths of the hidden layers of the MLP; the logit follows them.
        activation: The activation of the hidden layers.
        batch_norm: Whether the hidden layers have batch normalisation.
        dropout: The share of the hidden layers' outputs that training sets to 0.

    Raises:
        ConfigError: The columns of the tables are no multiple of the number of fields, or a width
            is not allowed.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        layers: Sequence[int],
        activation: str,
        batch_norm: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.vectors = FieldAwareVectors(embedding_bag_collection, dense_in_features)
        self.pairs = FieldAwarePairs(self.vectors.count, own_vectors=True)
        self.deep = logit_mlp(
            self.vectors.count * self.vectors.dim + self.pairs.pairs,
            layers,
            activation=activation,
            batch_norm=batch_norm,
            dropout=dropout,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        return self.deep(self.pairs(self.vectors(batch))).squeeze(1)


class CIN(nn.Module):
    """Sums of the columns of all layers of a compressed interaction network.

    The input is [B, F, D], the output [B, sum of layers].

    Args:
        fields: The number of vectors of the input, F.
        layers: The number of vectors of each layer, H, first to last.
        setting: The name of `layers` in the configuration, for messages.

    Raises:
        ConfigError: A width is no whole number of at least 1.
    """

    def __init__(self, fields: int, layers: Sequence[int], setting: str = "cin_layers") -> None:
        super().__init__()
        widths = [fields, *check_widths(setting, layers)]
        self.layers = nn.ModuleList(
            CINLayer(before, width, fields) for before, width in pairwise(widths)
        )
        self.columns = sum(layers)

    def forward(self, vectors_BFD: Tensor) -> Tensor:
        """Return the sums of the columns of all layers, [B, sum of layers]."""
        # The columns of a vector go the same way by themselves, like samples.
        first_BDF = vectors_BFD.transpose(1, 2).contiguous()
        last_BDH = first_BDF
        sums: list[Tensor] = []
        for layer in self.layers:
            last_BDH = layer(last_BDH, first_BDF)
            sums.append(last_BDH.sum(1))
        return torch.cat(sums, 1)


class CINLayer(nn.Module):
    """One layer: [B, D, G] and [B, D, F] -> [B, D, H].

    Args:
        before: The number of vectors of the layer before, G.
        width: The number of vectors of this layer, H.
        fields: The number of vectors of the input, F.
    """

    def __init__(self, before: int, width: int, fields: int) -> None:
        super().__init__()
        self.weight_HGF = nn.Parameter(torch.empty(width, before, fields))
        xavier(self.weight_HGF, before * fields, width)

    def forward(self, last_BDG: Tensor, first_BDF: Tensor) -> Tensor:
        """Return the vectors of this layer, [B, D, H].

        The double sum can be computed in two orders with equally many products. This takes the
        order that needs less memory.
        """
        width, before, fields = self.weight_HGF.shape
        if width < fields:
            mixed_BDK = linear(first_BDF, self.weight_HGF.view(width * before, fields))
            mixed_BDHG = mixed_BDK.view(*mixed_BDK.shape[:2], width, before)
            return (mixed_BDHG * last_BDG[:, :, None]).sum(3)
        outer_BDGF = last_BDG[..., None] * first_BDF[:, :, None]
        return linear(outer_BDGF.flatten(2), self.weight_HGF.view(width, before * fields))


class XDeepFM(FactorisationModel):
    """Click logits of a linear part, a compressed interaction network and an MLP.

    xDeepFM as published: "xDeepFM: Combining Explicit and Implicit Feature Interactions for
    Recommender Systems", arXiv 1803.05170, equation 14.

        logit = linear part + w_cin^T p+ + w_dnn^T x_dnn + b

        v_BFD -+- CIN ------ p+ (sums of all layers)
               +- MLP ------ x_dnn

    The compressed interaction network (CIN, section 3):

        X^0_BFD - X^1_BHD - X^2_BHD - ...       X^k_h = sum over i, j of W^k_hij X^(k-1)_i * X^0_j
                     |         |
                  sums over D, side by side: every layer is connected with the output

    The product * is that of columns, and layers have no activation (the paper found the identity
    best).

    Shapes: B batch, F fields, D columns of a vector, H vectors of a layer, G vectors of the layer
    before.

    Args:
        embedding_bag_collection: The vectors of ids; all tables have one dim.
        wide: The weights of ids: tables of dim 1 that start at 0.
        dense_in_features: The number of dense features of a sample.
        cin_layers: The number of vectors of each layer of the CIN.
        layers: The widths of the hidden layers of the MLP; the logit follows them.
        activation: The activation of the hidden layers.
        batch_norm: Whether the hidden layers have batch normalisation.
        dropout: The share of the hidden layers' outputs that training sets to 0.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: The tables have several dims, or a width is not allowed.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        wide: BagCollection,
        dense_in_features: int,
        cin_layers: Sequence[int],
        layers: Sequence[int],
        activation: str,
        batch_norm: bool,
        dropout: float,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__(embedding_bag_collection, wide, dense_in_features, field_dropout)
        self.cin = CIN(self.vectors.count, cin_layers, setting="model.cin_layers")
        self.cin_out = xavier_linear(self.cin.columns, 1, bias=False)
        self.deep = logit_mlp(
            self.vectors.count * self.vectors.dim,
            layers,
            activation=activation,
            batch_norm=batch_norm,
            dropout=dropout,
        )
        weights = sum(p.numel() for p in self.cin.parameters())
        self.flops_per_sample = 6.0 * self.vectors.dim * weights

    def interaction(self, vectors_BFD: Tensor) -> Tensor:
        """Return the logits of the interaction, [B]."""
        cin_B1 = self.cin_out(self.cin(vectors_BFD))
        return (cin_B1 + self.deep(vectors_BFD.flatten(1))).squeeze(1)


PARTS = 10.0  # the stored parameter is the weight divided by 10


class LogisticRegression(Layer):
    """Click logits that are linear in numbers and ids.

    Logistic regression: one weight per id, one per number, and a bias; and Wide & Deep.

        logit = w_0 + sum over numbers of w_i x_i + sum over ids of w_id

    All weights start at 0. It is the linear part of the other models that have a wide table, too.

    For w_0 and for the weights of numbers, the stored parameter is the weight divided by 10. A step
    of Adam moves a parameter by about its rate, and the usual rate of 1e-3 is made for layers of
    hundreds of inputs: a hundred steps would move a weight by .1 at most. On the 117 thousand
    training rows of the small Criteo logs, one epoch reaches .754 AUC with the division and .743
    without.

    Shapes: B batch, I dense features, F lookups.

    Args:
        wide: The weights of ids: tables of dim 1 that start at 0.
        dense_in_features: The number of dense features I of a sample.
    """

    def __init__(self, wide: BagCollection, dense_in_features: int) -> None:
        super().__init__()
        self.wide = wide
        self.weight_I = nn.Parameter(torch.zeros(dense_in_features))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B].

        Args:
            batch: Samples with `dense_in_features` dense features.

        Raises:
            ConfigError: The batch has another number of dense features.
        """
        dense_BI = numbers_of(batch, len(self.weight_I))
        wide_BF: Tensor = self.wide(batch.sparse).values().to(self.bias.dtype)
        # No matrix product, which autocast would compute in bf16.
        dense_B = (dense_BI * self.weight_I).sum(1) + self.bias
        return wide_BF.sum(1) + PARTS * dense_B


class WideAndDeep(nn.Module):
    """Click logits of a linear part and an MLP, trained together.

    Wide & Deep as published: "Wide & Deep Learning for Recommender Systems", arXiv 1606.07792,
    equation 3.

        logit = w_wide^T [x, cross products] + w_deep^T MLP([vectors of ids, numbers])

    The wide part has a weight for each id and number; cross products are ids of their own columns.

    Shapes: B batch, K columns of the MLP's input.

    Args:
        embedding_bag_collection: The vectors of ids.
        wide: The weights of ids: tables of dim 1 that start at 0.
        dense_in_features: The number of dense features of a sample.
        layers: The widths of the hidden layers of the MLP; the logit follows them.
        numbers: How numbers enter the MLP: as they are (`concat`), or each as a multiple of a
            learnt vector (`vectors`).
        activation: The activation of the hidden layers.
        batch_norm: Whether the hidden layers have batch normalisation.
        dropout: The share of the hidden layers' outputs that training sets to 0.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A width is not allowed.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        wide: BagCollection,
        dense_in_features: int,
        layers: Sequence[int],
        numbers: Numbers,
        activation: str,
        batch_norm: bool,
        dropout: float,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vectors = FieldVectors(
            embedding_bag_collection,
            dense_in_features,
            numbers,
            model="Wide & Deep",
            dropout=field_dropout,
        )
        self.linear = LogisticRegression(wide, dense_in_features)
        self.deep = logit_mlp(
            self.vectors.columns,
            layers,
            activation=activation,
            batch_norm=batch_norm,
            dropout=dropout,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        inputs_BK = self.vectors.flat(batch)
        return self.linear(batch) + self.deep(inputs_BK).squeeze(1)
