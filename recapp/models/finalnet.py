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
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recapp.errors import ConfigError
from recapp.models.fields import FieldVectors
from recapp.models.layers import ACTIVATIONS, BatchNorm, FastDropout, xavier_linear
from recapp.models.model_checks import check_hidden, check_settings, check_tower
from recapp.sparse.batch import Batch
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


if TYPE_CHECKING:
    from recapp.sparse.batch import Batch


def losses_of_mean(
    mean_logit_B: Tensor, branches: Mapping[str, Tensor], batch: "Batch"
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
