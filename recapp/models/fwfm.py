"""FwFM as published: "Field-weighted Factorization Machines for Click-Through Rate Prediction in
Display Advertising", arXiv 1806.03514.

    logit = w_0 + sum over i of w_i x_i + sum over i < j of r_F(i)F(j) <v_i, v_j> x_i x_j

The weight r of a pair of fields says how strongly the two interact. The paper also tries a linear
part made of the vectors; this is the one with a weight per id.

Shapes: B batch, F fields, D columns of a vector.
"""

from torch import Tensor

from recapp.models.factorisation import FactorisationModel, FwFMTerm
from recapp.tables.collections import BagCollection


class FwFM(FactorisationModel):
    """Click logits of a linear part and the weighted dot products of all pairs of vectors.

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

    def flops_per_sample(self) -> float:
        """Return the floating-point operations of the dot products per sample, with backward."""
        return 4.0 * self.vectors.count**2 * self.vectors.dim

    def interaction(self, vectors_BFD: Tensor) -> Tensor:
        """Return the logits of the interaction, [B]."""
        pairs_B: Tensor = self.pairs(vectors_BFD)
        return pairs_B
