"""The cross layers of recapp's models: every layer multiplies its input with the first input x0, so
that layer l has products of up to l + 1 columns.

| layer          | x' =                                                   | source           |
|----------------|--------------------------------------------------------|------------------|
| `VectorCross`  | x0 (w . x) + b + x                                     | arXiv 1708.05123 |
| `FullCross`    | x0 * (W x + b) + x                                     | arXiv 2008.13535 |
| `LowRankCross` | x0 * (U V x + b) + x                                   | arXiv 2008.13535 |
| `MixtureCross` | x0 * (sum of G_e(x) U_e tanh(C_e tanh(V_e x)) + b) + x | arXiv 2008.13535 |
| `GatedCross`   | x0 * (W x + b) * sigmoid(Wg x) + x                     | arXiv 2311.04635 |

`*` multiplies columns, `.` is the dot product. Weights start as Xavier normal and biases at zero.

Shapes: B batch, K columns, L layers, E experts, R rank.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recapp.models.layers import xavier, xavier_linear


def crossed(x: Tensor, factor: Tensor, gate: Tensor) -> Tensor:
    """Return x + factor * gate, of three tensors of one shape."""
    total: Tensor = _Crossed.apply(x, factor, gate)  # type: ignore[no-untyped-call]
    return total


class _Crossed(torch.autograd.Function):
    """Adds a product in one pass, with a backward of two; that of `addcmul` takes four."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(factor, gate)
        ctx.dtype = x.dtype
        return torch.addcmul(x, factor, gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factor, gate = ctx.saved_tensors
        of_factor = (grad * gate).to(factor.dtype)
        return grad.to(ctx.dtype), of_factor, (grad * factor).to(gate.dtype)


class VectorCross(nn.Module):
    """The cross layer of DCN, arXiv 1708.05123: x' = x0 (w . x) + b + x.

    Args:
        columns: The columns of x, K.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, columns))
        self.bias = nn.Parameter(torch.zeros(columns))
        xavier(self.weight, columns, 1)

    def forward(self, first_BK: Tensor, x_BK: Tensor) -> Tensor:
        """Return x', [B, K], from x0 and x."""
        return torch.addcmul(x_BK + self.bias, first_BK, functional.linear(x_BK, self.weight))


class VectorCrosses(nn.Module):
    """The cross network of DCN, arXiv 1708.05123: L layers x' = x0 (w . x) + b + x.

    All layers together take one product of x0 with all w. For layer l, x = a x0 + c, where a is a
    number of the sample and c is the sum of the biases below. Then x' = a' x0 + (c + b) with
    a' = a (1 + w . x0) + w . c.

    Args:
        columns: The columns of x, K.
        layers: The number of layers, L.
    """

    def __init__(self, columns: int, layers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layers, columns))
        self.bias = nn.Parameter(torch.zeros(layers, columns))
        xavier(self.weight, columns, 1)

    def forward(self, first_BK: Tensor) -> Tensor:
        """Return the x of the last layer, [B, K]."""
        dots_BL = functional.linear(first_BK, self.weight)
        below_LK = self.bias.cumsum(0) - self.bias
        offsets_L = (self.weight * below_LK).sum(1)
        scale_B = torch.ones_like(dots_BL[:, 0])
        for dot_B, offset in zip(dots_BL.unbind(1), offsets_L, strict=True):
            scale_B = torch.addcmul(scale_B + offset, scale_B, dot_B)
        return torch.addcmul(self.bias.sum(0), first_BK, scale_B[:, None])

    def extra_repr(self) -> str:
        """Return the numbers of layers and columns as text."""
        return "{} layers, {} columns".format(*self.weight.shape)


class FullCross(nn.Module):
    """The cross layer of DCN-V2, arXiv 2008.13535: x' = x0 * (W x + b) + x.

    Args:
        columns: The columns of x, K.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.map = xavier_linear(columns, columns)

    def forward(self, first_BK: Tensor, x_BK: Tensor) -> Tensor:
        """Return x', [B, K], from x0 and x."""
        return crossed(x_BK, first_BK, self.map(x_BK))


class LowRankCross(nn.Module):
    """The low-rank cross layer of DCN-V2, arXiv 2008.13535: x' = x0 * (U V x + b) + x.

    There is no activation between V and U.

    Args:
        columns: The columns of x, K.
        rank: The columns of V x, R.
    """

    def __init__(self, columns: int, rank: int) -> None:
        super().__init__()
        self.down = xavier_linear(columns, rank, bias=False)
        self.up = xavier_linear(rank, columns)

    def forward(self, first_BK: Tensor, x_BK: Tensor) -> Tensor:
        """Return x', [B, K], from x0 and x."""
        return crossed(x_BK, first_BK, self.up(self.down(x_BK)))


class MixtureCross(nn.Module):
    """The mixture of low-rank experts of DCN-V2, arXiv 2008.13535.

    Expert e computes x0 * (U_e tanh(C_e tanh(V_e x)) + b). The gate of this layer weights the
    experts by a softmax over E, and x is added. The weights have the sum 1, so the bias is added
    once, and one product applies all U.

    Args:
        columns: The columns of x, K.
        rank: The columns of an expert, R.
        experts: The number of experts, E.
    """

    def __init__(self, columns: int, rank: int, experts: int) -> None:
        super().__init__()
        self.gate = xavier_linear(columns, experts, bias=False)
        self.down = xavier_linear(columns, experts * rank, bias=False)
        self.inner = nn.Parameter(torch.zeros(experts, rank, rank))
        self.up = xavier_linear(experts * rank, columns)
        xavier(self.down.weight, columns, rank)
        xavier(self.inner, rank, rank)
        xavier(self.up.weight, rank, columns)

    def forward(self, first_BK: Tensor, x_BK: Tensor) -> Tensor:
        """Return x', [B, K], from x0 and x."""
        share_BE = self.gate(x_BK).softmax(1)
        low_BER = self.down(x_BK).tanh().view(-1, *self.inner.shape[:2])
        inner_EBR = torch.bmm(low_BER.transpose(0, 1), self.inner.mT).tanh()
        mixed_BER = inner_EBR.transpose(0, 1) * share_BE[:, :, None]
        return crossed(x_BK, first_BK, self.up(mixed_BER.flatten(1)))


class GatedCross(nn.Module):
    """The gated cross layer of GDCN, arXiv 2311.04635: x' = x0 * (W x + b) * sigmoid(Wg x) + x.

    Args:
        columns: The columns of x, K.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.map = xavier_linear(columns, columns)
        self.gate = xavier_linear(columns, columns, bias=False)

    def forward(self, first_BK: Tensor, x_BK: Tensor) -> Tensor:
        """Return x', [B, K], from x0 and x."""
        return crossed(x_BK, first_BK, self.map(x_BK) * self.gate(x_BK).sigmoid())


class Crosses(nn.ModuleList):
    """Cross layers, each of which gets x0 and the output of the layer before.

    Args:
        layers: Modules with forward(x0, x).
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__(layers)

    def forward(self, first_BK: Tensor) -> Tensor:
        """Return the x of the last layer, [B, K]."""
        x_BK = first_BK
        for layer in self:
            x_BK = layer(first_BK, x_BK)
        return x_BK
