"""GDCN: "Towards Deeper, Lighter and Interpretable Cross Network for CTR Prediction", arXiv
2311.04635.

    fields - x0 -+- L layers  x' = x0 * (W x + b) * sigmoid(Wg x) + x -+- logit_B     (GDCN-P)
                 +- tower of linear layers ----------------------------+

    fields - x0 --- L layers --- tower --- logit_B                                    (GDCN-S)

Shapes: B batch, K columns of all fields.
"""

from collections.abc import Sequence

from recapp.models.crosses import Crosses, DeepAndCrossModel, GatedCross
from recapp.models.fields import Numbers
from recapp.models.model_checks import check_settings
from recapp.tables.collections import BagCollection


class GDCN(DeepAndCrossModel):
    """Click logits of a gated cross network, beside or below a tower.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`; tables may have any dims.
        dense_in_features: The number of dense features of a sample.
        cross_layers: The number of gated cross layers.
        structure: `parallel` (GDCN-P) or `stacked` (GDCN-S).
        layers: The widths of the tower; without any there is only the cross network.
        batch_norm: Whether a batch norm precedes each ReLU of the tower.
        dropout: The share of the tower's outputs that a training step sets to 0.
        numbers: `vectors` multiplies each number with a learnt vector; `concat` puts the numbers
            themselves before the vectors.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed; the message names it.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        cross_layers: int = 3,
        structure: str = "parallel",
        layers: Sequence[int] = (400, 400, 400),
        batch_norm: bool = False,
        dropout: float = 0.0,
        numbers: Numbers = "vectors",
        field_dropout: float = 0.0,
    ) -> None:
        check_settings(cross_layers=cross_layers)
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            lambda columns: Crosses(GatedCross(columns) for _ in range(cross_layers)),
            layers,
            numbers=numbers,
            structure=structure,
            batch_norm=batch_norm,
            dropout=dropout,
            field_dropout=field_dropout,
        )
