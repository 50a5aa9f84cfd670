"""DCN-V2: "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to
Rank Systems", arXiv 2008.13535.

    numbers, pooled vectors - x0 -+- L cross layers  x' = x0 * y(x) + x -+- logit_B      (parallel)
                                  +- tower of linear layers -------------+

    numbers, pooled vectors - x0 --- L cross layers --- tower --- logit_B                (stacked)

y(x) is W x + b (`full`), U V x + b (`low_rank`), or a mixture of low-rank experts (`mixture`).

Shapes: B batch, K columns of all numbers and vectors.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from recapp.models.crosses import Crosses, DeepAndCrossModel, FullCross, LowRankCross, MixtureCross
from recapp.models.fields import Numbers
from recapp.models.model_checks import check_settings
from recapp.tables.collections import BagCollection


class DCNv2(DeepAndCrossModel):
    """Click logits of a cross network with matrices, beside or below a tower.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`; tables may have any dims.
        dense_in_features: The number of dense features of a sample.
        cross: `full`, `low_rank`, or `mixture`, which the paper calls DCN-Mix.
        cross_layers: The number of cross layers.
        rank: The columns of V x; `full` does not use it.
        experts: The number of experts; only `mixture` uses it.
        structure: `parallel` or `stacked`.
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
        cross: str = "full",
        cross_layers: int = 3,
        rank: int = 32,
        experts: int = 4,
        structure: str = "parallel",
        layers: Sequence[int] = (500, 500, 500),
        batch_norm: bool = False,
        dropout: float = 0.0,
        numbers: Numbers = "concat",
        field_dropout: float = 0.0,
    ) -> None:
        check_settings(cross=cross, cross_layers=cross_layers, rank=rank, experts=experts)
        make: dict[str, Callable[[int], nn.Module]] = {
            "full": FullCross,
            "low_rank": partial(LowRankCross, rank=rank),
            "mixture": partial(MixtureCross, rank=rank, experts=experts),
        }
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            lambda columns: Crosses(make[cross](columns) for _ in range(cross_layers)),
            layers,
            numbers=numbers,
            structure=structure,
            batch_norm=batch_norm,
            dropout=dropout,
            field_dropout=field_dropout,
        )
