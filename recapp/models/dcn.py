"""DCN: "Deep & Cross Network for Ad Click Predictions", arXiv 1708.05123.

    numbers, pooled vectors - x0 -+- L cross layers  x' = x0 (w . x) + b + x -+- logit_B
                                  +- tower of linear layers -----------------+

Shapes: B batch, K columns of all numbers and vectors.
"""

from collections.abc import Sequence

from recapp.models.crosses import DeepAndCrossModel, VectorCrosses
from recapp.models.fields import Numbers
from recapp.models.model_checks import check_settings
from recapp.tables.collections import BagCollection


class DCN(DeepAndCrossModel):
    """Click logits of a cross network beside a tower.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`; tables may have any dims.
        dense_in_features: The number of dense features of a sample.
        cross_layers: The number of cross layers; the paper found 6 best on Criteo.
        layers: The widths of the tower; without any there is only the cross network.
        batch_norm: Whether a batch norm precedes each ReLU of the tower.
        dropout: The share of the tower's outputs that a training step sets to 0.
        numbers: `concat` puts the numbers themselves before the vectors; `vectors` multiplies each
            with a learnt vector.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed; the message names it.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        cross_layers: int = 6,
        layers: Sequence[int] = (1024, 1024),
        batch_norm: bool = True,
        dropout: float = 0.0,
        numbers: Numbers = "concat",
        field_dropout: float = 0.0,
    ) -> None:
        check_settings(cross_layers=cross_layers)
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            lambda columns: VectorCrosses(columns, cross_layers),
            layers,
            numbers=numbers,
            batch_norm=batch_norm,
            dropout=dropout,
            field_dropout=field_dropout,
        )
