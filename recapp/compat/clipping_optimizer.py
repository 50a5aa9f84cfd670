"""TorchRec's optimiser that clips gradients before each step, either of the dense part alone or of
the dense part and the tables (`recapp/optim/clipping.py`).

Names and argument order are those of `torchrec/optim/clipping.py`.
"""

import math
from collections.abc import Callable, Mapping
from enum import Enum, unique
from typing import Any

import torch
from torch import Tensor

from recapp.compat.keyed_optimizers import OptimizerWrapper
from recapp.errors import ConfigError
from recapp.optim.clipping import clip_norm, clip_value
from recapp.optim.keyed import KeyedOptimizer
from recapp.optim.optimizer import run_closure
from recapp.optim.table_gradients import TableGradients


@unique
class GradientClipping(Enum):
    """The ways to clip gradients."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """A keyed optimiser that clips gradients before each step.

    Args:
        optimizer: The keyed optimiser.
        clipping: The way to clip gradients.
        max_gradient: The largest norm, or the largest absolute value.
        norm_type: The order of the norm, a number above 0 or `inf`.
        enable_global_grad_clip: Whether to clip tables together with the dense part, by one norm
            over all gradients of all ranks. The update of the tables then waits for `step`, which
            every rank calls. False clips the dense part alone.
        param_to_pgs: None, because recapp knows which ranks hold a table.

    Raises:
        ConfigError: A number is out of range, process groups are given, or
            `enable_global_grad_clip` finds no tables.
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
        """Run the closure once, clip the gradients, then step the wrapped optimiser."""
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
        """Clip by the norm of all gradients, and return the norm before clipping."""
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
