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
from torch.nn import functional

from recapp.errors import ConfigError
from recapp.models.dcn import crossed
from recapp.models.gated import losses_of_mean
from recapp.models.layers import (
    BatchNorm,
    FastDropout,
    FieldVectors,
    check_divides,
    check_settings,
    xavier_linear,
)
from recapp.sparse.keyed_jagged_tensor import Batch
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
        ctx.factor_is_x = factor is x
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
        of_x = torch.addcmul(grad, grad, gate) if ctx.factor_is_x else grad
        of_factor = None if ctx.factor_is_x else (grad * gate).to(factor.dtype)
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
        mask_BHL = self.layer_norm(half_BHL).relu()
        total_BHK = _Masked.apply(  # type: ignore[no-untyped-call]
            x_BHK, factor_BHK, half_BHL, mask_BHL, self.bias
        )
        return self.dropout(total_BHK)


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
        # the heads after the first use the same weights
        weights = sum(p.numel() for p in self.crosses.parameters())
        self.flops_per_sample = 6.0 * weights * (heads - 1)

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
        part_losses = {name: loss(outputs[name]) for name in PARTS}
        return {f"{name}_loss": (part - whole).relu() * part for name, part in part_losses.items()}


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
        return self.dropout(crossed(x_BK, factor_BK, summed_BK))


PASSES = ("first", "second")


class QNNAlpha(nn.Module):
    """Click logits of quadratic layers, without a tower.

    QNN-alpha: "Revisiting Feature Interactions from the Perspective of Quadratic Neural Networks
    for Click-through Rate Prediction", arXiv 2505.17999.

        fields - x0 --- L layers  x' = x * (sum over r of ReLU(W_r x + b_r)) + x --- logit_B

    Training computes the layers twice, each time with other dropouts. The probability is the mean
    of the two, and the self-ensemble loss adds the cross entropy of each of the two with that mean,
    which is a constant there.

    Shapes: B batch, F fields, D columns of a field, K columns of all fields, R rows of a product.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`. All tables have one dim, which
            the number of heads divides.
        dense_in_features: The number of dense features of a sample; each multiplies a learnt
            vector.
        quadratic_layers: The number of layers.
        rows: The rows of each layer's Khatri-Rao product, R.
        heads: The number of heads.
        dropout: The share of rows and outputs that a training step sets to 0. With 0, both passes
            are equal, and training computes one.
        batch_norm: Whether a batch norm precedes each ReLU.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting or a table's dim is not allowed; the message names it.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        quadratic_layers: int = 4,
        rows: int = 5,
        heads: int = 1,
        dropout: float = 0.1,
        batch_norm: bool = False,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_settings(
            quadratic_layers=quadratic_layers, rows=rows, dropout=dropout, batch_norm=batch_norm
        )
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, model="QNN-alpha", dropout=field_dropout
        )
        check_divides("model.heads", heads, "tables.dim", self.fields.dim)
        layer = (self.fields.count, self.fields.dim, rows, heads, batch_norm, dropout)
        self.layers = nn.Sequential(*(QuadraticCross(*layer) for _ in range(quadratic_layers)))
        self.logit = xavier_linear(self.fields.columns, 1)
        self.passes = 2 if dropout else 1
        weights = sum(p.numel() for p in (*self.layers.parameters(), *self.logit.parameters()))
        self.flops_per_sample = 6.0 * weights * (self.passes - 1)

    def forward(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Compute logits, [B]; in training, also those of the two passes, by name."""
        first_BK = self.fields.flat(batch)
        if not self.training:
            return self._pass(first_BK)
        one_B = self._pass(first_BK)
        other_B = self._pass(first_BK) if self.passes > 1 else one_B
        return {"logit": logit_of_mean(one_B, other_B), "first": one_B, "second": other_B}

    def _pass(self, first_BK: Tensor) -> Tensor:
        return self.logit(self.layers(first_BK))[:, 0]

    def extra_losses(
        self, outputs: Mapping[str, Tensor], batch: Batch, loss: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Return the self-ensemble loss of each pass, by name.

        Args:
            outputs: What `forward` returned in training.
            batch: The samples, whose first weights multiply the cross entropies.
            loss: The loss of logits against the labels, which is not used.
        """
        branches = {f"{name}_pass_loss": outputs[name] for name in PASSES}
        return losses_of_mean(outputs["logit"], branches, batch)


def logit_of_mean(first_B: Tensor, second_B: Tensor) -> Tensor:
    """Return the logit of the mean of two probabilities, which are given as logits."""
    log_mean_B = torch.logaddexp(functional.logsigmoid(first_B), functional.logsigmoid(second_B))
    log_rest_B = torch.logaddexp(functional.logsigmoid(-first_B), functional.logsigmoid(-second_B))
    return log_mean_B - log_rest_B
