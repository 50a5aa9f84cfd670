"""DLRM as published: "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", arXiv 1906.00091.

    dense_BI - bottom MLP ------- x_BD --+----------------------------+
                                         |                            |
    ids ------ embedding tables - f_BFD -+- dots of all pairs - p_BP -+- concat - top MLP - logits_B

Without dense numbers (I = 0) there is no bottom MLP and no x: the top MLP gets the dots of all
pairs of embeddings and nothing else.

It is a plain module and knows no ranks: the collection of tables may be sharded behind its back.
Published DLRM has one dim everywhere; here a table of another dim than the bottom MLP's output gets
a linear map without bias to it.

Shapes: B batch, I dense features, F features that read tables, D bottom output, P pairs.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from recapp.errors import ConfigError
from recapp.models.layers import MLP, DotInteraction, check_widths, published_linear
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.module_by_name import ModuleByName


class Collection(Protocol):
    """What a model needs of its tables; sharded and unsharded collections both have it."""

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        ...

    def leave_room(self, columns: int) -> None:
        """Leave columns free before the first vector of a sample, if it can
        (`KeyedTensor.after`).
        """
        ...

    def __call__(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors, [B, sum of dims], in the order of tables and of the features of each."""
        ...


class DLRM(nn.Module):
    """Click logits from dense numbers and pooled embeddings.

    Args:
        embedding_bag_collection: a module that is a `Collection`.
        dense_in_features: dense numbers I of a sample; with 0 there is no bottom MLP, and only the
            embeddings interact.
        bottom_layers: widths of the bottom MLP, a ReLU follows each; the last is the dim D of the
            interaction, also without a bottom MLP.
        top_layers: widths of the top MLP; the last is the logit and must be 1, a ReLU follows each
            other one.

    Raises:
        ConfigError: shapes that do not fit; the message names the setting.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        bottom_layers: Sequence[int],
        top_layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.interaction_dim = dim = check_widths("model.bottom_layers", bottom_layers)[-1]
        self.bottom = None
        if dense_in_features:
            self.bottom = MLP(dense_in_features, bottom_layers, setting="model.bottom_layers")
        self.embedding_bag_collection = embedding_bag_collection
        tables: list[EmbeddingBagConfig] = embedding_bag_collection.embedding_bag_configs()  # type: ignore[operator]
        odd = {t.name: t.embedding_dim for t in tables if t.embedding_dim != dim}
        if self.bottom is not None and not odd:  # its output goes there: no copy joins it
            embedding_bag_collection.leave_room(dim)  # type: ignore[operator]
        self.projections = ModuleByName(
            {name: published_linear(width, dim, bias=False) for name, width in odd.items()}
        )
        features = sum(len(t.feature_names) for t in tables)
        self.interaction = DotInteraction(features + (self.bottom is not None))
        if self.bottom is None and not self.interaction.pairs:
            raise ConfigError(
                "dataset.dense=[] with one sparse feature: a DLRM has nothing to "
                "interact; name a second one, or a number"
            )
        inputs = self.interaction.pairs + (dim if self.bottom is not None else 0)
        self.top = MLP(inputs, _check_top(top_layers), last_relu=False, setting="model.top_layers")
        self.dense_in_features = dense_in_features
        self._tables = [t for t in tables for _ in t.feature_names]

    def flops_per_sample(self) -> float:
        """Of the interaction, forward and backward: a product of all its vectors with all of them,
        and one of as much with the gradient.
        """
        return 4.0 * self.interaction.vectors**2 * self.interaction_dim

    def forward(self, dense_BI: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """Logits, [B].

        Args:
            dense_BI: [B, I].
            features: raw ids, stride B.

        Raises:
            ConfigError: another number of dense features than the model was made for.
        """
        if dense_BI.dim() != 2 or dense_BI.shape[1] != self.dense_in_features:
            raise ConfigError(
                f"the model was made for {self.dense_in_features} dense features and got a batch "
                "of shape "
                f"{list(dense_BI.shape)}: dataset.dense must be the one it was made with"
            )
        # Tables first: backward then reaches them last, and DDP reduces all dense gradients while
        # rows are exchanged and updated.
        pooled: KeyedTensor = self.embedding_bag_collection(features)
        bottom_BD = self.bottom(dense_BI) if self.bottom is not None else None
        joined_BK = self._joined(bottom_BD, pooled)
        shape = (len(dense_BI), self.interaction.vectors, self.interaction_dim)
        dots_BP = self.interaction(joined_BK.view(shape))
        top_BK = dots_BP if bottom_BD is None else torch.cat([bottom_BD, dots_BP], 1)
        logits_B1: Tensor = self.top(top_BK)
        return logits_B1.squeeze(1)

    def _joined(self, bottom_BD: Tensor | None, pooled: KeyedTensor) -> Tensor:
        """All vectors side by side, each of the interaction's width."""
        if bottom_BD is not None and not self.projections:
            return pooled.after(bottom_BD)
        dtype = next(self.top.parameters()).dtype if bottom_BD is None else bottom_BD.dtype
        parts = torch.split(pooled.values().to(dtype), [t.embedding_dim for t in self._tables], 1)
        projected = [
            self.projections[t.name](part) if t.name in self.projections else part
            for t, part in zip(self._tables, parts, strict=True)
        ]
        return torch.cat(projected if bottom_BD is None else [bottom_BD, *projected], 1)


def _check_top(top_layers: Sequence[int]) -> Sequence[int]:
    if isinstance(top_layers, list | tuple) and top_layers and top_layers[-1] != 1:
        raise ConfigError(
            f"model.top_layers={list(top_layers)}: the last layer is the logit and must be 1, "
            "e.g. [256,128,1]"
        )
    return top_layers
