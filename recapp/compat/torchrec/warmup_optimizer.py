"""Warm-up and decay of the learning rate in stages, around a keyed optimiser.

    stages = [
        WarmupStage(WarmupPolicy.LINEAR, max_iters=1000, value=0.1),
        WarmupStage(WarmupPolicy.POLY, max_iters=9000, value=2.0, decay_iters=10000),
    ]
    optimizer = WarmupOptimizer(CombinedOptimizer([model.fused_optimizer, dense]), stages, lr=0.1)

Step i = 0, 1, ... has the learning rate lr times the factor of its stage. A stage ends with its
`max_iters`, which counts from the beginning of training; after the last stage the factor is 1. The
end of each step sets the rate of the next one, so tables, which update in backward, follow the
schedule as well.

Names, argument order and arithmetic are those of `torchrec/optim/warmup.py`. recapp's own schedule,
which Lightning drives, is in `recapp/optim/schedule.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from recapp.compat.torchrec.keyed import KeyedOptimizer
from recapp.compat.torchrec.keyed_optimizers import OptimizerWrapper
from recapp.errors import ConfigError


@unique
class WarmupPolicy(Enum):
    """The formulas for the factor of a stage in step i (`WarmupStage`)."""

    NONE = "none"
    LINEAR = "linear"
    CONSTANT = "constant"
    POLY = "poly"
    STEP = "step"
    INVSQRT = "inv_sqrt"
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"


@dataclass
class WarmupStage:
    """A stage of a schedule. In step i the factor of the learning rate is lr_scale times

        NONE        1
        LINEAR      value + (1 - value) i / max_iters
        CONSTANT    value
        POLY        (1 - i / decay_iters)^value
        STEP        value^(i // decay_iters)
        INVSQRT     1 / sqrt(i)
        COSINE_...  value + (1 - value) (1 + cos(pi (i mod sgdr_period) / sgdr_period)) / 2

    Args:
        policy: The formula.
        max_iters: The last step of the stage, counted from the beginning of training.
        value: The number `value` in the formula.
        lr_scale: A factor for the whole stage.
        decay_iters: For POLY the length of the decay, by default `max_iters`; for STEP the number
            of iterations between two decays, by default 1.
        sgdr_period: The steps between two restarts of COSINE_ANNEALING_WARM_RESTARTS.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1


class WarmupOptimizer(OptimizerWrapper):
    """A keyed optimiser whose learning rate follows stages.

    Args:
        optimizer: The keyed optimiser; all its param groups follow the stages, those of tables too.
        stages: The stages, in order.
        lr: The learning rate that the factors multiply.
        lr_param: The entry of param groups to set.
        param_name: The name under which a state dict keeps the numbers of step and stage.

    Raises:
        ConfigError: A stage ends before it begins, the factor of a stage is not defined, or a
            parameter has the name `param_name`.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: list[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        if param_name in optimizer.params:
            raise ConfigError(
                f"param_name={param_name}: a parameter has this name: give the warm-up another name"
            )
        self.stages = _checked(stages)
        self.lr = lr
        self.lr_param = lr_param
        self.param_name = param_name
        self._key = nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
        self._count: dict[str, Any] = {}
        self._set_lr()

    @property
    def params(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Return the parameters of the wrapped optimiser, and one that stands for the warm-up."""
        return {**self.optimizer.params, self.param_name: self._key}

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """Return the state of the wrapped optimiser, and `warmup`: step and stage, [2]."""
        own = {self._key: self._count} if self._count else {}
        return {**self.optimizer.state, **own}

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step the wrapped optimiser, then set the learning rate of the next step."""
        loss = super().step(closure)
        number, stage = self._position()
        number += 1
        if number > self.stages[stage].max_iters and stage + 1 < len(self.stages):
            stage += 1
        self._count = {"warmup": torch.tensor([number, stage], device="cpu")}
        self._set_lr()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimiser's state dict, with step and stage added to its state."""
        whole = super().state_dict()
        own = {self.param_name: dict(self._count)} if self._count else {}
        return whole | {"state": whole["state"] | own}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict["state"])
        own = state.pop(self.param_name, None)
        if own is None and self._count:
            raise ConfigError(
                f"the state has no entry for {self.param_name}, and this optimiser needs one"
            )
        count = {} if own is None else {"warmup": torch.as_tensor(own["warmup"]).clone()}
        if count and not 0 <= int(count["warmup"][1]) < len(self.stages):
            raise ConfigError(
                f"the state of {self.param_name} is in stage {int(count['warmup'][1])}, and "
                f"there are {len(self.stages) - 1} here: give the stages of the saved optimiser"
            )
        self._count = count
        super().load_state_dict({**state_dict, "state": state})

    @override
    def post_load_state_dict(self) -> None:
        super().post_load_state_dict()
        self._set_lr()

    def _position(self) -> tuple[int, int]:
        """Return the number of finished steps, and the stage."""
        number, stage = self._count["warmup"].tolist() if self._count else (0, 0)
        return number, stage

    def _set_lr(self) -> None:
        number, position = self._position()
        stage = self.stages[position]
        formula = _FACTORS.get(stage.policy, _FACTORS[WarmupPolicy.NONE])
        factor = formula(stage, number) * stage.lr_scale
        for group in self.param_groups:
            group[self.lr_param] = self.lr * factor


def _checked(stages: list[WarmupStage]) -> list[WarmupStage]:
    """Return the stages with their defaults filled in, and an endless last stage of factor 1.

    Raises:
        ConfigError: A stage ends before it begins, or has no factor for one of its steps.
    """
    whole: list[WarmupStage] = []
    first = 0
    for number, given in enumerate(stages):
        where = f"stages[{number}]"
        if not isinstance(given, WarmupStage):
            raise ConfigError(f"{where} is a {type(given).__name__}: give a WarmupStage")
        if given.max_iters <= (before := whole[-1].max_iters if whole else 0):
            raise ConfigError(
                f"{where}.max_iters={given.max_iters}: must be above {before}, the end of the "
                "stage before it: max_iters counts from the beginning of training"
            )
        length = 1 if given.policy is WarmupPolicy.STEP else given.max_iters
        stage = replace(given, decay_iters=given.decay_iters if given.decay_iters > 0 else length)
        _check_factor(where, stage, first)
        whole.append(stage)
        first = stage.max_iters + 1
    return [*whole, WarmupStage(WarmupPolicy.NONE, max_iters=1 << 63)]


def _check_factor(where: str, stage: WarmupStage, first: int) -> None:
    """Check that a stage has a factor for each of its steps."""
    policy = stage.policy
    if policy is WarmupPolicy.INVSQRT and first == 0:
        raise ConfigError(
            f"{where}: INVSQRT divides by the root of the step's number, and training begins "
            "with step 0: put another stage first"
        )
    if policy is WarmupPolicy.POLY and stage.decay_iters < stage.max_iters:
        raise ConfigError(
            f"{where}.decay_iters={stage.decay_iters}: must be at least "
            f"max_iters={stage.max_iters}, or the rate of POLY falls below 0"
        )
    if policy is WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS and stage.sgdr_period < 1:
        raise ConfigError(f"{where}.sgdr_period={stage.sgdr_period}: must be at least 1")


_FACTORS: Mapping[WarmupPolicy, Callable[[WarmupStage, int], float]] = {
    WarmupPolicy.NONE: lambda stage, i: 1.0,
    WarmupPolicy.LINEAR: lambda stage, i: stage.value + (1.0 - stage.value) * i / stage.max_iters,
    WarmupPolicy.CONSTANT: lambda stage, i: stage.value,
    WarmupPolicy.POLY: lambda stage, i: math.pow(1 - i / stage.decay_iters, stage.value),
    WarmupPolicy.STEP: lambda stage, i: math.pow(stage.value, i // stage.decay_iters),
    WarmupPolicy.INVSQRT: lambda stage, i: 1.0 / math.sqrt(i),
    WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS: lambda stage, i: (
        stage.value
        + (1.0 - stage.value)
        * 0.5
        * (1 + math.cos(math.pi * (i % stage.sgdr_period) / stage.sgdr_period))
    ),
}
"""The factor of each policy in step i = 0, 1, ..., without `lr_scale`."""
