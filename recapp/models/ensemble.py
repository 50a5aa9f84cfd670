"""Several models that train side by side, and whose mean output predicts.

    batch - member 1 - outputs_1 - loss_1 --+
          - member 2 - outputs_2 - loss_2 --+- sum of losses
                           |
                           +- mean of outputs - metrics, scores

Members differ in their start values only: they read the same batches and share the exchange of ids
and vectors. No gradient of one reaches another, so each trains as it would alone. The mean of
models that start apart is one of the surest ways to a higher quality (Lakshminarayanan et al.,
"Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles", arXiv 1612.01474).

Shapes: B samples of a batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recapp.sparse.keyed_jagged_tensor import Batch

# The key of what each member returned, among the outputs of an ensemble.
MEMBERS = "members"


class Ensemble(nn.Module):
    """Models whose outputs are averaged.

    Args:
        members: The models, each with collections and tables of its own.
        output: The name of the output of members that return only a tensor.
    """

    def __init__(self, members: Sequence[nn.Module], output: str = "logit") -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.output = output

    def forward(self, batch: Batch) -> dict[str, Any]:
        """Return the mean of each output over the members, [B], by name, and under `MEMBERS` what
        each member returned.
        """
        results = [member(batch) for member in self.members]
        outputs = [each if isinstance(each, Mapping) else {self.output: each} for each in results]
        means = {
            name: torch.stack([each[name] for each in outputs]).mean(0)
            for name, value in outputs[0].items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return {**means, MEMBERS: results}

    def task_loss(
        self, outputs: Mapping[str, Any], batch: Batch, loss: Callable[[Any], Tensor]
    ) -> Tensor:
        """Return the sum of the members' losses, a scalar: a mean would shrink the gradients of
        each member. A member that trains with a loss of its own has it here, too.
        """
        losses = []
        for member, result in zip(self.members, outputs[MEMBERS], strict=True):
            task_loss = getattr(member, "task_loss", None)
            losses.append(task_loss(result, batch, loss) if task_loss else loss(result))
        return torch.stack(losses).sum()

    def extra_losses(
        self, outputs: Mapping[str, Any], batch: Batch, loss: Callable[[Any], Tensor]
    ) -> dict[str, Tensor]:
        """Return the sums over the members of the losses that the models add."""
        sums: dict[str, Tensor] = {}
        for member, result in zip(self.members, outputs[MEMBERS], strict=True):
            extra = getattr(member, "extra_losses", None)
            for name, term in extra(result, batch, loss).items() if extra else ():
                sums[name] = sums[name] + term if name in sums else term
        return sums
