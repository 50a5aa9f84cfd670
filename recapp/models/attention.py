"""Attention: over the fields of a sample, over a behaviour sequence, and of a candidate item over
behaviours.

They know neither ranks nor tables. AutoInt, BST and DIN take their parts from here.

Shapes: B samples, F fields, D columns of a field, W columns of a layer's output, H heads, E columns
of a head (W / H), T steps of a sequence, L behaviours of all samples, K columns of a pair.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from recapp.models.layers import MLP, FastDropout, xavier_linear
from recapp.models.model_checks import check_divides


def _heads(vectors_BFW: Tensor, heads: int) -> Tensor:
    """Return the columns of each head, [B, H, F, E]."""
    samples, fields, width = vectors_BFW.shape
    return vectors_BFW.view(samples, fields, heads, width // heads).transpose(1, 2)


def _joined(mixed_BHFE: Tensor) -> Tensor:
    """Return all heads side by side, [B, F, W]."""
    return mixed_BHFE.transpose(1, 2).flatten(2)


class FieldAttention(nn.Module):
    """The interacting layer of AutoInt (arXiv 1810.11921, equations 5 to 8).

    Each field attends to all fields, in H heads whose scores are plain inner products, without a
    factor. The result is ReLU(heads side by side + W_res x): [B, F, D] -> [B, F, W].

    Args:
        dim: The columns of a field, D.
        width: The columns of an output field over all heads, W.
        heads: The number of heads, a divisor of the width.

    Raises:
        ConfigError: The heads do not divide the width.
    """

    def __init__(self, dim: int, width: int, heads: int) -> None:
        super().__init__()
        check_divides("model.heads", heads, "model.width", width)
        self.heads = heads
        self.query = xavier_linear(dim, width, bias=False)
        self.key = xavier_linear(dim, width, bias=False)
        self.value = xavier_linear(dim, width, bias=False)
        self.residual = xavier_linear(dim, width, bias=False)

    def forward(self, fields_BFD: Tensor) -> Tensor:
        """Return the fields after attention, [B, F, W]."""
        parts = (layer(fields_BFD) for layer in (self.query, self.key, self.value))
        query, key, value = (_heads(part_BFW, self.heads) for part_BFW in parts)
        mixed_BHFE = functional.scaled_dot_product_attention(query, key, value, scale=1.0)
        return torch.relu(_joined(mixed_BHFE) + self.residual(fields_BFD))


class TransformerLayer(nn.Module):
    """A layer of the encoder over behaviours in BST (arXiv 1905.06874, equations 2 to 7).

    S = LN(x + dropout(heads side by side W^H)); output = LN(S + dropout(FFN(S))), where the FFN has
    one hidden layer with a leaky ReLU. Scores are divided by the root of a head's columns.

    Args:
        width: The columns of a step, W.
        heads: The number of heads, a divisor of the width.
        feed_forward: The columns of the hidden layer.
        dropout: The share of the columns that dropout sets to zero.

    Raises:
        ConfigError: The heads do not divide the width.
    """

    def __init__(self, width: int, heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        check_divides("model.heads", heads, "width", width)
        self.heads = heads
        self.query = xavier_linear(width, width, bias=False)
        self.key = xavier_linear(width, width, bias=False)
        self.value = xavier_linear(width, width, bias=False)
        self.output = xavier_linear(width, width, bias=False)
        self.first_norm = nn.LayerNorm(width)
        self.hidden = xavier_linear(width, feed_forward)
        self.back = xavier_linear(feed_forward, width)
        self.second_norm = nn.LayerNorm(width)
        self.dropout = FastDropout(dropout)

    def forward(self, steps_BTW: Tensor, there_BT: Tensor) -> Tensor:
        """Return the steps after the layer, [B, T, W].

        Args:
            steps_BTW: The steps, padding included.
            there_BT: Whether a step exists; no step attends to padding. A sample has at least one.
        """
        parts = (layer(steps_BTW) for layer in (self.query, self.key, self.value))
        query, key, value = (_heads(part_BTW, self.heads) for part_BTW in parts)
        mixed_BHTE = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=there_BT[:, None, None, :]
        )
        attended_BTW = self.output(_joined(mixed_BHTE))
        first_BTW = self.first_norm(steps_BTW + self.dropout(attended_BTW))
        hidden_BTF = functional.leaky_relu(self.hidden(first_BTW))
        forwarded_BTW: Tensor = self.dropout(self.back(hidden_BTF))
        second_BTW: Tensor = self.second_norm(first_BTW + forwarded_BTW)
        return second_BTW


class TargetAttention(nn.Module):
    """The local activation unit of DIN (arXiv 1706.06978, section 4.3, figure 2).

    A small MLP scores each pair of the candidate item a and a behaviour v from [a, v, a - v, a * v]
    (the authors' code has the difference, too: github.com/zhougr1993/DeepInterestNetwork). A score
    is a weight as it is: no softmax, so that a sum over many matching behaviours is large.

    Args:
        dim: The columns of the candidate and of a behaviour, D.
        layers: The widths of the hidden layers.
        activation: The activation of the hidden layers.
        setting: The name of `layers` in the configuration, for messages.

    Raises:
        ConfigError: A width or the activation is not allowed.
    """

    def __init__(
        self, dim: int, layers: Sequence[int], activation: str, setting: str = "layers"
    ) -> None:
        super().__init__()
        self.unit = MLP(
            4 * dim, [*layers, 1], last_relu=False, setting=setting, activation=activation
        )

    def forward(self, target_LD: Tensor, behaviour_LD: Tensor) -> Tensor:
        """Return the weight of each behaviour, [L].

        Args:
            target_LD: The candidate of the sample of each behaviour.
            behaviour_LD: The behaviours.
        """
        pair_LK = torch.cat(
            [target_LD, behaviour_LD, target_LD - behaviour_LD, target_LD * behaviour_LD], 1
        )
        weight_L1: Tensor = self.unit(pair_LK)
        return weight_L1.squeeze(1)
