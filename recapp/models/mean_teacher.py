"""The loss by which the branches of a model learn the mean of their predictions.

    y = sigmoid(logit of the mean), without its gradient
    loss of a branch = BCE(logit of the branch, y)

FinalNet (doi 10.1145/3539618.3591988) and QNN-alpha (arXiv 2505.17999) add it to the loss of the
labels, once for each branch.

Shapes: B batch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

if TYPE_CHECKING:
    from recapp.sparse.batch import Batch


def losses_of_mean(
    mean_logit_B: Tensor, branches: Mapping[str, Tensor], batch: "Batch"
) -> dict[str, Tensor]:
    """Return the mean cross entropy of each branch with the mean prediction, by name.

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
