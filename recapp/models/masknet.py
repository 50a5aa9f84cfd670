"""MaskNet: "MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by
Instance-Guided Mask", arXiv 2102.07619.

    serial     LN(fields) -- block 1 -- block 2 -- ... -- block N --------- linear -- logits_B
    parallel   LN(fields) -- blocks 1 to N, side by side -- hidden layers -- linear -- logits_B

Every block multiplies its input with a mask, which is a function of the fields as they were looked
up. In the serial form a block masks the output of the block before; in the parallel form all blocks
mask the normalised fields.

Of the runs in reczoo/BARS, those on Criteo_x4 and Avazu_x4 have neither normalisation, and those on
Criteo_x1, Frappe_x1 and MovielensLatest_x1 do not normalise the fields: their model is not the
paper's. The run on Avazu_x1 has both (serial, three blocks of 400 columns, ratio 2, dropout .4).

Shapes: B batch, F fields, D columns of a field, K columns of all fields, W columns of a hidden
vector, V columns of a block's output.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recapp.models.fields import FieldVectors
from recapp.models.layers import MLP, FastDropout, xavier_linear
from recapp.models.model_checks import check_hidden, check_settings, check_widths
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


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


class MaskNet(nn.Module):
    """Click logits from masked layers.

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
        logits_B1: Tensor = self.top(hidden_BW)
        return logits_B1.squeeze(1)
