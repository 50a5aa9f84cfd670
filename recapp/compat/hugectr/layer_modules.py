"""HugeCTR's dense layers as torch modules, except those that torch has itself.

Shapes: B batch, K columns, F vectors or numbers, D columns of a vector, P pairs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from recapp.models.layers import DotInteraction, published_linear


def initialise(values: Tensor, how: str, fan_in: int, fan_out: int) -> None:
    """Draw start values as HugeCTR's `Initializer_t` does; `Default` keeps the values."""
    if values.is_meta:
        return
    both = fan_in + fan_out
    draw: Mapping[str, Callable[[], object]] = {
        "Uniform": lambda: nn.init.uniform_(values, -1 / both, 1 / both),
        "XavierNorm": lambda: nn.init.normal_(values, 0.0, math.sqrt(2 / both)),
        "XavierUniform": lambda: nn.init.uniform_(
            values, -math.sqrt(6 / both), math.sqrt(6 / both)
        ),
        "Zero": lambda: nn.init.zeros_(values),
    }
    if how in draw:
        draw[how]()


def linear(inputs: int, outputs: int, how: str, bias_how: str | None) -> nn.Linear:
    """Return a linear layer.

    Args:
        inputs: The number of columns of its input.
        outputs: The number of columns of its output.
        how: The `Initializer_t` of its weights.
        bias_how: The `Initializer_t` of its bias; None makes a layer without bias.
    """
    made = published_linear(inputs, outputs, bias_how is not None)
    initialise(made.weight, how, inputs, outputs)
    if bias_how is not None:
        initialise(made.bias, bias_how, 0, outputs)
    return made


class Apply(nn.Module):
    """A layer without parameters.

    Args:
        function: The function that computes the outputs of the layer from its inputs.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        """Return the outputs of the function."""
        return self.function(*inputs)


def concatenated(axis: int, *parts: Tensor) -> Tensor:
    """Return the concatenation of tensors along a dimension."""
    return torch.cat(parts, axis)


def combined(function: Callable[[Any, Any], Any], *parts: Tensor) -> Tensor:
    """Return tensors of one shape combined element by element, in order.

    Args:
        function: An operator of two tensors, such as `operator.add`.
        parts: The tensors.
    """
    return reduce(function, parts)


def reshaped(shape: Sequence[int], slots: Sequence[int] | None, values: Tensor) -> Tensor:
    """Return the values of each sample in another shape.

    Args:
        shape: The shape, without the batch.
        slots: The vectors to keep before the reshape; None keeps all.
        values: The values.
    """
    kept = values if slots is None else values[:, list(slots)]
    return kept.reshape(-1, *shape)


def sliced(ranges: Sequence[Sequence[int]], values: Tensor) -> tuple[Tensor, ...]:
    """Return ranges of the last dimension, a tensor for each.

    Args:
        ranges: [first, one past the last] column of each output.
        values: The values.
    """
    return tuple(values[..., first:last] for first, last in ranges)


def fm_order2(columns: int, values_BK: Tensor) -> Tensor:
    """Return the second-order term of a factorisation machine for each of D columns:
    [B, F D] -> [B, D]. It is ((the sum of F vectors)^2 - the sum of their squares) / 2.

    Args:
        columns: The columns of a vector, D.
        values_BK: The F vectors of each sample as one row.
    """
    vectors_BFD = values_BK.reshape(len(values_BK), -1, columns)
    return 0.5 * (vectors_BFD.sum(1).square() - vectors_BFD.square().sum(1))


class Interaction(nn.Module):
    """Concatenates a vector [B, D], the dot products of all pairs of this vector and F vectors
    [B, F, D], and a column of zeros, as HugeCTR does: [B, D + F (F + 1) / 2 + 1].

    Args:
        vectors: The number of vectors, F.
    """

    def __init__(self, vectors: int) -> None:
        super().__init__()
        self.dots = DotInteraction(vectors + 1)

    def forward(self, bottom_BD: Tensor, vectors_BFD: Tensor) -> Tensor:
        """Return the vector, the dot products and a zero for each sample."""
        dots_BP = self.dots(torch.cat([bottom_BD[:, None], vectors_BFD], 1))
        return torch.cat([bottom_BD, dots_BP, bottom_BD.new_zeros(len(bottom_BD), 1)], 1)


class WeightMultiply(nn.Module):
    """Multiplies each of F inputs with its own weight vector: [B, F] -> [B, F D].

    Args:
        numbers: The number of inputs, F.
        columns: The columns of a vector, D.
        how: The `Initializer_t` of the weights.
    """

    def __init__(self, numbers: int, columns: int, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numbers, columns))
        initialise(self.weight, "XavierUniform" if how == "Default" else how, numbers, columns)

    def forward(self, numbers_BF: Tensor) -> Tensor:
        """Return the F products of each sample as one row."""
        return (numbers_BF[:, :, None] * self.weight).flatten(1)


class MultiCross(nn.Module):
    """Cross layers. With a projection a layer is that of DCN v2, x' = x0 (U (V x) + b) + x; without
    one it is that of DCN v1, x' = x0 (w . x) + b + x.

    Args:
        columns: The columns of the input, K.
        count: The number of layers.
        width: The columns of the projection; 0 selects DCN v1.
        how: The `Initializer_t` of weights.
        bias_how: The `Initializer_t` of biases; `Default` is 0.
    """

    def __init__(self, columns: int, count: int, width: int, how: str, bias_how: str) -> None:
        super().__init__()
        self.down = nn.ModuleList(linear(columns, width or 1, how, None) for _ in range(count))
        self.up = nn.ModuleList(
            linear(width, columns, how, None) for _ in range(count if width else 0)
        )
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(columns)) for _ in range(count))
        for bias in self.bias:
            initialise(bias, bias_how, 0, columns)

    def forward(self, first_BK: Tensor) -> Tensor:
        """Return the output of the last cross layer."""
        x_BK = first_BK
        for k, (down, bias) in enumerate(zip(self.down, self.bias, strict=True)):
            small = down(x_BK)
            if len(self.up):
                x_BK = first_BK * (self.up[k](small) + bias) + x_BK
            else:
                x_BK = first_BK * small + bias + x_BK
        return x_BK
