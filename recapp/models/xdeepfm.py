"""xDeepFM as published: "xDeepFM: Combining Explicit and Implicit Feature Interactions for
Recommender Systems", arXiv 1803.05170, equation 14.

    logit = linear part + w_cin^T p+ + w_dnn^T x_dnn + b

    v_BFD -+- CIN ------ p+ (sums of all layers)
           +- MLP ------ x_dnn

The compressed interaction network (CIN, section 3):

    X^0_BFD - X^1_BHD - X^2_BHD - ...       X^k_h = sum over i, j of W^k_hij X^(k-1)_i * X^0_j
                 |         |
              sums over D, side by side: every layer is connected with the output

The product * is that of columns, and layers have no activation (the paper found the identity best).

Shapes: B batch, F fields, D columns of a vector, H vectors of a layer, G vectors of the layer
before.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from recapp.models.factorisation import FactorisationModel
from recapp.models.layers import logit_mlp, xavier, xavier_linear
from recapp.models.model_checks import check_widths
from recapp.tables.collections import BagCollection


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

    def flops_per_sample(self) -> float:
        """Return the floating-point operations of the CIN per sample, with backward."""
        return 6.0 * self.vectors.dim * sum(p.numel() for p in self.cin.parameters())

    def interaction(self, vectors_BFD: Tensor) -> Tensor:
        """Return the logits of the interaction, [B]."""
        cin_B1: Tensor = self.cin_out(self.cin(vectors_BFD))
        deep_B1: Tensor = self.deep(vectors_BFD.flatten(1))
        return (cin_B1 + deep_B1).squeeze(1)
