"""FCN, also called DCNv3: "FCN: Fusing Exponential and Linear Cross Network for Click-Through Rate
Prediction", arXiv 2407.13349.

    fields - x0 -+- L layers  x' = x  * ([h, h * ReLU(LN(h))] + b) + x  - logit_e -+- mean - logit_B
                 +- M layers  x' = x0 * ([h, h * ReLU(LN(h))] + b) + x  - logit_l -+

Each vector is cut into heads, and each head into two halves: x0 has the first halves of all fields
before the second halves. A logit is the mean over the heads. Training adds Tri-BCE: for the loss T
of logit_B and the loss S of each of the two others, max(0, S - T) S.

h = W x has half the columns of x, and its masked copy fills the other half.

Shapes: B batch, F fields, H heads, K columns of a head, L half of them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recapp.errors import ConfigError
from recapp.models.fields import FieldVectors
from recapp.models.layers import BatchNorm, FastDropout, xavier_linear
from recapp.models.model_checks import check_settings
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


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


PARTS = ("exponential", "linear")


class FCN(nn.Module):
    """Click logits of an exponential and a linear cross network, without a tower.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`. All tables have one dim, which
            twice the number of heads divides.
        dense_in_features: The number of dense features of a sample; each multiplies a learnt
            vector.
        exponential_layers: The number of layers of the exponential network.
        linear_layers: The number of layers of the linear network.
        exponential_dropout: The share of each exponential layer's outputs that a training step sets
            to 0.
        linear_dropout: The same for the linear layers.
        heads: The number of heads, H.
        layer_norm: Whether masks are made of layer-normalised columns.
        batch_norm: Whether a batch norm precedes masks.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting or a table's dim is not allowed; the message names it.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        exponential_layers: int = 3,
        linear_layers: int = 4,
        exponential_dropout: float = 0.1,
        linear_dropout: float = 0.2,
        heads: int = 1,
        layer_norm: bool = True,
        batch_norm: bool = False,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        layers = {"exponential": exponential_layers, "linear": linear_layers}
        dropouts = {"exponential": exponential_dropout, "linear": linear_dropout}
        check_settings(
            **{f"{name}_layers": number for name, number in layers.items()},
            **{f"{name}_dropout": share for name, share in dropouts.items()},
            heads=heads,
            layer_norm=layer_norm,
            batch_norm=batch_norm,
        )
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, model="FCN", dropout=field_dropout
        )
        if self.fields.dim % (2 * heads):
            raise ConfigError(
                f"model.heads={heads}: FCN cuts each vector into 2 halves for each head, so "
                f"tables.dim={self.fields.dim} must be a multiple of {2 * heads}"
            )
        self.by_half = (self.fields.count, heads, 2, self.fields.dim // heads // 2)
        columns = self.fields.columns // heads
        make = partial(MaskedCross, columns, heads, layer_norm, batch_norm)
        self.crosses = nn.ModuleDict()
        for name, number in layers.items():
            one = partial(make, dropouts[name])
            self.crosses[name] = MaskedCrosses(one, number, exponential=name == "exponential")
        self.logits = nn.ModuleDict({name: xavier_linear(columns, 1) for name in layers})

    def forward(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Compute logits, [B]; in training, also those of each network, by name."""
        halves_BFHTD = self.fields(batch).view(-1, *self.by_half)
        first_BHK = halves_BFHTD.permute(0, 2, 3, 1, 4).flatten(2)
        parts = {
            name: self.logits[name](crosses(first_BHK))[:, :, 0].mean(1)
            for name, crosses in self.crosses.items()
        }
        logits_B = torch.stack(list(parts.values())).mean(0)
        return {"logit": logits_B, **parts} if self.training else logits_B

    def extra_losses(
        self, outputs: Mapping[str, Tensor], batch: Batch, loss: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Return the two terms that Tri-BCE adds to the loss, by name; gradients reach both
        factors of a term. The factors are means over the batch, so that gradients added up over
        several batches are not those of one large batch.

        Args:
            outputs: What `forward` returned in training.
            batch: The samples.
            loss: The loss of other logits against the labels of the batch.
        """
        whole = loss(outputs["logit"])
        own = {name: loss(outputs[name]) for name in PARTS}
        return {f"{name}_loss": (part - whole).relu() * part for name, part in own.items()}

    def flops_per_sample(self) -> float:
        """Return the operations of the heads after the first, which use the same weights."""
        weights = sum(p.numel() for p in self.crosses.parameters())
        return 6.0 * weights * (self.by_half[1] - 1)
