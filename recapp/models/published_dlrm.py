"""DLRM as published: "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", arXiv 1906.00091.

    dense_BI - bottom MLP ------- x_BD --+----------------------------+
                                         |                            |
    ids ------ embedding tables - f_BFD -+- dots of all pairs - p_BP -+- concat - top MLP - logits_B

Without dense features (I = 0) there is no bottom MLP and no x: the top MLP gets only the dot
products of all pairs of embeddings.

The model is a plain module and knows no ranks; a sharded collection may replace its collection of
tables. The published DLRM has one dim for all tables. In recapp a linear map without bias projects
the vectors of a table of another dim to the dim of the bottom MLP's output.

Shapes: B batch, I dense features, F lookups, D bottom output, P pairs, K columns of all vectors.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from recapp.errors import ConfigError
from recapp.models.dcn import Crosses, LowRankCross
from recapp.models.layers import (
    MLP,
    DotInteraction,
    check_settings,
    check_widths,
    numbers_of,
    published_linear,
)
from recapp.sparse.jagged_tensor import KeyedTensor
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tables.collections import BagCollection, ModuleByName
from recapp.tables.config import TableLookup


class DLRM(nn.Module):
    """Click logits from dense features and pooled embeddings.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`. Each vector of a concatenation
            is an input of the interaction by itself.
        dense_in_features: The number of dense features I of a sample. With 0 there is no bottom
            MLP, and the interaction has only the embeddings.
        bottom_layers: The widths of the bottom MLP, whose layers all have a ReLU. The last width is
            the dim D of the interaction, also without a bottom MLP.
        top_layers: The widths of the top MLP, with a ReLU after each layer but the last, which is
            the logit and has width 1.
        wide: A collection with one weight for each id, whose sum is added to the logit as in Wide &
            Deep (arXiv 1606.07792); `tables.wide=true` makes it. The published DLRM has none.

    Raises:
        ConfigError: The widths do not fit; the message names the setting.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        bottom_layers: Sequence[int],
        top_layers: Sequence[int],
        wide: BagCollection | None = None,
    ) -> None:
        super().__init__()
        check_widths("model.bottom_layers", bottom_layers)
        check_settings(top_layers=top_layers)
        self.interaction_dim = dim = bottom_layers[-1]
        mlp = partial(MLP, make_linear=published_linear)
        self.bottom = None
        if dense_in_features:
            self.bottom = mlp(dense_in_features, bottom_layers, setting="model.bottom_layers")
        self.embedding_bag_collection = embedding_bag_collection
        lookups = embedding_bag_collection.lookups
        odd = {_name(x): x.dim for x in lookups if x.dim != dim}
        if self.bottom is not None and not odd:
            # The bottom MLP's output goes into this room, which saves a copy of the vectors.
            embedding_bag_collection.leave_room(dim)
        self.projections = ModuleByName(
            {name: published_linear(width, dim, bias=False) for name, width in odd.items()}
        )
        vectors = sum(x.columns // x.dim for x in lookups)
        with_bottom = self.bottom is not None
        self.interaction = DotInteraction(vectors + with_bottom, keeps_first=with_bottom)
        if self.bottom is None and not self.interaction.pairs:
            raise ConfigError(
                "dataset.dense=[] with one sparse feature: a DLRM has nothing to interact; name a "
                "second one, or a number"
            )
        inputs = self.interaction.pairs + (dim if self.bottom is not None else 0)
        self.top = mlp(inputs, top_layers, last_relu=False, setting="model.top_layers")
        self.dense_in_features = dense_in_features
        self._lookups = lookups
        self.wide_weights = wide
        # forward multiplies all vectors with all vectors; backward costs one more such product
        self.flops_per_sample = 4.0 * self.interaction.vectors**2 * dim

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B].

        Args:
            batch: Samples with `dense_in_features` dense features.

        Raises:
            ConfigError: The batch has another number of dense features.
        """
        dense_BI = numbers_of(batch, self.dense_in_features)
        # Tables come first, so that backward reaches them last, and DDP reduces all dense gradients
        # during the exchange and update of rows.
        pooled: KeyedTensor = self.embedding_bag_collection(batch.sparse)
        bottom_BD = self.bottom(dense_BI) if self.bottom is not None else None
        joined_BK = self._joined(bottom_BD, pooled)
        shape = (dense_BI.shape[0], self.interaction.vectors, self.interaction_dim)
        logits_B = self.top(self.interaction(joined_BK.view(shape))).squeeze(1)
        if self.wide_weights is None:
            return logits_B
        return logits_B + self.wide_weights(batch.sparse).values().sum(1)

    def _joined(self, bottom_BD: Tensor | None, pooled: KeyedTensor) -> Tensor:
        """Return all vectors side by side, [B, K], each of the interaction's width."""
        if bottom_BD is not None and not self.projections:
            return pooled.prepend(bottom_BD)
        dtype = next(self.top.parameters()).dtype if bottom_BD is None else bottom_BD.dtype
        parts = torch.split(pooled.values().to(dtype), [x.columns for x in self._lookups], 1)
        projected = [
            self._projected(x, part) if _name(x) in self.projections else part
            for x, part in zip(self._lookups, parts, strict=True)
        ]
        return torch.cat(projected if bottom_BD is None else [bottom_BD, *projected], 1)

    def _projected(self, lookup: TableLookup, vectors_BK: Tensor) -> Tensor:
        """Return the vectors of a lookup, side by side, at the interaction's width."""
        columns = self.interaction_dim * (lookup.columns // lookup.dim)
        each_ND: Tensor = self.projections[_name(lookup)](vectors_BK.reshape(-1, lookup.dim))
        return each_ND.view(vectors_BK.shape[0], columns)


def _name(lookup: TableLookup) -> str:
    """Return the name of a lookup's table, which is the same in all members of an ensemble."""
    return lookup.table.member_of or lookup.table.name


class DLRM_DCN(nn.Module):
    """Click logits from dense features and pooled embeddings, with low-rank crosses.

    DLRM-DCNv2, the recommendation benchmark of MLPerf Training 3.0 and later
    (github.com/mlcommons/training, `recommendation_v2/torchrec_dlrm`).

        dense_BI - bottom MLP -+
                               +- x0 - L layers  x' = x0 * (U V x + b) + x - top MLP - logits_B
        ids - tables ----------+

    A DLRM (arXiv 1906.00091) whose dot products are replaced by the low-rank cross network of
    DCN-V2 (arXiv 2008.13535).

    Shapes: B batch, I dense features, D bottom output, K columns of the bottom output and all
    vectors.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`; tables may have any dims.
        dense_in_features: The number of dense features I of a sample. With 0 there is no bottom
            MLP, and only the embeddings are crossed.
        bottom_layers: The widths of the bottom MLP, whose layers all have a ReLU.
        cross_layers: The number of cross layers.
        rank: The columns of V x.
        top_layers: The widths of the top MLP, with a ReLU after each layer but the last, which is
            the logit and has width 1.

    Raises:
        ConfigError: A setting is not allowed; the message names it.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        bottom_layers: Sequence[int],
        top_layers: Sequence[int] = (1024, 1024, 512, 256, 1),
        cross_layers: int = 3,
        rank: int = 512,
    ) -> None:
        super().__init__()
        check_settings(top_layers=top_layers, cross_layers=cross_layers, rank=rank)
        check_widths("model.bottom_layers", bottom_layers)
        mlp = partial(MLP, make_linear=published_linear)
        self.bottom = None
        columns = sum(x.columns for x in embedding_bag_collection.lookups)
        if dense_in_features:
            self.bottom = mlp(dense_in_features, bottom_layers, setting="model.bottom_layers")
            columns += bottom_layers[-1]
            # The bottom MLP's output goes into this room, which saves a copy of the vectors.
            embedding_bag_collection.leave_room(bottom_layers[-1])
        self.embedding_bag_collection = embedding_bag_collection
        self.crosses = Crosses(LowRankCross(columns, rank) for _ in range(cross_layers))
        self.top = mlp(columns, top_layers, last_relu=False, setting="model.top_layers")
        self.dense_in_features = dense_in_features

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B].

        Args:
            batch: Samples with `dense_in_features` dense features.

        Raises:
            ConfigError: The batch has another number of dense features.
        """
        dense_BI = numbers_of(batch, self.dense_in_features)
        # Tables come first, so that backward reaches them last, and DDP reduces all dense gradients
        # during the exchange and update of rows.
        pooled: KeyedTensor = self.embedding_bag_collection(batch.sparse)
        if self.bottom is None:
            first_BK = pooled.values().to(next(self.top.parameters()).dtype)
        else:
            first_BK = pooled.prepend(self.bottom(dense_BI))
        return self.top(self.crosses(first_BK))[:, 0]
