"""AutoInt: "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks",
arXiv 1810.11921.

    numbers, lookups -- fields -- attention over fields -- ... -- side by side -- linear -- logits_B
                             \\---------------- deep layers (AutoInt+) ------------- linear --/

Each number is a field of its own, x_i v_i with a learnt vector v_i, as each lookup is. A layer lets
each field attend to all fields, in several heads, and keeps the field by a residual. After the last
layer a linear map of all fields gives the logit. AutoInt+ adds the logit of an MLP of the fields
before attention.

Shapes: B batch, F fields, D columns of a field, W columns of an output field.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from recapp.models.attention import FieldAttention
from recapp.models.fields import FieldVectors
from recapp.models.layers import MLP, xavier_linear
from recapp.models.model_checks import check_count, check_hidden, check_settings
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


class AutoInt(nn.Module):
    """Click logits from attention over fields.

    Args:
        embedding_bag_collection: The tables, all of one dim.
        dense_in_features: The number of dense features.
        attention_layers: The number of layers of attention.
        width: The columns of an output field of a layer, over all heads.
        heads: The number of heads, a divisor of the width.
        deep_layers: The widths of the MLP of AutoInt+; without any there is no MLP.
        dropout: The share of the columns of the MLP that dropout sets to zero.
        batch_norm: Whether the MLP normalises its hidden layers over the batch.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: The heads do not divide the width, or another setting is not allowed.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        dense_in_features: int,
        attention_layers: int = 3,
        width: int = 64,
        heads: int = 2,
        deep_layers: Sequence[int] = (),
        dropout: float = 0.0,
        batch_norm: bool = False,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_count("model.attention_layers", attention_layers)
        check_settings(width=width, dropout=dropout)
        check_hidden("model.deep_layers", deep_layers)
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, model="AutoInt", dropout=field_dropout
        )
        dims = [self.fields.dim, *[width] * attention_layers]
        self.layers = nn.ModuleList(FieldAttention(dim, width, heads) for dim in dims[:-1])
        self.score = xavier_linear(self.fields.count * width, 1)
        self.width = width
        self.deep = None
        if deep_layers:
            self.deep = MLP(
                self.fields.columns,
                [*deep_layers, 1],
                last_relu=False,
                setting="model.deep_layers",
                batch_norm=batch_norm,
                dropout=dropout,
            )

    def flops_per_sample(self) -> float:
        """Return the operations per sample beyond two for each weight, with backward.

        Each layer's linear maps run once for each field, and it multiplies queries with keys, and
        weights with values.
        """
        count = self.fields.count
        weights = sum(p.numel() for p in self.layers.parameters())
        products = 2 * count**2 * self.width * len(self.layers)
        return 6.0 * ((count - 1) * weights + products)

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        fields_BFD = self.fields(batch)
        mixed_BFW = fields_BFD
        for layer in self.layers:
            mixed_BFW = layer(mixed_BFW)
        logits_B1: Tensor = self.score(mixed_BFW.flatten(1))
        if self.deep is not None:
            logits_B1 = logits_B1 + self.deep(fields_BFD.flatten(1))
        return logits_B1.squeeze(1)
