"""The cross layers of FCN and QNN-alpha, whose factors pass through a ReLU.

| layer            | x' =                                                     | source           |
|------------------|----------------------------------------------------------|------------------|
| exponential, ECN | x * ([h, h * ReLU(LN(h))] + b) + x, with h = W x         | arXiv 2407.13349 |
| linear, LCN      | x0 * ([h, h * ReLU(LN(h))] + b) + x, with h = W x        | arXiv 2407.13349 |
| quadratic        | x * (sum over r of ReLU(W_r x + b_r)) + x                | arXiv 2505.17999 |

h has half the columns of x, and its masked copy fills the other half.

Shapes: B batch, H heads, K columns of x (of a head in FCN), L half of them, R rows of a product,
F fields, D columns of a field.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recapp.models.crosses import crossed
from recapp.models.dropout import FastDropout
from recapp.models.layers import BatchNorm, xavier_linear


class _Masked(torch.autograd.Function):
    """Computes x + factor * ([h, h * mask] + b) in few passes over memory.

    Autograd would copy both halves side by side, and add the gradients of h, and those of x where
    x is the factor, in passes of their own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, factor: Tensor, half: Tensor, mask: Tensor, bias: Tensor
    ) -> Tensor:
        ctx.own = factor is x
        ctx.dtypes = (x.dtype, half.dtype, mask.dtype, bias.dtype)
        gate = torch.cat([half, half * mask], -1) + bias
        ctx.save_for_backward(factor, half, mask, bias, gate)
        return torch.addcmul(x, factor, gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor, half, mask, bias, gate = ctx.saved_tensors
        if torch.is_grad_enabled():
            # the derivatives of this gradient also pass through the gate
            gate = torch.cat([half, half * mask], -1) + bias
        of_gate = grad * factor
        plain, masked = of_gate.chunk(2, -1)
        of_half = torch.addcmul(plain, masked, mask)
        of_mask = masked * half
        of_bias = of_gate.reshape(-1, of_gate.shape[-1]).sum(0)
        of_x = torch.addcmul(grad, grad, gate) if ctx.own else grad
        of_factor = None if ctx.own else (grad * gate).to(factor.dtype)
        others = [
            part.to(dtype)
            for part, dtype in zip((of_x, of_half, of_mask, of_bias), ctx.dtypes, strict=True)
        ]
        return others[0], of_factor, *others[1:]


class MaskedCross(nn.Module):
    """A layer of ECN or LCN, arXiv 2407.13349.

    The form is that of the authors' program (github.com/salmon1802/FCN): the bias of all K columns
    is added behind the mask. All heads share the weights. Biases start at 0; that program draws
    their start values uniformly between 0 and 1.

    Args:
        columns: The columns of a head, K, an even number.
        heads: The number of heads, H, for the batch norm.
        layer_norm: Whether the mask is made of h after a layer norm.
        batch_norm: Whether a batch norm follows h, with one mean and variance for each head.
        dropout: The share of outputs that a training step sets to 0.
    """

    def __init__(
        self,
        columns: int,
        heads: int = 1,
        layer_norm: bool = True,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.map = xavier_linear(columns, columns // 2, bias=False)
        self.bias = nn.Parameter(torch.zeros(columns))
        self.batch_norm = BatchNorm(heads) if batch_norm else nn.Identity()
        self.layer_norm = nn.LayerNorm(columns // 2) if layer_norm else nn.Identity()
        self.dropout = FastDropout(dropout)

    def forward(self, factor_BHK: Tensor, x_BHK: Tensor) -> Tensor:
        """Return x', [B, H, K].

        Args:
            factor_BHK: What multiplies the mask: x0 in LCN, x in ECN.
            x_BHK: The output of the layer before.
        """
        half_BHL = self.batch_norm(self.map(x_BHK))
        total: Tensor = _Masked.apply(  # type: ignore[no-untyped-call]
            x_BHK, factor_BHK, half_BHL, self.layer_norm(half_BHL).relu(), self.bias
        )
        kept: Tensor = self.dropout(total)
        return kept


class MaskedCrosses(nn.ModuleList):
    """ECN or LCN, arXiv 2407.13349.

    Args:
        make: Makes a layer.
        layers: The number of layers.
        exponential: Whether a layer multiplies its own input, so that the order of the products
            doubles with each layer (ECN). Otherwise it multiplies x0, and the order grows by one.
    """

    def __init__(self, make: Callable[[], MaskedCross], layers: int, exponential: bool) -> None:
        super().__init__(make() for _ in range(layers))
        self.exponential = exponential

    def forward(self, first_BHK: Tensor) -> Tensor:
        """Return the x of the last layer, [B, H, K]."""
        x_BHK = first_BHK
        for layer in self:
            x_BHK = layer(x_BHK if self.exponential else first_BHK, x_BHK)
        return x_BHK


class QuadraticCross(nn.Module):
    """A layer of QNN-alpha, arXiv 2505.17999: x' = x * (sum over r of ReLU(W_r x + b_r)) + x.

    The sum over the rows of the Khatri-Rao product of x and ReLU(W x + b). The form, with its two
    dropouts, is that of the authors' program (github.com/salmon1802/QNN, `QNN_T26`). With several
    heads, the factor x has its columns in the order of heads, [head, field, column], while the
    added x has them in the order of fields, as in that program.

    Args:
        fields: The number of fields, F.
        dim: The columns of a field, D.
        rows: The rows of the product, R.
        heads: The number of heads, which divides D.
        batch_norm: Whether a batch norm precedes the ReLU.
        dropout: The share of the rows' and the outputs' entries that a training step sets to 0.
    """

    def __init__(
        self,
        fields: int,
        dim: int,
        rows: int,
        heads: int = 1,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        columns = fields * dim
        self.rows = rows
        self.by_field = (fields, heads, dim // heads)
        self.map = xavier_linear(columns, columns * rows)
        self.batch_norm = BatchNorm(columns * rows) if batch_norm else nn.Identity()
        self.row_dropout = FastDropout(dropout)
        self.dropout = FastDropout(dropout)

    def forward(self, x_BK: Tensor) -> Tensor:
        """Return x', [B, K]."""
        rows_BRK = self.batch_norm(self.map(x_BK)).relu().view(-1, self.rows, x_BK.shape[1])
        summed_BK = self.row_dropout(rows_BRK).sum(1)
        factor_BK = x_BK
        if self.by_field[1] > 1:
            factor_BK = x_BK.view(-1, *self.by_field).transpose(1, 2).flatten(1)
        kept: Tensor = self.dropout(crossed(x_BK, factor_BK, summed_BK))
        return kept
