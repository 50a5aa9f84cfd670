"""Cross networks, and the models made of them: DCN, DCN-V2, GDCN and EDCN. Every layer multiplies
its input with the first input x0, so that layer l has products of up to l + 1 columns.

| layer          | x' =                                                   | source           |
|----------------|--------------------------------------------------------|------------------|
| `VectorCross`  | x0 (w . x) + b + x                                     | arXiv 1708.05123 |
| `FullCross`    | x0 * (W x + b) + x                                     | arXiv 2008.13535 |
| `LowRankCross` | x0 * (U V x + b) + x                                   | arXiv 2008.13535 |
| `MixtureCross` | x0 * (sum of G_e(x) U_e tanh(C_e tanh(V_e x)) + b) + x | arXiv 2008.13535 |
| `GatedCross`   | x0 * (W x + b) * sigmoid(Wg x) + x                     | arXiv 2311.04635 |

`*` multiplies columns, `.` is the dot product. Weights start as Xavier normal and biases at zero.

    parallel:   x0 -+- crosses -+- logit        stacked:    x0 --- crosses --- tower --- logit
                    +- tower  --+

Shapes: B batch, K columns, L layers, E experts, R rank.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recapp.models.layers import (
    MLP,
    BatchNorm,
    FieldVectors,
    Layer,
    Numbers,
    check_hidden,
    check_settings,
    xavier,
    xavier_linear,
)
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tables.collections import BagCollection


def crossed(x: Tensor, factor: Tensor, gate: Tensor) -> Tensor:
    """Return x + factor * gate, of three tensors of one shape."""
    return _Crossed.apply(x, factor, gate)  # type: ignore[no-any-return, no-untyped-call]


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


class JointLogit(Layer):
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


class DeepAndCross(Layer):
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
        return self.logit(*parts)


class DeepAndCrossModel(nn.Module):
    """Click logits of a cross network and a tower over all inputs: the base of DCN, DCN-V2 and
    GDCN, which differ in the layers of the cross network.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`; tables may have any dims.
        dense_in_features: The number of dense features of a sample.
        make_crosses: Makes the cross network for a number of columns.
        layers: The widths of the tower; without any there is only the cross network.
        numbers: The form of numbers (`FieldVectors`).
        structure: `parallel` or `stacked`.
        batch_norm: Whether a batch norm precedes each ReLU of the tower.
        dropout: The share of the tower's outputs that a training step sets to 0.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed; the message names it.
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
        check_settings(structure=structure, batch_norm=batch_norm, dropout=dropout)
        check_hidden("model.layers", layers)
        self.fields = FieldVectors(
            embedding_bag_collection,
            dense_in_features,
            numbers=numbers,
            model="a cross network with model.numbers=vectors",
            dropout=field_dropout,
        )
        columns = self.fields.columns
        crosses = make_crosses(columns)
        self.logit = DeepAndCross(columns, crosses, layers, structure, batch_norm, dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        return self.logit(self.fields.flat(batch))


class DCN(DeepAndCrossModel):
    """Click logits of a cross network beside a tower.

    "Deep & Cross Network for Ad Click Predictions", arXiv 1708.05123.

        numbers, pooled vectors - x0 -+- L cross layers  x' = x0 (w . x) + b + x -+- logit_B
                                      +- tower of linear layers -----------------+

    Shapes: B batch, K columns of all numbers and vectors.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`; tables may have any dims.
        dense_in_features: The number of dense features of a sample.
        cross_layers: The number of cross layers; the paper found 6 best on Criteo.
        layers: The widths of the tower; without any there is only the cross network.
        batch_norm: Whether a batch norm precedes each ReLU of the tower.
        dropout: The share of the tower's outputs that a training step sets to 0.
        numbers: `concat` puts the numbers themselves before the vectors; `vectors` multiplies each
            with a learnt vector.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed; the message names it.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        cross_layers: int = 6,
        layers: Sequence[int] = (1024, 1024),
        batch_norm: bool = True,
        dropout: float = 0.0,
        numbers: Numbers = "concat",
        field_dropout: float = 0.0,
    ) -> None:
        check_settings(cross_layers=cross_layers)
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            lambda columns: VectorCrosses(columns, cross_layers),
            layers,
            numbers=numbers,
            batch_norm=batch_norm,
            dropout=dropout,
            field_dropout=field_dropout,
        )


class DCNv2(DeepAndCrossModel):
    """Click logits of a cross network with matrices, beside or below a tower.

    "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to
    Rank Systems", arXiv 2008.13535.

        numbers, pooled vectors - x0 -+- L cross layers  x' = x0 * y(x) + x -+- logit_B   (parallel)
                                      +- tower of linear layers -------------+

        numbers, pooled vectors - x0 --- L cross layers --- tower --- logit_B             (stacked)

    y(x) is W x + b (`full`), U V x + b (`low_rank`), or a mixture of low-rank experts (`mixture`).

    Shapes: B batch, K columns of all numbers and vectors.

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
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

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
        field_dropout: float = 0.0,
    ) -> None:
        check_settings(cross=cross, cross_layers=cross_layers, rank=rank, experts=experts)
        make: dict[str, Callable[[int], nn.Module]] = {
            "full": FullCross,
            "low_rank": partial(LowRankCross, rank=rank),
            "mixture": partial(MixtureCross, rank=rank, experts=experts),
        }
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            lambda columns: Crosses(make[cross](columns) for _ in range(cross_layers)),
            layers,
            numbers=numbers,
            structure=structure,
            batch_norm=batch_norm,
            dropout=dropout,
            field_dropout=field_dropout,
        )


class GDCN(DeepAndCrossModel):
    """Click logits of a gated cross network, beside or below a tower.

    "Towards Deeper, Lighter and Interpretable Cross Network for CTR Prediction", arXiv
    2311.04635.

        fields - x0 -+- L layers  x' = x0 * (W x + b) * sigmoid(Wg x) + x -+- logit_B     (GDCN-P)
                     +- tower of linear layers ----------------------------+

        fields - x0 --- L layers --- tower --- logit_B                                    (GDCN-S)

    Shapes: B batch, K columns of all fields.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`; tables may have any dims.
        dense_in_features: The number of dense features of a sample.
        cross_layers: The number of gated cross layers.
        structure: `parallel` (GDCN-P) or `stacked` (GDCN-S).
        layers: The widths of the tower; without any there is only the cross network.
        batch_norm: Whether a batch norm precedes each ReLU of the tower.
        dropout: The share of the tower's outputs that a training step sets to 0.
        numbers: `vectors` multiplies each number with a learnt vector; `concat` puts the numbers
            themselves before the vectors.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed; the message names it.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        cross_layers: int = 3,
        structure: str = "parallel",
        layers: Sequence[int] = (400, 400, 400),
        batch_norm: bool = False,
        dropout: float = 0.0,
        numbers: Numbers = "vectors",
        field_dropout: float = 0.0,
    ) -> None:
        check_settings(cross_layers=cross_layers)
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            lambda columns: Crosses(GatedCross(columns) for _ in range(cross_layers)),
            layers,
            numbers=numbers,
            structure=structure,
            batch_norm=batch_norm,
            dropout=dropout,
            field_dropout=field_dropout,
        )


class Bridge(nn.Module):
    """Joins the outputs of two networks, [B, K] and [B, K] -> [B, K].

    Args:
        columns: The columns of each output, K.
        kind: `hadamard_product` and `pointwise_addition` need no weights. `concatenation` maps both
            outputs to K columns, with a ReLU. `attention_pooling` adds both, each multiplied by its
            own softmax over K of U ReLU(W x + b).
    """

    def __init__(self, columns: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "concatenation":
            self.map = MLP(2 * columns, [columns])
        if kind == "attention_pooling":
            self.attention = nn.ModuleList(
                nn.Sequential(
                    xavier_linear(columns, columns),
                    nn.ReLU(inplace=True),
                    xavier_linear(columns, columns, bias=False),
                    nn.Softmax(dim=1),
                )
                for _ in range(2)
            )

    def forward(self, cross_BK: Tensor, deep_BK: Tensor) -> Tensor:
        """Return the joined columns, [B, K]."""
        if self.kind == "hadamard_product":
            return cross_BK * deep_BK
        if self.kind == "pointwise_addition":
            return cross_BK + deep_BK
        if self.kind == "concatenation":
            return self.map(torch.cat([cross_BK, deep_BK], 1))
        of_cross, of_deep = self.attention
        pooled_BK: Tensor = torch.addcmul(of_cross(cross_BK) * cross_BK, of_deep(deep_BK), deep_BK)
        return pooled_BK


class Regulation(nn.Module):
    """Weights fields for two networks: [B, K] -> [B, K] and [B, K].

    Args:
        fields: The number of fields, F.
        dim: The columns of a field, D.
        temperature: Divides the learnt numbers before the softmax over fields.
        batch_norm: Whether a batch norm follows.
    """

    def __init__(self, fields: int, dim: int, temperature: float, batch_norm: bool) -> None:
        super().__init__()
        self.dim = dim
        self.temperature = temperature
        self.weight = nn.Parameter(torch.ones(2, fields))
        self.norms = nn.ModuleList(
            BatchNorm(fields * dim) if batch_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x_BK: Tensor) -> list[Tensor]:
        """Return the inputs of the two networks."""
        share_2F = (self.weight / self.temperature).softmax(1)
        share_2K = share_2F.repeat_interleave(self.dim, 1)
        return [norm(x_BK * share_K) for norm, share_K in zip(self.norms, share_2K, strict=True)]


class EDCN(nn.Module):
    """Click logits of a cross network and a tower that share what they learn after each layer.

    "Enhancing Explicit and Implicit Feature Interactions via Information Sharing for Parallel
    Deep CTR Models", DLP-KDD 2021, https://dlp-kdd.github.io/assets/pdf/DLP-KDD_2021_paper_12.pdf.

        fields - regulation -+- c  cross layer   c' = c0 (w . c) + b + c -+-------- c' --+
                             |                                            +- bridge - s -+- logit_B
                             +- d  linear layer  d' = ReLU(W d + b) ------+-------- d' --+

    There are L such layers; a bridge's s is the input of the next regulation. A regulation weights
    the fields for each of the two networks by its own softmax over the fields.

    Shapes: B batch, F fields, D columns of a field, K columns of all fields.

    Args:
        embedding_bag_collection: A module that is a `BagCollection`. All tables have one dim.
        dense_in_features: The number of dense features of a sample; each multiplies a learnt
            vector.
        cross_layers: The number of layers of both networks.
        bridge: `hadamard_product`, `pointwise_addition`, `concatenation` or `attention_pooling`.
        temperature: Divides the learnt numbers of the regulations before their softmax.
        batch_norm: Whether a batch norm ends each regulation.
        dropout: The share of the tower's outputs that a training step sets to 0.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed; the message names it.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        cross_layers: int = 3,
        bridge: str = "pointwise_addition",
        temperature: float = 1.0,
        batch_norm: bool = True,
        dropout: float = 0.0,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_settings(
            cross_layers=cross_layers,
            bridge=bridge,
            temperature=temperature,
            batch_norm=batch_norm,
            dropout=dropout,
        )
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, model="EDCN", dropout=field_dropout
        )
        fields = self.fields.count
        dim = self.fields.dim
        columns = self.fields.columns
        each = range(cross_layers)
        self.regulations = nn.ModuleList(
            Regulation(fields, dim, temperature, batch_norm) for _ in each
        )
        self.crosses = nn.ModuleList(VectorCross(columns) for _ in each)
        self.tower = nn.ModuleList(MLP(columns, [columns], dropout=dropout) for _ in each)
        self.bridges = nn.ModuleList(Bridge(columns, bridge) for _ in each)
        self.logit = JointLogit(columns, columns, columns)

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        shared_BK = self.fields.flat(batch)
        first_BK = None
        for regulation, cross, layer, bridge in zip(
            self.regulations, self.crosses, self.tower, self.bridges, strict=True
        ):
            cross_BK, deep_BK = regulation(shared_BK)
            first_BK = cross_BK if first_BK is None else first_BK
            cross_BK = cross(first_BK, cross_BK)
            deep_BK = layer(deep_BK)
            shared_BK = bridge(cross_BK, deep_BK)
        return self.logit(cross_BK, deep_BK, shared_BK)
