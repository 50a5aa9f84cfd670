"""DeepFM as published: "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction",
arXiv 1703.04247.

    logit = FM(x) + MLP(v_1 .. v_F side by side)

The FM and the MLP share the vectors. With `normalise`, the sum over pairs is divided by the number
of fields (`recapp/models/fm.py`).

Shapes: B batch, F fields, D columns of a vector.
"""

from collections.abc import Sequence

from torch import Tensor

from recapp.models.fm import FM
from recapp.models.layers import logit_mlp
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


class DeepFM(FM):
    """Click logits of a factorisation machine and an MLP over the same vectors.

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
        vectors_BFD: Tensor = self.vectors(batch)
        linear_B: Tensor = self.linear(batch)
        deep_B1: Tensor = self.deep(vectors_BFD.flatten(1))
        return linear_B + self.interaction(vectors_BFD) + deep_B1.squeeze(1)
