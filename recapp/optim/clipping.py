"""Gradients that are clipped before a step, by their norm or value by value, over the dense part
alone or over tables as well.

    total = (sum over all gradients |g|^p)^(1/p)
    g *= min(1, most / (total + 1e-6))            NORM
    g = min(max(g, -most), most)                  VALUE

Tables have one gradient for each touched row, summed over the batches of all ranks. It is known
when backward has ended on all of them, so the tables' update, which else ends backward, then waits
for the optimiser's step: gradients of several backwards add up, and `zero_grad` drops them, as for
any parameter. Where nothing is to be clipped the bits are those of training without.

The class has the name and argument order of `torchrec/optim/clipping.py`; the factor is that of
`torch.nn.utils.clip_grad_norm_`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, unique
from typing import Any

import torch
from torch import Tensor

from recapp.errors import ConfigError
from recapp.optim.keyed import KeyedOptimizer, OptimizerWrapper
from recapp.optim.optimizer import run_closure
from recapp.optim.table_gradients import TableGradients, joined


@unique
class GradientClipping(Enum):
    """How gradients are clipped."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


@torch.no_grad()
def clip_norm(
    parameters: Iterable[Tensor],
    tables: Sequence[TableGradients],
    most: float,
    order: float = 2.0,
) -> float:
    """Scale all gradients so that their norm is at most a number. Every rank calls it.

    Args:
        parameters: The dense parameters, whose gradients are the same on all ranks.
        tables: The gradients of table rows.
        most: The largest norm.
        order: The order of the norm, or infinity.

    Returns:
        The norm before, the same number on every rank.

    Raises:
        ConfigError: A dense gradient is sparse.
    """
    found = _gradients(parameters)
    norms = [float(torch.linalg.vector_norm(g, order, dtype=torch.float64)) for g in found]
    dense = joined(norms if math.isinf(order) else [norm**order for norm in norms], order)
    parts = [
        of_tables.power_sum(order, 0.0 if number else dense)
        for number, of_tables in enumerate(tables)
    ]
    total = joined(parts or [dense], order)
    norm = total if math.isinf(order) else total ** (1.0 / order)
    factor = most / (norm + 1e-6)
    if not factor >= 1.0:  # a norm that is no number makes all gradients so, as torch does
        for gradient in found:
            gradient.mul_(factor)
        for of_tables in tables:
            of_tables.scale(factor)
    return norm


@torch.no_grad()
def clip_value(parameters: Iterable[Tensor], tables: Sequence[TableGradients], most: float) -> None:
    """Bring the elements of all gradients between -most and most. Every rank calls it.

    Args:
        parameters: The dense parameters.
        tables: The gradients of table rows: those of a row, summed over all ranks.
        most: The largest absolute value.
    """
    torch.nn.utils.clip_grad_value_(parameters, most)
    for of_tables in tables:
        of_tables.clamp(most)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that there are.

    Raises:
        ConfigError: One is sparse.
    """
    found = [p.grad for p in parameters if p.grad is not None]
    for gradient in found:
        if gradient.is_sparse:
            raise ConfigError(
                f"a dense parameter of shape {tuple(gradient.shape)} has a sparse gradient, whose "
                "rows may repeat: make its nn.Embedding without sparse=True to clip its norm"
            )
    return found


class GradientClippingOptimizer(OptimizerWrapper):
    """A keyed optimiser that clips gradients before each step.

    Args:
        optimizer: The keyed optimiser.
        clipping: How gradients are clipped.
        max_gradient: The largest norm, or absolute value.
        norm_type: The order of the norm, a number above 0 or `inf`.
        enable_global_grad_clip: Whether tables are clipped with the dense part, by one norm of all
            gradients over all ranks; their update then waits for `step`, which every rank calls.
            Without, the dense part alone is.
        param_to_pgs: None: which ranks hold a table is known.

    Raises:
        ConfigError: A number out of range, process groups, or no tables to be clipped.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[Any, Any] | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.clipping = _clipping_of(clipping)
        self.max_gradient = max_gradient
        self.norm_type = _order_of(norm_type)
        if not max_gradient >= 0:
            raise ConfigError(f"max_gradient={max_gradient}: must be at least 0")
        if param_to_pgs:
            raise ConfigError(
                "param_to_pgs: tables know their ranks and all else is the same on every rank: "
                "leave it out"
            )
        tables = optimizer.table_gradients if enable_global_grad_clip else []
        if enable_global_grad_clip and not tables:
            raise ConfigError(
                "enable_global_grad_clip=True: the optimiser has no tables: combine it with "
                "model.fused_optimizer of a sharded model, or leave this out"
            )
        self._tables: list[TableGradients] = []
        if self.clipping is not GradientClipping.NONE:
            self._tables = tables
        for of_tables in self._tables:
            of_tables.defer(self)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Run the closure once, clip, then step the wrapped optimiser."""
        loss = run_closure(closure)
        parameters = self._parameters()
        if any(p.is_meta for p in parameters):  # a model without values has no gradients
            pass
        elif self.clipping is GradientClipping.VALUE:
            clip_value(parameters, self._tables, self.max_gradient)
        elif self.clipping is GradientClipping.NORM and self._tables:
            self.clip_grad_norm_()
        elif self.clipping is GradientClipping.NORM:
            torch.nn.utils.clip_grad_norm_(parameters, self.max_gradient, self.norm_type)
        super().step()
        return loss

    def clip_grad_norm_(self) -> float:
        """Clip by the norm of all gradients, and return what it was."""
        return clip_norm(self._parameters(), self._tables, self.max_gradient, self.norm_type)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


def _clipping_of(clipping: Any) -> GradientClipping:
    if not isinstance(clipping, GradientClipping):
        raise ConfigError(
            f"clipping={clipping!r}: give GradientClipping.NORM, GradientClipping.VALUE or "
            "GradientClipping.NONE"
        )
    return clipping


def _order_of(norm_type: float | str) -> float:
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:
        raise ConfigError(f"norm_type={norm_type!r}: must be a number above 0, or inf")
    return order
