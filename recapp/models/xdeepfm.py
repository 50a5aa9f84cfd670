"""xDeepFM as published: "xDeepFM: Combining Explicit and Implicit Feature Interactions for
Recommender Systems", arXiv 1803.05170, equation 14.

    logit = linear part + w_cin^T p+ + w_dnn^T x_dnn + b

    v_BFD -+- CIN ------ p+ (sums of all layers)
           +- MLP ------ x_dnn

Shapes: B batch, F fields, D columns of a vector.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from recapp.models.cin import CIN
from recapp.models.fields import FieldVectors
from recapp.models.layers import logit_mlp, xavier_linear
from recapp.models.logistic import LogisticRegression
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


class XDeepFM(nn.Module):
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
        super().__init__()
        self.vectors = FieldVectors(
            embedding_bag_collection, dense_in_features, model="xDeepFM", dropout=field_dropout
        )
        self.linear = LogisticRegression(wide, dense_in_features)
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

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        vectors_BFD: Tensor = self.vectors(batch)
        linear_B: Tensor = self.linear(batch)
        cin_B1: Tensor = self.cin_out(self.cin(vectors_BFD))
        deep_B1: Tensor = self.deep(vectors_BFD.flatten(1))
        return linear_B + (cin_B1 + deep_B1).squeeze(1)
