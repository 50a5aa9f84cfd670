"""Factors that a sample computes for its own vectors: FinalNet's gates of fields, FinalMLP's gates
of columns, MaskNet's masks and the blocks around them.

They know neither ranks nor tables.

Shapes: B samples, F fields, D columns of a field, K columns of all fields, C columns of a context,
W columns of a hidden vector, V columns of a block's output.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recapp.models.dropout import FastDropout
from recapp.models.layers import MLP, xavier_linear


class FieldGate(nn.Module):
    """The feature gating of FinalNet (SIGIR 2023, doi 10.1145/3539618.3591988).

    For each column d, a linear layer over the F values x[:, d] gives the F gates of that column.
    The result has the fields, and then the fields times their gates: [B, F, D] -> [B, 2 F, D].
    Weights start at 0 and biases at 1, so that all gates start at 1, as in the authors' code
    (reczoo/FuxiCTR).

    Args:
        fields: The number of fields, F.
    """

    def __init__(self, fields: int) -> None:
        super().__init__()
        self.gate = nn.Linear(fields, fields)
        if not self.gate.weight.is_meta:
            nn.init.zeros_(self.gate.weight)
            nn.init.ones_(self.gate.bias)

    def forward(self, fields_BFD: Tensor) -> Tensor:
        """Return the fields, and the fields times their gates, [B, 2 F, D]."""
        gates_BFD = self.gate(fields_BFD.transpose(1, 2)).transpose(1, 2)
        return torch.cat([fields_BFD, fields_BFD * gates_BFD], 1)


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


class MaskBlock(nn.Module):
    """A mask block of MaskNet (arXiv 2102.07619, equations 4 to 14).

    The mask is a function of the embeddings as they were looked up, before any normalisation: two
    linear layers with a ReLU between them and nothing after the second. The output is
    dropout(ReLU(LN(W (mask * hidden)))), and W has no bias: [B, K] and [B, W] -> [B, V]. The paper
    has no dropout; that of reczoo/FuxiCTR stands in the same place.

    Args:
        columns: The columns of the embeddings, K.
        hidden: The columns of the vector that is masked, W.
        width: The columns of the output, V.
        ratio: The width of the mask's hidden layer, divided by `hidden`.
        norm: Whether the output is normalised before the ReLU.
        dropout: The share of the output's columns that dropout sets to zero.
    """

    def __init__(
        self,
        columns: int,
        hidden: int,
        width: int,
        ratio: float,
        norm: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        aggregated = max(1, round(ratio * hidden))
        self.aggregation = xavier_linear(columns, aggregated)
        self.projection = xavier_linear(aggregated, hidden)
        self.layer = xavier_linear(hidden, width, bias=False)
        self.norm = nn.LayerNorm(width) if norm else None
        self.dropout = FastDropout(dropout)

    def forward(self, embeddings_BK: Tensor, hidden_BW: Tensor) -> Tensor:
        """Return the masked and transformed vector, [B, V].

        Args:
            embeddings_BK: All embeddings of a sample, side by side, not normalised.
            hidden_BW: The vector that is masked.
        """
        mask_BW = self.projection(torch.relu(self.aggregation(embeddings_BK)))
        output_BV: Tensor = self.layer(mask_BW * hidden_BW)
        normal_BV = output_BV if self.norm is None else self.norm(output_BV)
        kept_BV: Tensor = self.dropout(torch.relu(normal_BV))
        return kept_BV


class FieldNorm(nn.Module):
    """Layer normalisation of each field by itself, with gains and biases of its own.

    This is LN_EMB of MaskNet (arXiv 2102.07619, equation 9): [B, F, D] -> [B, F, D].

    Args:
        fields: The number of fields, F.
        dim: The columns of a field, D.
    """

    def __init__(self, fields: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.gain_FD = nn.Parameter(torch.ones(fields, dim))
        self.bias_FD = nn.Parameter(torch.zeros(fields, dim))

    def forward(self, fields_BFD: Tensor) -> Tensor:
        """Return the normalised fields, [B, F, D]."""
        normal_BFD = nn.functional.layer_norm(fields_BFD, [self.dim])
        return normal_BFD * self.gain_FD + self.bias_FD
