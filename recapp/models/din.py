"""DIN: "Deep Interest Network for Click-Through Rate Prediction", arXiv 1706.06978.

    history -- weight of each behaviour for this candidate -- sum --+
                        |                                           |
    candidate ----------+-------------------------------------------+-- MLP -- logits_B
    numbers, other columns -----------------------------------------+

The weight of a behaviour is the output of a small MLP, the activation unit, which sees the
behaviour and the candidate. The weights of a user do not add up to 1, so that the sum tells how
strong an interest is. Hidden layers have Dice, or PReLU.

Dice takes its statistics from the behaviours that exist: no padding takes part, so the result does
not depend on any. An empty history gives a sum of zeros.

The number of behaviours is not known to the planner, which counts the work of the activation unit
once for each sample.

Shapes: B batch, L behaviours of all samples, W columns of a behaviour, K columns of all inputs.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from recapp.models.attention import TargetAttention
from recapp.models.fields import FieldVectors
from recapp.models.layers import logit_mlp
from recapp.models.model_checks import check_widths
from recapp.models.sequences import Histories
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection, SequenceCollection


class DIN(nn.Module):
    """Click logits from the behaviours that matter for the candidate.

    Args:
        embedding_bag_collection: The tables of the candidate and of the other columns.
        embedding_collection: The sequences: `tables.sequences` names their columns, and
            `tables.shared` lets them read the tables of the candidate.
        dense_in_features: The number of dense features.
        history: The column of the candidate for each sequence; None pairs those that read the same
            table.
        attention_layers: The hidden widths of the activation unit.
        softmax: Whether the weights of a sample are made to add up to 1.
        layers: The widths of the MLP; the logit follows.
        activation: The activation of hidden layers: "dice", "prelu" or "relu".
        dropout: The share of the columns of the MLP that dropout sets to zero.
        batch_norm: Whether the MLP normalises its hidden layers over the batch.
        field_dropout: The share of whole vectors that training sets to 0 (`FieldVectors`).

    Raises:
        ConfigError: A setting is not allowed, or a sequence and its column have different dims.
    """

    def __init__(
        self,
        embedding_bag_collection: BagCollection,
        embedding_collection: SequenceCollection,
        dense_in_features: int,
        history: Mapping[str, str] | None = None,
        attention_layers: Sequence[int] = (36,),
        softmax: bool = False,
        layers: Sequence[int] = (200, 80),
        activation: str = "dice",
        dropout: float = 0.0,
        batch_norm: bool = False,
        field_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_widths("model.attention_layers", attention_layers)
        self.fields = FieldVectors(
            embedding_bag_collection, dense_in_features, numbers="concat", dropout=field_dropout
        )
        self.histories = Histories(embedding_bag_collection, embedding_collection, history)
        self.embedding_collection = embedding_collection
        width = self.histories.dim
        self.attention = TargetAttention(
            width, attention_layers, activation, setting="model.attention_layers"
        )
        self.softmax = softmax
        self.top = logit_mlp(
            self.fields.columns + width,
            layers,
            activation=activation,
            batch_norm=batch_norm,
            dropout=dropout,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Compute logits, [B]."""
        flat_BK = self.fields.flat(batch)
        found_LW, sample_L = self.histories.flat(self.embedding_collection(batch.sparse))
        behaviour_LW = found_LW.to(flat_BK.dtype)  # tables may have another dtype than the model
        samples = flat_BK.shape[0]
        target_BW = self.histories.target(flat_BK)
        target_LW = target_BW.index_select(0, sample_L.clamp(max=samples - 1))
        weight_L = self.attention(target_LW, behaviour_LW)
        if self.softmax:
            weight_L = _softmax(weight_L, sample_L, samples)
        # One row more than samples, for values that no sample has.
        room = behaviour_LW.new_zeros(samples + 1, self.histories.dim)
        interest_BW = room.index_add(0, sample_L, weight_L[:, None] * behaviour_LW)[:samples]
        logits_B1: Tensor = self.top(torch.cat([flat_BK, interest_BW], 1))
        return logits_B1.squeeze(1)


def _softmax(score_L: Tensor, sample_L: Tensor, samples: int) -> Tensor:
    """Return weights that add up to 1 for each sample with behaviours, [L]."""
    largest_B = score_L.new_full((samples + 1,), -torch.inf)
    largest_B = largest_B.scatter_reduce(0, sample_L, score_L.detach(), "amax")
    power_L = (score_L - largest_B[sample_L]).exp()
    total_B = score_L.new_zeros(samples + 1).index_add(0, sample_L, power_L)
    return power_L / total_B.index_select(0, sample_L)
