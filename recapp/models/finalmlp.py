"""FinalMLP: "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction", arXiv 2304.00902.

    fields -- x gate 1 -- MLP 1 -- x_BX --+-- logits_B = w1 x + w2 y + sum over heads of x_h W_h y_h
         \\-- x gate 2 -- MLP 2 -- y_BY --+

Two MLPs read the same fields, each through a gate: factors 2 sigmoid(MLP(context)), one for each
column, which start near 1. The context of a gate is columns, which the collections `first_context`
and `second_context` name. A gate has tables of its own, because one table would have to be good for
the gate and for the MLP. The numbers may be part of a context, with vectors of their own. A gate
without a context reads a learnt vector.

Shapes: B batch, I dense features, D columns of a field, K columns of all fields, C columns of a
context, X and Y outputs of the MLPs, H heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recapp.models.fields import FieldVectors
from recapp.models.layers import MLP, learnt_vectors, xavier, xavier_linear
from recapp.models.model_checks import check_divides, check_hidden, check_settings
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


class ContextGate(nn.Module):
    """The context-aware feature selection of FinalMLP (arXiv 2304.00902, equations 4 and 5).

    An MLP of the context computes a factor for each column: [B, C] -> [B, K]. Factors are 2
    sigmoid(x), so that they start near 1.

    Args:
        context: The columns of the context, C.
        columns: The columns that get a factor, K.
        layers: The widths of the hidden layers.
        setting: The name of `layers` in the configuration, for messages.

    Raises:
        ConfigError: A width is not allowed.
    """

    def __init__(
        self, context: int, columns: int, layers: Sequence[int], setting: str = "layers"
    ) -> None:
        super().__init__()
        self.score = MLP(context, [*layers, columns], last_relu=False, setting=setting)

    def forward(self, context_BC: Tensor) -> Tensor:
        """Return the factors, [B, K]."""
        return 2 * torch.sigmoid(self.score(context_BC))


class GateContext(nn.Module):
    """The input of a gate: numbers times vectors of their own, and vectors of own tables, [B, C].

    Args:
        tables: The tables of the context, or None.
        numbers: The number of dense features that are part of the context.
        dim: The columns of the vector of a number, and of the learnt vector without a context.
    """

    def __init__(self, tables: BagCollection | None, numbers: int, dim: int) -> None:
        super().__init__()
        self.tables = tables
        self.number_vectors_ID = learnt_vectors(numbers, dim) if numbers else None
        self.constant_1D = None
        if not numbers and tables is None:
            self.constant_1D = learnt_vectors(1, dim)
        learnt = numbers if numbers or tables is not None else 1
        looked_up = 0 if tables is None else sum(x.columns for x in tables.lookups)
        self.columns = learnt * dim + looked_up

    def forward(self, batch: Batch) -> Tensor:
        """Return the context, [B, C], or [1, C] if it is the same for all samples."""
        if self.constant_1D is not None:
            return self.constant_1D
        parts = []
        if self.number_vectors_ID is not None:
            parts.append((batch.dense_BI.unsqueeze(2) * self.number_vectors_ID).flatten(1))
        if self.tables is not None:
            # Tables may have another dtype than the gate.
            parts.append(self.tables(batch.sparse).values().to(batch.dense_BI.dtype))
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


class HeadFusion(nn.Module):
    """The fusion of two vectors, w1 x + w2 y + b + sum over heads of x_h W_h y_h: -> [B].

    Args:
        first: The columns of x, X.
        second: The columns of y, Y.
        heads: The number of heads, a divisor of both.

    Raises:
        ConfigError: The heads do not divide the columns.
    """

    def __init__(self, first: int, second: int, heads: int) -> None:
        super().__init__()
        check_divides("model.heads", heads, "model.first_layers[-1]", first)
        check_divides("model.heads", heads, "model.second_layers[-1]", second)
        self.linear = xavier_linear(first + second, 1)
        shape = (heads, first // heads, second // heads)
        self.weight_HXY = nn.Parameter(torch.empty(shape))
        xavier(self.weight_HXY, self.weight_HXY.numel(), 1)

    def forward(self, first_BX: Tensor, second_BY: Tensor) -> Tensor:
        """Return the logits, [B]."""
        heads, columns, others = self.weight_HXY.shape
        first_HBX = first_BX.reshape(-1, heads, columns).transpose(0, 1)
        second_BHY = second_BY.reshape(-1, heads, others)
        products_BHY = torch.bmm(first_HBX, self.weight_HXY).transpose(0, 1) * second_BHY
        linear_B1: Tensor = self.linear(torch.cat([first_BX, second_BY], 1))
        products_B: Tensor = products_BHY.sum((1, 2))
        return linear_B1.squeeze(1) + products_B


class FinalMLP(nn.Module):
    """Click logits from two gated MLPs and the products of their outputs.

    Args:
        embedding_bag_collection: The tables, all of one dim.
        dense_in_features: The number of dense features.
        first_context: Own tables of the columns that the first gate reads.
        second_context: Own tables of the columns that the second gate reads.
        first_numbers: Whether the first gate reads the numbers.
        second_numbers: Whether the second gate reads the numbers.
        first_layers: The widths of the first MLP.
        second_layers: The widths of the second MLP.
        heads: The number of heads of the fusion, a divisor of the last widths of both MLPs.
        gate_layers: The hidden widths of the MLP of a gate.
        first_dropout: The share of the columns of the first MLP that dropout sets to zero.
        second_dropout: The same for the second MLP.
        first_batch_norm: Whether the first MLP normalises its layers over the batch.
        second_batch_norm: Whether the second MLP does.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: The heads do not divide the last width of an MLP, or another setting is not
            allowed.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        first_context: BagCollection | None = None,
        second_context: BagCollection | None = None,
        first_numbers: bool = True,
        second_numbers: bool = False,
        first_layers: Sequence[int] = (400, 400, 400),
        second_layers: Sequence[int] = (1000,),
        heads: int = 200,
        gate_layers: Sequence[int] = (800,),
        first_dropout: float = 0.2,
        second_dropout: float = 0.3,
        first_batch_norm: bool = True,
        second_batch_norm: bool = True,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_settings(first_dropout=first_dropout, second_dropout=second_dropout)
        check_hidden("model.gate_layers", gate_layers)
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, model="FinalMLP", dropout=field_dropout
        )
        columns = self.fields.columns

        def context(tables: BagCollection | None, numbers: bool) -> GateContext:
            return GateContext(tables, dense_in_features if numbers else 0, self.fields.dim)

        def gate(read: GateContext) -> ContextGate:
            return ContextGate(read.columns, columns, gate_layers, setting="model.gate_layers")

        self.first_context = context(first_context, first_numbers)
        self.second_context = context(second_context, second_numbers)
        self.first_gate = gate(self.first_context)
        self.second_gate = gate(self.second_context)
        self.first = MLP(
            columns,
            first_layers,
            setting="model.first_layers",
            batch_norm=first_batch_norm,
            dropout=first_dropout,
        )
        self.second = MLP(
            columns,
            second_layers,
            setting="model.second_layers",
            batch_norm=second_batch_norm,
            dropout=second_dropout,
        )
        self.fusion = HeadFusion(first_layers[-1], second_layers[-1], heads)

    def flops_per_sample(self) -> float:
        """Return the operations per sample beyond two for each weight, with backward.

        The number is negative for gates of a learnt vector, which run once for all samples.
        """
        gates = ((self.first_context, self.first_gate), (self.second_context, self.second_gate))
        once = [gate for context, gate in gates if context.constant_1D is not None]
        return -6.0 * sum(p.numel() for gate in once for p in gate.parameters())

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        flat_BK = self.fields.flat(batch)
        first_BX = self.first(flat_BK * self.first_gate(self.first_context(batch)))
        second_BY = self.second(flat_BK * self.second_gate(self.second_context(batch)))
        logits_B: Tensor = self.fusion(first_BX, second_BY)
        return logits_B
