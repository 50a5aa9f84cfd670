"""FCN, also called DCNv3: "FCN: Fusing Exponential and Linear Cross Network for Click-Through Rate
Prediction", arXiv 2407.13349.

    fields - x0 -+- L layers  x' = x  * ([h, h * ReLU(LN(h))] + b) + x  - logit_e -+- mean - logit_B
                 +- M layers  x' = x0 * ([h, h * ReLU(LN(h))] + b) + x  - logit_l -+

Each vector is cut into heads, and each head into two halves: x0 has the first halves of all fields
before the second halves. A logit is the mean over the heads. Training adds Tri-BCE: for the loss T
of logit_B and the loss S of each of the two others, max(0, S - T) S.

Shapes: B batch, F fields, H heads, K columns of a head.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recapp.models.fields import FieldVectors
from recapp.models.layers import xavier_linear
from recapp.models.masked_crosses import MaskedCross, MaskedCrosses
from recapp.models.model_checks import check_fcn
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection

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
        norms = {"layer_norm": layer_norm, "batch_norm": batch_norm}
        given: dict[str, Any] = {f"{name}_layers": number for name, number in layers.items()}
        given |= {f"{name}_dropout": share for name, share in dropouts.items()}
        dims = [x.dim for x in embedding_bag_collection.lookups]
        check_fcn({**given, **norms, "heads": heads}, dims)
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, numbers="vectors", dropout=field_dropout
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
