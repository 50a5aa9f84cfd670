"""Clip gradients before a step, by their norm or by value, over the dense part and the tables.

    total = (sum over all gradients |g|^p)^(1/p)
    g *= min(1, most / (total + 1e-6))            by the norm
    g = min(max(g, -most), most)                  value by value

Tables have one gradient for each touched row, summed over the batches of all ranks. It is complete
when backward has ended on all ranks. So the update of the tables, which is otherwise the end of
backward, waits for the optimiser's step: gradients of several backwards add up, and `zero_grad`
drops them, as for any parameter. If no gradient exceeds the bound, training gives the same bits as
without clipping.

The factor is that of `torch.nn.utils.clip_grad_norm_`. `engine.clip_tables` clips in Lightning's
step (`recapp/trainer/step_of_ranks.py`), TorchRec's optimiser in its own
(`recapp/compat/torchrec/optimizers.py`).
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from recapp.errors import ConfigError
from recapp.optim.optimizer import TableGradients, joined


@torch.no_grad()
def clip_norm(
    parameters: Iterable[Tensor],
    tables: Sequence[TableGradients],
    most: float,
    order: float = 2.0,
) -> float:
    """Scale all gradients so that their norm is at most `most`. Every rank calls this function.

    Args:
        parameters: The dense parameters, whose gradients are the same on all ranks.
        tables: The gradients of table rows.
        most: The largest norm.
        order: The order of the norm, or infinity.

    Returns:
        The norm before scaling, the same number on every rank.

    Raises:
        ConfigError: A dense gradient is sparse.
    """
    gradients = _gradients(parameters)
    norm = _norm(gradients, tables, order)
    factor = most / (norm + 1e-6)
    if not factor >= 1.0:  # a norm of NaN makes all gradients NaN, as in torch
        for gradient in gradients:
            gradient.mul_(factor)
        for of_tables in tables:
            of_tables.scale(factor)
    return norm


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[Tensor], tables: Sequence[TableGradients], order: float = 2.0
) -> float:
    """Return the norm of all gradients, the same number on every rank, and change none. Every rank
    calls this function.

    Args:
        parameters: The dense parameters, whose gradients are the same on all ranks.
        tables: The gradients of table rows.
        order: The order of the norm, or infinity.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return _norm(dense, tables, order)


def _norm(gradients: Sequence[Tensor], tables: Sequence[TableGradients], order: float) -> float:
    norms = [float(torch.linalg.vector_norm(g, order, dtype=torch.float64)) for g in gradients]
    dense = joined(norms if math.isinf(order) else [norm**order for norm in norms], order)
    parts = [
        of_tables.power_sum(order, 0.0 if number else dense)
        for number, of_tables in enumerate(tables)
    ]
    total = joined(parts or [dense], order)
    return total if math.isinf(order) else total ** (1.0 / order)


@torch.no_grad()
def clip_value(parameters: Iterable[Tensor], tables: Sequence[TableGradients], most: float) -> None:
    """Limit the elements of all gradients to -most .. most. Every rank calls this function.

    Args:
        parameters: The dense parameters.
        tables: The gradients of table rows, each summed over all ranks.
        most: The largest absolute value.
    """
    torch.nn.utils.clip_grad_value_(parameters, most)
    for of_tables in tables:
        of_tables.clamp(most)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters that have one; an empty one has no norm.

    Raises:
        ConfigError: A gradient is sparse.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    for gradient in gradients:
        if gradient.is_sparse:
            raise ConfigError(
                f"a dense parameter of shape {tuple(gradient.shape)} has a sparse gradient, whose "
                "rows may repeat: make its nn.Embedding without sparse=True to clip its norm"
            )
    return gradients
