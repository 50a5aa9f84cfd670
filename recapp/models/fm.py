"""FM as published: "Factorization Machines", Rendle, ICDM 2010, equation 1.

    logit = w_0 + sum over i of w_i x_i + sum over i < j of <v_i, v_j> x_i x_j

An id has the value 1, a number its own, and each has a weight and a vector. With `normalise`, the
sum over pairs is divided by F. This is the rule of libffm and of the paper of FFM (Juan et al.,
RecSys 2016) for a sample with one id in each field: they divide by the sum of the squared values.
At first all F vectors move in one direction, so without `normalise` they need a rate that is
several times lower.

Shapes: B batch, F fields, D columns of a vector.
"""

from torch import Tensor

from recapp.models.factorisation import FactorisationModel, fm_term, scale_of_pairs
from recapp.tables.collections import BagCollection


class FM(FactorisationModel):
    """Click logits of a linear part and the dot products of all pairs of vectors.

    Args:
        embedding_bag_collection: The vectors of ids; all tables have one dim.
        wide: The weights of ids: tables of dim 1 that start at 0.
        dense_in_features: The number of dense features of a sample.
        normalise: Whether the sum over pairs is divided by the number of fields.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: The tables have several dims.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        wide: BagCollection,
        dense_in_features: int,
        normalise: bool = True,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__(embedding_bag_collection, wide, dense_in_features, field_dropout)
        self.scale = scale_of_pairs(self.vectors.count, normalise)

    def interaction(self, vectors_BFD: Tensor) -> Tensor:
        """Return the logits of the interaction, [B]."""
        return self.scale * fm_term(vectors_BFD)
