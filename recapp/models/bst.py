"""BST: "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba", arXiv 1905.06874.

    history, latest first --+
                            +-- steps -- transformer layers -- side by side --+
    candidate --------------+                                                 +-- MLP -- logits_B
    numbers, all columns -----------------------------------------------------+

A step is the vector of an item beside a learnt vector of its position, which counts from the
candidate (position 0) back in time. All steps attend to each other. Behaviours before the
`max_length` latest ones are left out.

The paper's position is the time that has passed; a sequence of ids has only its order, which is
used here. Padding is never attended to, and its outputs are zeros.

Shapes: B batch, T steps with the candidate, D columns of an item, W columns of a step, K columns of
all inputs.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from recapp.models.attention import TransformerLayer
from recapp.models.fields import FieldVectors
from recapp.models.layers import draw_normal, logit_mlp
from recapp.models.model_checks import check_divides, check_settings
from recapp.models.sequences import Histories
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection, SequenceCollection


class BST(nn.Module):
    """Click logits from a transformer over the history and the candidate.

    Args:
        embedding_bag_collection: The tables of the candidate and of the other columns.
        embedding_collection: The sequences: `tables.sequences` names their columns, and
            `tables.shared` lets them read the tables of the candidate.
        dense_in_features: The number of dense features.
        history: The column of the candidate for each sequence; None pairs those that read the same
            table.
        max_length: The number of behaviours that the transformer sees, the latest ones.
        position_dim: The columns of a position; None takes those of an item.
        transformer_layers: The number of transformer layers.
        heads: The number of heads, a divisor of the columns of item and position.
        feed_forward: The hidden width of a transformer layer; None takes four times the columns of
            a step.
        layers: The widths of the MLP, with leaky ReLUs; the logit follows.
        dropout: The share of columns that dropout sets to zero, in transformer layers and MLP.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: The heads do not divide the columns of a step, another setting is not allowed,
            or a sequence and its column have different dims.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        embedding_collection: SequenceCollection,
        dense_in_features: int,
        history: Mapping[str, str] | None = None,
        max_length: int = 20,
        position_dim: int | None = None,
        transformer_layers: int = 1,
        heads: int = 8,
        feed_forward: int | None = None,
        layers: Sequence[int] = (1024, 512, 256),
        dropout: float = 0.2,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_settings(
            max_length=max_length, transformer_layers=transformer_layers, dropout=dropout
        )
        optional = {"position_dim": position_dim, "feed_forward": feed_forward}
        check_settings(**{name: value for name, value in optional.items() if value is not None})
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, numbers="concat", dropout=field_dropout
        )
        self.histories = Histories(embedding_bag_collection, embedding_collection, history)
        self.embedding_collection = embedding_collection
        self.max_length = max_length
        dim = self.histories.dim
        position_dim = position_dim or dim
        width = dim + position_dim
        step = f"the {dim} columns of an item + model.position_dim={position_dim}, together"
        check_divides("model.heads", heads, step, width)
        self.position_TP = nn.Parameter(torch.zeros(max_length + 1, position_dim))
        draw_normal(self.position_TP, position_dim**-0.5)
        self.layers = nn.ModuleList(
            TransformerLayer(width, heads, feed_forward or 4 * width, dropout)
            for _ in range(transformer_layers)
        )
        self.top = logit_mlp(
            self.fields.columns + (max_length + 1) * width,
            layers,
            activation="leaky_relu",
            dropout=dropout,
        )

    def flops_per_sample(self) -> float:
        """Return the operations per sample beyond two for each weight, with backward.

        Each step passes through the linear maps of all layers, and attends to all steps.
        """
        steps, position = self.position_TP.shape
        width = self.histories.dim + position
        weights = sum(p.numel() for p in self.layers.parameters())
        return 6.0 * ((steps - 1) * weights + len(self.layers) * 2 * steps**2 * width)

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        flat_BK = self.fields.flat(batch)
        found = self.embedding_collection(batch.sparse)
        past_BTD, past_BT = self.histories.latest(found, self.max_length)
        target_BD = self.histories.target(flat_BK)
        # Tables may have another dtype than the model.
        items_BTD = torch.cat([target_BD[:, None], past_BTD.to(flat_BK.dtype)], 1)
        there_BT = torch.cat([torch.ones_like(past_BT[:, :1]), past_BT], 1)
        samples, steps, _ = items_BTD.shape
        position_BTP = self.position_TP.to(items_BTD.dtype).expand(samples, steps, -1)
        steps_BTW = torch.cat([items_BTD, position_BTP], 2)
        for layer in self.layers:
            steps_BTW = layer(steps_BTW, there_BT)
        steps_BTW = steps_BTW * there_BT[:, :, None]
        logits_B1: Tensor = self.top(torch.cat([flat_BK, steps_BTW.flatten(1)], 1))
        return logits_B1.squeeze(1)
