"""EDCN: "Enhancing Explicit and Implicit Feature Interactions via Information Sharing for Parallel
Deep CTR Models", DLP-KDD 2021, https://dlp-kdd.github.io/assets/pdf/DLP-KDD_2021_paper_12.pdf.

    fields - regulation -+- c  cross layer   c' = c0 (w . c) + b + c -+-------- c' --+
                         |                                            +- bridge - s -+- logit_B
                         +- d  linear layer  d' = ReLU(W d + b) ------+-------- d' --+

There are L such layers; a bridge's s is the input of the next regulation. A regulation weights the
fields for each of the two networks by its own softmax over the fields.

Shapes: B batch, F fields, D columns of a field, K columns of all fields.
"""

import torch
from torch import Tensor, nn

from recapp.models.crosses import JointLogit, VectorCross
from recapp.models.fields import FieldVectors
from recapp.models.layers import MLP, BatchNorm, xavier_linear
from recapp.models.model_checks import check_settings
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


class Bridge(nn.Module):
    """Joins the outputs of two networks, [B, K] and [B, K] -> [B, K].

    Args:
        columns: The columns of each output, K.
        kind: `hadamard_product` and `pointwise_addition` need no weights. `concatenation` maps both
            outputs to K columns, with a ReLU. `attention_pooling` adds both, each multiplied by its
            own softmax over K of U ReLU(W x + b).
    """

    def __init__(self, columns: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "concatenation":
            self.map = MLP(2 * columns, [columns])
        if kind == "attention_pooling":
            self.attention = nn.ModuleList(
                nn.Sequential(
                    xavier_linear(columns, columns),
                    nn.ReLU(inplace=True),
                    xavier_linear(columns, columns, bias=False),
                    nn.Softmax(dim=1),
                )
                for _ in range(2)
            )

    def forward(self, cross_BK: Tensor, deep_BK: Tensor) -> Tensor:
        """Return the joined columns, [B, K]."""
        if self.kind == "hadamard_product":
            return cross_BK * deep_BK
        if self.kind == "pointwise_addition":
            return cross_BK + deep_BK
        if self.kind == "concatenation":
            joined_BK: Tensor = self.map(torch.cat([cross_BK, deep_BK], 1))
            return joined_BK
        of_cross, of_deep = self.attention
        pooled_BK: Tensor = torch.addcmul(of_cross(cross_BK) * cross_BK, of_deep(deep_BK), deep_BK)
        return pooled_BK


class Regulation(nn.Module):
    """Weights fields for two networks: [B, K] -> [B, K] and [B, K].

    Args:
        fields: The number of fields, F.
        dim: The columns of a field, D.
        temperature: Divides the learnt numbers before the softmax over fields.
        batch_norm: Whether a batch norm follows.
    """

    def __init__(self, fields: int, dim: int, temperature: float, batch_norm: bool) -> None:
        super().__init__()
        self.dim = dim
        self.temperature = temperature
        self.weight = nn.Parameter(torch.ones(2, fields))
        self.norms = nn.ModuleList(
            BatchNorm(fields * dim) if batch_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x_BK: Tensor) -> list[Tensor]:
        """Return the inputs of the two networks."""
        share_2F = (self.weight / self.temperature).softmax(1)
        share_2K = share_2F.repeat_interleave(self.dim, 1)
        return [norm(x_BK * share_K) for norm, share_K in zip(self.norms, share_2K, strict=True)]


class EDCN(nn.Module):
    """Click logits of a cross network and a tower that share what they learn after each layer.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`. All tables have one dim.
        dense_in_features: The number of dense features of a sample; each multiplies a learnt
            vector.
        cross_layers: The number of layers of both networks.
        bridge: `hadamard_product`, `pointwise_addition`, `concatenation` or `attention_pooling`.
        temperature: Divides the learnt numbers of the regulations before their softmax.
        batch_norm: Whether a batch norm ends each regulation.
        dropout: The share of the tower's outputs that a training step sets to 0.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed; the message names it.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        cross_layers: int = 3,
        bridge: str = "pointwise_addition",
        temperature: float = 1.0,
        batch_norm: bool = True,
        dropout: float = 0.0,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_settings(
            cross_layers=cross_layers,
            bridge=bridge,
            temperature=temperature,
            batch_norm=batch_norm,
            dropout=dropout,
        )
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, model="EDCN", dropout=field_dropout
        )
        fields = self.fields.count
        dim = self.fields.dim
        columns = self.fields.columns
        each = range(cross_layers)
        self.regulations = nn.ModuleList(
            Regulation(fields, dim, temperature, batch_norm) for _ in each
        )
        self.crosses = nn.ModuleList(VectorCross(columns) for _ in each)
        self.tower = nn.ModuleList(MLP(columns, [columns], dropout=dropout) for _ in each)
        self.bridges = nn.ModuleList(Bridge(columns, bridge) for _ in each)
        self.logit = JointLogit(columns, columns, columns)

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        shared_BK = self.fields.flat(batch)
        first_BK = None
        for regulation, cross, layer, bridge in zip(
            self.regulations, self.crosses, self.tower, self.bridges, strict=True
        ):
            cross_BK, deep_BK = regulation(shared_BK)
            first_BK = cross_BK if first_BK is None else first_BK
            cross_BK = cross(first_BK, cross_BK)
            deep_BK = layer(deep_BK)
            shared_BK = bridge(cross_BK, deep_BK)
        logits_B: Tensor = self.logit(cross_BK, deep_BK, shared_BK)
        return logits_B
