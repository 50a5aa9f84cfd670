"""A cross network and a tower of linear layers, side by side or one after the other.

    parallel:   x0 -+- crosses -+- logit
                    +- tower  --+

    stacked:    x0 --- crosses --- tower --- logit

Shapes: B batch, K columns.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from recapp.models.fields import FieldVectors, Numbers
from recapp.models.layers import MLP, xavier
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


class JointLogit(nn.Module):
    """The logit of several parts side by side, [B, K1], [B, K2], ... -> [B].

    The parts are not copied into one tensor: each has its own columns of the weight.

    Args:
        widths: The columns of each part.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.widths = list(widths)
        self.weight = nn.Parameter(torch.zeros(1, sum(widths)))
        self.bias = nn.Parameter(torch.zeros(1))
        xavier(self.weight, sum(widths), 1)

    def forward(self, *parts_BK: Tensor) -> Tensor:
        """Return the logits, [B]."""
        first, *others = zip(parts_BK, torch.split(self.weight, self.widths, 1), strict=True)
        logits_B1 = functional.linear(*first, self.bias)
        for part_BK, weight_1K in others:
            logits_B1 = logits_B1 + functional.linear(part_BK, weight_1K)
        return logits_B1[:, 0]

    def extra_repr(self) -> str:
        """Return the widths of the parts as text."""
        return f"parts of {', '.join(map(str, self.widths))}"


class DeepAndCross(nn.Module):
    """The logit of a cross network and a tower, [B, K] -> [B].

    Args:
        columns: The columns of x0, K.
        crosses: The cross network, [B, K] -> [B, K].
        layers: The widths of the tower; without any there is only the cross network.
        structure: `parallel` joins the outputs of both in the logit. `stacked` gives the tower the
            output of the cross network.
        batch_norm: Whether a batch norm precedes each ReLU of the tower.
        dropout: The share of the tower's outputs that a training step sets to 0.
    """

    def __init__(
        self,
        columns: int,
        crosses: nn.Module,
        layers: Sequence[int],
        structure: str = "parallel",
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.crosses = crosses
        self.tower = None
        if layers:
            self.tower = MLP(
                columns, layers, setting="model.layers", batch_norm=batch_norm, dropout=dropout
            )
        self.stacked = structure == "stacked"
        widths = [columns, *layers[-1:]]
        self.logit = JointLogit(*(widths[-1:] if self.stacked else widths))

    def forward(self, first_BK: Tensor) -> Tensor:
        """Return the logits, [B]."""
        crossed_BK = self.crosses(first_BK)
        if self.tower is None:
            parts = [crossed_BK]
        elif self.stacked:
            parts = [self.tower(crossed_BK)]
        else:
            parts = [crossed_BK, self.tower(first_BK)]
        logits_B: Tensor = self.logit(*parts)
        return logits_B


class DeepAndCrossModel(nn.Module):
    """Click logits of a cross network and a tower over all inputs: the base of DCN, DCN-V2 and
    GDCN, which differ in the layers of the cross network.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`; tables may have any dims.
        dense_in_features: The number of dense features of a sample.
        make_crosses: Makes the cross network for a number of columns.
        layers: The widths of the tower; without any there is only the cross network.
        numbers: The form of numbers (`recapp/models/fields.py`).
        structure: `parallel` or `stacked`.
        batch_norm: Whether a batch norm precedes each ReLU of the tower.
        dropout: The share of the tower's outputs that a training step sets to 0.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        make_crosses: Callable[[int], nn.Module],
        layers: Sequence[int],
        *,
        numbers: Numbers,
        structure: str = "parallel",
        batch_norm: bool,
        dropout: float,
        field_dropout: float,
    ) -> None:
        super().__init__()
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, numbers=numbers, dropout=field_dropout
        )
        columns = self.fields.columns
        crosses = make_crosses(columns)
        self.logit = DeepAndCross(columns, crosses, layers, structure, batch_norm, dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        logits_B: Tensor = self.logit(self.fields.flat(batch))
        return logits_B
