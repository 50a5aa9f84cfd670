"""QNN-alpha: "Revisiting Feature Interactions from the Perspective of Quadratic Neural Networks for
Click-through Rate Prediction", arXiv 2505.17999.

    fields - x0 --- L layers  x' = x * (sum over r of ReLU(W_r x + b_r)) + x --- logit_B

Training computes the layers twice, each time with other dropouts. The probability is the mean of
the two, and the self-ensemble loss adds the cross entropy of each of the two with that mean, which
is a constant there.

Shapes: B batch, F fields, D columns of a field, K columns of all fields, R rows of a product.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from recapp.models.crosses import crossed
from recapp.models.fields import FieldVectors
from recapp.models.finalnet import losses_of_mean
from recapp.models.layers import BatchNorm, FastDropout, xavier_linear
from recapp.models.model_checks import check_divides, check_settings
from recapp.sparse.batch import Batch
from recapp.tables.collections import BagCollection


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
        kept: Tensor = self.dropout(crossed(x_BK, factor_BK, summed_BK))
        return kept


PASSES = ("first", "second")


class QNNAlpha(nn.Module):
    """Click logits of quadratic layers, without a tower.

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

    def forward(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Compute logits, [B]; in training, also those of the two passes, by name."""
        first_BK = self.fields.flat(batch)
        if not self.training:
            return self._pass(first_BK)
        one_B = self._pass(first_BK)
        other_B = self._pass(first_BK) if self.passes > 1 else one_B
        return {"logit": logit_of_mean(one_B, other_B), "first": one_B, "second": other_B}

    def _pass(self, first_BK: Tensor) -> Tensor:
        logits_B1: Tensor = self.logit(self.layers(first_BK))
        return logits_B1[:, 0]

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

    def flops_per_sample(self) -> float:
        """Return the operations of the second pass of training."""
        weights = sum(p.numel() for p in (*self.layers.parameters(), *self.logit.parameters()))
        return 6.0 * weights * (self.passes - 1)


def logit_of_mean(first_B: Tensor, second_B: Tensor) -> Tensor:
    """Return the logit of the mean of two probabilities, which are given as logits."""
    log_mean_B = torch.logaddexp(functional.logsigmoid(first_B), functional.logsigmoid(second_B))
    log_rest_B = torch.logaddexp(functional.logsigmoid(-first_B), functional.logsigmoid(-second_B))
    return log_mean_B - log_rest_B
