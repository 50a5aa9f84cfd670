"""ONN as published: "Operation-aware Neural Networks for User Response Prediction", arXiv
1904.12579.

    logit = MLP([v_1,1 .. v_F,F,  <v_i,j, v_j,i> of all pairs])

An id has one vector for each operation: one that is copied to the MLP, and one for the product with
each other field. A row of a table holds the F vectors side by side, and that of the field itself is
the copied one.

Shapes: B batch, F fields, D columns of a vector for one operation, P pairs.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from recapp.models.factorisation import FieldAwarePairs, FieldAwareVectors
from recapp.models.layers import logit_mlp
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


class ONN(nn.Module):
    """Click logits of an MLP over copied vectors and the products of all pairs.

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
        self.pairs = FieldAwarePairs(self.vectors.count, own=True)
        self.deep = logit_mlp(
            self.vectors.count * self.vectors.dim + self.pairs.pairs,
            layers,
            activation=activation,
            batch_norm=batch_norm,
            dropout=dropout,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        vectors_BFFD: Tensor = self.vectors(batch)
        logits_B1: Tensor = self.deep(self.pairs(vectors_BFFD))
        return logits_B1.squeeze(1)
