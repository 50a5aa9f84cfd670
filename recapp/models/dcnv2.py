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

from torch import Tensor, nn

from recapp.models.cross_checks import check_crosses
from recapp.models.crosses import Crosses, FullCross, LowRankCross, MixtureCross
from recapp.models.deep_and_cross import DeepAndCross
from recapp.models.fields import FieldVectors, Numbers
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


class DCNv2(nn.Module):
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
    ) -> None:
        super().__init__()
        check_crosses(
            {
                "cross": cross,
                "cross_layers": cross_layers,
                "rank": rank,
                "experts": experts,
                "structure": structure,
                "layers": layers,
                "batch_norm": batch_norm,
                "dropout": dropout,
                "numbers": numbers,
            },
            [x.dim for x in embedding_bag_collection.lookups],
        )
        self.fields = FieldVectors(embedding_bag_collection, dense_in_features, numbers=numbers)
        columns = self.fields.columns
        make: dict[str, Callable[[], nn.Module]] = {
            "full": partial(FullCross, columns),
            "low_rank": partial(LowRankCross, columns, rank),
            "mixture": partial(MixtureCross, columns, rank, experts),
        }
        self.logit = DeepAndCross(
            columns,
            Crosses(make[cross]() for _ in range(cross_layers)),
            layers,
            structure=structure,
            batch_norm=batch_norm,
            dropout=dropout,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        logits_B: Tensor = self.logit(self.fields.flat(batch))
        return logits_B
