"""Wide & Deep as published: "Wide & Deep Learning for Recommender Systems", arXiv 1606.07792,
equation 3.

    logit = w_wide^T [x, cross products] + w_deep^T MLP(vectors of ids and numbers, side by side)

The wide part has a weight for each id and number; cross products are ids of their own columns.

Shapes: B batch, K columns of the MLP's input.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from recapp.models.fields import FieldVectors, Numbers
from recapp.models.layers import logit_mlp
from recapp.models.logistic import LogisticRegression
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


class WideAndDeep(nn.Module):
    """Click logits of a linear part and an MLP, trained together.

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
        linear_B: Tensor = self.linear(batch)
        deep_B1: Tensor = self.deep(inputs_BK)
        return linear_B + deep_B1.squeeze(1)
