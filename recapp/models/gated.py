"""FinalNet: "FINAL: Factorized Interaction Layer for CTR Prediction", SIGIR 2023, doi
10.1145/3539618.3591988.

    fields -- [gates] -- layers of block 1 -- linear -- a_B --+
         \\------------- layers of block 2 -- linear -- b_B --+-- (a_B + b_B) / 2 = logits_B

A factorised interaction layer multiplies two linear maps of its input, h1 and h2, column by column.
The output is h2 beside the product ("concat") or h2 plus the product ("sum"). A stack of n layers
has products of up to 2^n columns.

With two blocks, each block is also trained towards the mean prediction of the two blocks: the loss
is BCE(mean) + BCE(a, p) + BCE(b, p), where p is the probability of the mean without its gradient.
FuxiCTR 2.0.2 to 2.3.3 never added these terms (reczoo/FuxiCTR, issue 122), so numbers from there
are of another model.

Shapes: B batch, F fields, D columns of a field, K input columns of a layer, W output columns.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recapp.errors import ConfigError
from recapp.models.layers import (
    ACTIVATIONS,
    MLP,
    BatchNorm,
    FastDropout,
    FieldVectors,
    Layer,
    check_divides,
    check_hidden,
    check_settings,
    check_tower,
    check_widths,
    learnt_vectors,
    xavier,
    xavier_linear,
)
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tables.collections import BagCollection


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


class FactorisedLayer(nn.Module):
    """A factorised interaction layer: [B, K] -> [B, W].

    h2 and h1 are linear maps of the input. The output is h2 + h1 * h2 ("sum"), or h2 and h1 * h2
    side by side, each with half of the columns ("concat").

    Args:
        columns: The columns of the input, K.
        width: The columns of the output, W.
        residual: "sum" or "concat".
    """

    def __init__(self, columns: int, width: int, residual: str) -> None:
        super().__init__()
        self.concat = residual == "concat"
        self.both = xavier_linear(columns, width if self.concat else 2 * width)

    def forward(self, input_BK: Tensor) -> Tensor:
        """Return the linear map and the products, [B, W]."""
        second, first = self.both(input_BK).chunk(2, 1)
        product = first * second
        return torch.cat([second, product], 1) if self.concat else second + product


class FinalNet(nn.Module):
    """Click logits from one or two blocks of factorised interaction layers.

    Args:
        embedding_bag_collection: The tables, all of one dim.
        dense_in_features: The number of dense features.
        first_layers: The widths of the first block.
        second_layers: The widths of the second block; empty: there is no second block.
        residual: The kind of residual of a layer, "sum" or "concat".
        gate: Whether the first block reads gated fields, too.
        activation: The activation behind each layer and its normalisation; "none" is allowed.
        batch_norm: Whether each layer's output is normalised over the batch.
        first_dropout: The share of the columns that dropout sets to zero behind each layer of the
            first block.
        second_dropout: The same for the second block.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed, such as an odd width under `residual=concat`.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        first_layers: Sequence[int] = (400, 400),
        second_layers: Sequence[int] = (400, 400),
        residual: str = "concat",
        gate: bool = False,
        activation: str = "relu",
        batch_norm: bool = True,
        first_dropout: float = 0.1,
        second_dropout: float = 0.0,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_settings(
            residual=residual, first_dropout=first_dropout, second_dropout=second_dropout
        )
        check_tower("model.first_layers", first_layers, activation, batch_norm=batch_norm)
        check_hidden("model.second_layers", second_layers)
        for setting, layers in (("first_layers", first_layers), ("second_layers", second_layers)):
            odd = [width for width in layers if width % 2]
            if odd and residual == "concat":
                raise ConfigError(
                    f"model.{setting}={list(layers)}: {odd[0]} is odd, and model.residual=concat "
                    "makes the two halves of a layer's columns: use even widths, or "
                    "model.residual=sum"
                )
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, model="FinalNet", dropout=field_dropout
        )
        columns = self.fields.columns
        self.gate = FieldGate(self.fields.count) if gate else None

        def block(inputs: int, layers: Sequence[int], dropout: float) -> nn.Sequential:
            modules: list[nn.Module] = []
            for width_in, width_out in pairwise([inputs, *layers]):
                modules.append(FactorisedLayer(width_in, width_out, residual))
                modules += [BatchNorm(width_out)] if batch_norm else []
                modules.append(ACTIVATIONS[activation](width_out))
                modules += [FastDropout(dropout)] if dropout else []
            return nn.Sequential(*modules, xavier_linear(layers[-1], 1))

        self.first = block(2 * columns if gate else columns, first_layers, first_dropout)
        self.second = None
        if second_layers:
            self.second = block(columns, second_layers, second_dropout)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Compute logits and the logits of each block, [B] each."""
        fields_BFD = self.fields(batch)
        gated_BFD = fields_BFD if self.gate is None else self.gate(fields_BFD)
        first_B = self.first(gated_BFD.flatten(1)).squeeze(1)
        if self.second is None:
            return {"logit": first_B}
        second_B = self.second(fields_BFD.flatten(1)).squeeze(1)
        return {"logit": (first_B + second_B) / 2, "first": first_B, "second": second_B}

    def extra_losses(
        self,
        outputs: Mapping[str, Tensor],
        batch: Batch,
        loss: Callable[..., Tensor],
    ) -> dict[str, Tensor]:
        """Return the cross entropy of each block's logits with the probability of their mean, whose
        gradient stays out; none with one block.

        Args:
            outputs: The result of `forward`.
            batch: The batch. Sample weights multiply the entropies.
            loss: Not used: these losses know no label.
        """
        if "second" not in outputs:
            return {}
        branches = {f"{name}_block": outputs[name] for name in ("first", "second")}
        return losses_of_mean(outputs["logit"], branches, batch)


def losses_of_mean(
    mean_logit_B: Tensor, branches: Mapping[str, Tensor], batch: Batch
) -> dict[str, Tensor]:
    """Return the mean cross entropy of each branch with the mean prediction, by name. FinalNet and
    QNN-alpha add it to the loss of the labels.

    Args:
        mean_logit_B: The logit of the mean prediction; no gradient reaches it.
        branches: The logits of each branch by name, each [B].
        batch: The samples, whose first weights multiply the entropies.
    """
    mean_B = mean_logit_B.detach().sigmoid()
    weights_B = next(iter(batch.weights.values()), None)
    return {
        name: binary_cross_entropy_with_logits(logits_B, mean_B, weights_B, reduction="sum")
        / max(batch.rows, 1)
        for name, logits_B in branches.items()
    }


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


class HeadFusion(Layer):
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
        linear_B1 = self.linear(torch.cat([first_BX, second_BY], 1))
        return linear_B1.squeeze(1) + products_BHY.sum((1, 2))


class FinalMLP(nn.Module):
    """Click logits from two gated MLPs and the products of their outputs.

    "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction", arXiv 2304.00902.

        fields -- x gate 1 -- MLP 1 -- x_BX --+-- logits_B = w1 x + w2 y + sum of x_h W_h y_h
             \\-- x gate 2 -- MLP 2 -- y_BY --+

    Two MLPs read the same fields, each through a gate: factors 2 sigmoid(MLP(context)), one for
    each column, which start near 1. The context of a gate is columns, which the collections
    `first_context` and `second_context` name. A gate has tables of its own, because one table would
    have to be good for the gate and for the MLP. The numbers may be part of a context, with vectors
    of their own. A gate without a context reads a learnt vector.

    Shapes: B batch, I dense features, D columns of a field, K columns of all fields, C columns of a
    context, X and Y outputs of the MLPs, H heads.

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

        def gate(gate_input: GateContext) -> ContextGate:
            return ContextGate(
                gate_input.columns, columns, gate_layers, setting="model.gate_layers"
            )

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
        # gates of a learnt vector run once for all samples
        gates = ((self.first_context, self.first_gate), (self.second_context, self.second_gate))
        once = [gate for context, gate in gates if context.constant_1D is not None]
        self.flops_per_sample = -6.0 * sum(p.numel() for gate in once for p in gate.parameters())

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        flat_BK = self.fields.flat(batch)
        first_BX = self.first(flat_BK * self.first_gate(self.first_context(batch)))
        second_BY = self.second(flat_BK * self.second_gate(self.second_context(batch)))
        return self.fusion(first_BX, second_BY)


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
        output_BV = self.layer(mask_BW * hidden_BW)
        normal_BV = output_BV if self.norm is None else self.norm(output_BV)
        return self.dropout(torch.relu(normal_BV))


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


class MaskNet(nn.Module):
    """Click logits from masked layers.

    "MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by
    Instance-Guided Mask", arXiv 2102.07619.

        serial     LN(fields) -- block 1 -- block 2 -- ... -- block N --------- linear -- logits_B
        parallel   LN(fields) -- blocks 1 to N, side by side -- hidden layers -- linear -- logits_B

    Every block multiplies its input with a mask, which is a function of the fields as they were
    looked up. In the serial form a block masks the output of the block before; in the parallel form
    all blocks mask the normalised fields.

    Of the runs in reczoo/BARS, those on Criteo_x4 and Avazu_x4 have neither normalisation, and
    those on Criteo_x1, Frappe_x1 and MovielensLatest_x1 do not normalise the fields: their model is
    not the paper's. The run on Avazu_x1 has both (serial, three blocks of 400 columns, ratio 2,
    dropout .4).

    Shapes: B batch, F fields, D columns of a field, K columns of all fields, W columns of a hidden
    vector, V columns of a block's output.

    Args:
        embedding_bag_collection: The tables, all of one dim.
        dense_in_features: The number of dense features.
        form: The arrangement of the blocks, "serial" or "parallel".
        block_layers: The width of the output of each block.
        ratio: The width of a mask's hidden layer, divided by the width of what it masks.
        layers: The widths of the MLP behind the blocks; the logit follows.
        norm_fields: Whether the fields are normalised before the first mask.
        norm_blocks: Whether the output of a block is normalised.
        dropout: The share of columns that dropout sets to zero, behind each block and in the MLP.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        form: str = "serial",
        block_layers: Sequence[int] = (400, 400, 400),
        ratio: float = 2.0,
        layers: Sequence[int] = (),
        norm_fields: bool = True,
        norm_blocks: bool = True,
        dropout: float = 0.0,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_settings(form=form, ratio=ratio, dropout=dropout)
        check_widths("model.block_layers", block_layers)
        check_hidden("model.layers", layers)
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, model="MaskNet", dropout=field_dropout
        )
        columns = self.fields.columns
        self.serial = form == "serial"
        masked = [columns, *block_layers[:-1]] if self.serial else [columns] * len(block_layers)
        self.field_norm = FieldNorm(self.fields.count, self.fields.dim) if norm_fields else None
        self.blocks = nn.ModuleList(
            MaskBlock(columns, hidden, width, ratio, norm_blocks, dropout)
            for hidden, width in zip(masked, block_layers, strict=True)
        )
        self.top = MLP(
            block_layers[-1] if self.serial else sum(block_layers),
            [*layers, 1],
            last_relu=False,
            setting="model.layers",
            dropout=dropout,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        fields_BFD = self.fields(batch)
        raw_BK = fields_BFD.flatten(1)
        hidden_BW = raw_BK if self.field_norm is None else self.field_norm(fields_BFD).flatten(1)
        if self.serial:
            for block in self.blocks:
                hidden_BW = block(raw_BK, hidden_BW)
        else:
            hidden_BW = torch.cat([block(raw_BK, hidden_BW) for block in self.blocks], 1)
        return self.top(hidden_BW).squeeze(1)
