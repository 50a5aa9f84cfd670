"""TorchRec's optimisers: the wrappers that key a torch optimiser by parameter names and combine
several optimisers, the clipping of gradients before each step, row-wise Adagrad, and warm-up and
decay of the learning rate in stages.

    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
    )
    stages = [
        WarmupStage(WarmupPolicy.LINEAR, max_iters=1000, value=0.1),
        WarmupStage(WarmupPolicy.POLY, max_iters=9000, value=2.0, decay_iters=10000),
    ]
    optimizer = WarmupOptimizer(CombinedOptimizer([model.fused_optimizer, dense]), stages, lr=0.1)

Names, argument order and arithmetic are those of `torchrec/optim`. Clipping covers the dense part
alone, or the dense part and the tables (`recapp/optim/optimizer.py`).

Step i = 0, 1, ... has the learning rate lr times the factor of its stage. A stage ends with its
`max_iters`, which counts from the beginning of training; after the last stage the factor is 1. The
end of each step sets the rate of the next one, so tables, which update in backward, follow the
schedule as well. recapp's own schedule, which Lightning drives, is in `recapp/optim/schedule.py`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from recapp.compat.torchrec.keyed import KeyedOptimizer
from recapp.errors import ConfigError
from recapp.optim.optimizer import TableGradients, clip_norm, clip_value, gradient_norm, run_closure


class KeyedOptimizerWrapper(KeyedOptimizer):
    """A torch optimiser over named parameters.

    Args:
        params: Parameters by name.
        optim_factory: A function that makes the optimiser from the list of parameters.

    Raises:
        ConfigError: There are no parameters.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        optim_factory: Callable[[list[nn.Parameter]], Optimizer],
    ) -> None:
        if not params:
            raise ConfigError(
                "KeyedOptimizerWrapper got no parameters: a model of tables alone needs no "
                "dense optimiser"
            )
        self.optimizer = optim_factory(list(params.values()))
        super().__init__(params, self.optimizer.state, self.optimizer.param_groups)

    @property
    def parts(self) -> list[Optimizer] | None:
        """The optimiser; None in a subclass whose step does more."""
        return [self.optimizer] if type(self).step is KeyedOptimizerWrapper.step else None

    @override
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        return self.optimizer.step(closure)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimisers as one.

    Args:
        optims: The optimisers, or pairs of a name and an optimiser; the name becomes the prefix of
            the names of the optimiser's parameters.

    Raises:
        ConfigError: Two parameters have one name, or some optimisers save param groups and others
            do not.
    """

    def __init__(self, optims: list[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self.optimizers = [
            ("", one) if isinstance(one, KeyedOptimizer) else (one[0], one[1]) for one in optims
        ]
        self._begin()
        names: set[str] = set()
        for prefix, one in self.optimizers:
            for name in one.params:
                if (whole := self.prepend_opt_key(name, prefix)) in names:
                    raise ConfigError(
                        f"two optimisers have a parameter {whole}: give the optimisers names, "
                        '[("dense", ...), ...]'
                    )
                names.add(whole)
        saves = {one.saves_groups for _, one in self.optimizers}
        if len(saves) > 1:
            raise ConfigError(
                "some optimisers save param groups and some do not: combine them first, then call "
                "save_param_groups on the whole"
            )
        self.saves_groups = True in saves

    @property
    def parts(self) -> list[Optimizer] | None:
        """The optimisers; None in a subclass whose step does more."""
        plain = type(self).step in (CombinedOptimizer.step, OptimizerWrapper.step)
        return [one for _, one in self.optimizers] if plain else None

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """Return a parameter's name with the name of its optimiser in front."""
        return ".".join(part for part in (opt_key, name) if part)

    @property
    def params(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Return the parameters of all optimisers by name, with prefixes."""
        return {
            self.prepend_opt_key(name, prefix): parameter
            for prefix, one in self.optimizers
            for name, parameter in one.params.items()
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the live param groups of all optimisers."""
        return [group for _, one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Return a new dict of the state of all optimisers, by parameter."""
        return {p: values for _, one in self.optimizers for p, values in one.state.items()}

    @property
    @override
    def table_gradients(self) -> list[TableGradients]:
        return [gradients for _, one in self.optimizers for gradients in one.table_gradients]

    @override
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        loss = run_closure(closure)
        for _, one in self.optimizers:
            one.step(closure=None)
        return loss

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, one in self.optimizers:
            one.zero_grad(set_to_none)

    @override
    def save_param_groups(self, save: bool) -> None:
        self.saves_groups = save
        for _, one in self.optimizers:
            one.save_param_groups(save)

    @override
    def state_dict(self) -> dict[str, Any]:
        whole: dict[str, Any] = {"state": {}}
        for prefix, one in self.optimizers:
            part = one.state_dict()
            for name, values in part["state"].items():
                whole["state"][self.prepend_opt_key(name, prefix)] = values
            for group in part.get("param_groups", ()):
                names = [self.prepend_opt_key(name, prefix) for name in group["params"]]
                whole.setdefault("param_groups", []).append({**group, "params": names})
        return whole

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.check_names(state_dict["state"])
        group_count = len(state_dict.get("param_groups", ()))
        if self.saves_groups and group_count != len(self.param_groups):
            raise ConfigError(
                f"the state has {group_count} param groups, this optimiser {len(self.param_groups)}"
            )
        for prefix, one in self.optimizers:
            names = {self.prepend_opt_key(name, prefix): name for name in one.params}
            part: dict[str, Any] = {
                "state": {
                    names[whole]: values
                    for whole, values in state_dict["state"].items()
                    if whole in names
                }
            }
            if "param_groups" in state_dict:
                part["param_groups"] = [
                    {**group, "params": [names[whole] for whole in group["params"]]}
                    for group in state_dict["param_groups"]
                    if names.keys() >= set(group["params"])
                ]
            one.load_state_dict(part)
        self.post_load_state_dict()

    def __repr__(self) -> str:
        inner = [f"{prefix}: {one}" if prefix else str(one) for prefix, one in self.optimizers]
        return f"{type(self).__name__}({', '.join(inner)})"


class OptimizerWrapper(CombinedOptimizer):
    """The base of optimisers that add work to the step of another one; this class adds none.

    Args:
        optimizer: The keyed optimiser to wrap. The wrapper has the same parameters, state and param
            groups.

    Raises:
        ConfigError: `optimizer` is no keyed optimiser.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        if not isinstance(optimizer, KeyedOptimizer):
            raise ConfigError(
                f"{type(self).__name__} got a {type(optimizer).__name__}: wrap it first, "
                "KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: ...)"
            )
        super().__init__([optimizer])
        self.optimizer = optimizer

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    @override
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        return self.optimizer.state

    @override
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        return self.optimizer.step(closure=closure)


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that no optimiser updates in backward.

    Args:
        named_parameters: The parameters of a model, sharded or not. A sharded table is no
            parameter.
        include: Whether to yield the other parameters instead, which one updates in backward.
    """
    for name, parameter in named_parameters:
        if hasattr(parameter, "_in_backward_optimizers") == include:
            yield name, parameter


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
        track_grad_norm: Whether to compute the norm of the gradients where they are not clipped by
            it, too.

    `last_total_grad_norm` is the norm of the gradients of the last step before they were clipped;
    None before a first step, and where neither clipping nor `track_grad_norm` needs the norm.

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
        track_grad_norm: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self.track_grad_norm = track_grad_norm
        self.last_total_grad_norm: Tensor | None = None
        if not isinstance(clipping, GradientClipping):
            raise ConfigError(
                f"clipping={clipping!r}: give GradientClipping.NORM, GradientClipping.VALUE or "
                "GradientClipping.NONE"
            )
        self.clipping = clipping
        self.max_gradient = max_gradient
        self.norm_type = _order_of(norm_type)
        if not max_gradient >= 0:
            raise ConfigError(f"max_gradient={max_gradient}: must be at least 0")
        if param_to_pgs:
            raise ConfigError(
                "param_to_pgs: recapp knows the ranks of the tables, and other parameters are "
                "equal on all ranks: leave it out"
            )
        tables = optimizer.table_gradients if enable_global_grad_clip else []
        if enable_global_grad_clip and not tables:
            raise ConfigError(
                "enable_global_grad_clip=True: the optimiser has no tables: combine it with "
                "model.fused_optimizer of a sharded model, or leave this out"
            )
        self._tables: list[TableGradients] = []
        if self.clipping is not GradientClipping.NONE or track_grad_norm:
            self._tables = tables
        for of_tables in self._tables:
            of_tables.defer(self)

    @override
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        loss = run_closure(closure)
        parameters = self._parameters()
        if not any(p.is_meta for p in parameters):  # a model without values has no gradients
            self.last_total_grad_norm = self._clip(parameters)
        super().step()
        return loss

    def clip_grad_norm_(self) -> float:
        """Clip by the norm of all gradients, and return the norm before clipping."""
        return clip_norm(self._parameters(), self._tables, self.max_gradient, self.norm_type)

    def _clip(self, parameters: list[Tensor]) -> Tensor | None:
        """Clip the gradients, and return their norm before if it is known."""
        if self.clipping is GradientClipping.NORM:
            if self._tables:
                return torch.tensor(self.clip_grad_norm_())
            full = [p for p in parameters if p.grad is not None and p.grad.numel()]
            return torch.nn.utils.clip_grad_norm_(full, self.max_gradient, self.norm_type)
        norm = None
        if self.track_grad_norm:
            norm = torch.tensor(gradient_norm(parameters, self._tables, self.norm_type))
        if self.clipping is GradientClipping.VALUE:
            clip_value(parameters, self._tables, self.max_gradient)
        return norm

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


def _order_of(norm_type: float | str) -> float:
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:
        raise ConfigError(f"norm_type={norm_type!r}: must be a number above 0, or inf")
    return order


class RowWiseAdagrad(Optimizer):
    """Adagrad with one number of state per row, the sum of its mean squared gradients.

        s_r += mean of g_r^2;   w_r -= lr * g_r / (sqrt(s_r) + eps)

    The last dimension is the columns; all others are rows. `apply_optimizer_in_backward` with this
    class selects the row rule `rowwise_adagrad`, which computes the same for the rows that a batch
    touches. Source: FBGEMM's EXACT_ROWWISE_ADAGRAD; name and defaults are those of
    `torchrec.optim.RowWiseAdagrad`.

    Args:
        params: The parameters, or param groups.
        lr: The learning rate.
        eps: The number that keeps the divisor above 0.

    Raises:
        ConfigError: `lr` or `eps` is below 0.
    """

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-10) -> None:
        if lr < 0 or eps < 0:
            raise ConfigError(f"RowWiseAdagrad(lr={lr}, eps={eps}): both must be at least 0")
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    @override
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        loss = run_closure(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros_like(p[..., :1], dtype=torch.float32)
                state["sum"] += gradient.float().pow(2).mean(-1, keepdim=True)
                root = state["sum"].sqrt().add_(group["eps"]).to(p.dtype)
                p.addcdiv_(gradient, root.expand_as(p), value=-group["lr"])
        return loss


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
        entry = {self._key: self._count} if self._count else {}
        return {**self.optimizer.state, **entry}

    @override
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        loss = super().step(closure)
        number, stage = self._position()
        number += 1
        if number > self.stages[stage].max_iters and stage + 1 < len(self.stages):
            stage += 1
        self._count = {"warmup": torch.tensor([number, stage], device="cpu")}
        self._set_lr()
        return loss

    @override
    def state_dict(self) -> dict[str, Any]:
        whole = super().state_dict()
        entry = {self.param_name: dict(self._count)} if self._count else {}
        return whole | {"state": whole["state"] | entry}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        entry = state_dict["state"].get(self.param_name)
        count = {} if entry is None else {"warmup": torch.as_tensor(entry["warmup"]).clone()}
        if count and not 0 <= int(count["warmup"][1]) < len(self.stages):
            raise ConfigError(
                f"the state of {self.param_name} is in stage {int(count['warmup'][1])}, and "
                f"there are {len(self.stages) - 1} here: give the stages of the saved optimiser"
            )
        super().load_state_dict(state_dict)
        self._count = count
        self._set_lr()

    def _position(self) -> tuple[int, int]:
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
    for number, user_stage in enumerate(stages):
        where = f"stages[{number}]"
        if not isinstance(user_stage, WarmupStage):
            raise ConfigError(f"{where} is a {type(user_stage).__name__}: give a WarmupStage")
        if user_stage.max_iters <= (before := whole[-1].max_iters if whole else 0):
            raise ConfigError(
                f"{where}.max_iters={user_stage.max_iters}: must be above {before}, the end of the "
                "stage before it: max_iters counts from the beginning of training"
            )
        length = 1 if user_stage.policy is WarmupPolicy.STEP else user_stage.max_iters
        stage = replace(
            user_stage, decay_iters=user_stage.decay_iters if user_stage.decay_iters > 0 else length
        )
        _check_factor(where, stage, first)
        whole.append(stage)
        first = stage.max_iters + 1
    return [*whole, WarmupStage(WarmupPolicy.NONE, max_iters=1 << 63)]


def _check_factor(where: str, stage: WarmupStage, first: int) -> None:
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
