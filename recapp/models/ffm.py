"""FFM as published: "Field-aware Factorization Machines for CTR Prediction", Juan et al., RecSys
2016, equation 4.

    logit = linear part + sum over i < j of <v_i,F(j), v_j,F(i)> x_i x_j

Each id has one vector for each of the F fields, and meets the id of field j with its vector for j.
A row of a table holds the F vectors side by side, so a table has F D columns. The paper leaves out
the linear part for brevity.

With `normalise`, samples have the length 1, as in the paper: with one id in each field, the value
of an id is 1 / sqrt(F), and the sum is divided by F.

Shapes: B batch, F fields, D columns of a vector for one field.
"""

from torch import Tensor, nn

from recapp.models.factorisation import FieldAwarePairs, FieldAwareVectors, scale_of_pairs
from recapp.models.logistic import LogisticRegression
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


class FFM(nn.Module):
    """Click logits of a linear part and the dot products of all pairs of field-aware vectors.

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
        vectors_BFFD: Tensor = self.vectors(batch)
        linear_B: Tensor = self.linear(batch)
        pairs_BP: Tensor = self.pairs(vectors_BFFD)
        return linear_B + self.scale * pairs_BP.sum(1)
