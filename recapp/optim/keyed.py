"""Optimisers whose state is keyed by the names of parameters, as TorchRec's are.

    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])

A state dict with names can be loaded whatever the order in which parameters were listed:

    {"state": {name: {...}}, "param_groups": [{"params": [name, ...], "lr": ...}]}

Names and argument order are those of `torchrec/optim/keyed.py`. Under Lightning one
`HybridOptimizer` does this work (`recapp/optim/optimizer.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recapp.errors import ConfigError
from recapp.optim.optimizer import run_closure


class KeyedOptimizer(Optimizer, ABC):
    """An optimiser that knows the names of its parameters.

    Args:
        params: Parameters by name.
        state: State by parameter.
        param_groups: Param groups, which are shared and not copied.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        state: Mapping[Any, Any],
        param_groups: Sequence[dict[str, Any]],
    ) -> None:
        super().__init__(param_groups, {})
        self.params = dict(params)
        self.state = state  # type: ignore[assignment]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the very dict that the update reads, not a copy."""
        self.param_groups.append(param_group)

    @abstractmethod
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Run the closure once, then update the parameters."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter names, and the param groups with names."""
        names = {id(p): name for name, p in self.params.items()}
        groups = [
            {**group, "params": sorted(names[id(p)] for p in group["params"])}
            for group in self.param_groups
        ]
        state = {name: self.state[p] for name, p in self.params.items() if p in self.state}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ConfigError: Names of parameters or numbers of groups that differ.
        """
        self.check_fits(state_dict)
        for name, values in state_dict["state"].items():
            parameter = self.params[name]
            self.state[parameter] = {
                key: value.detach().clone().to(parameter.device) if _is_wide(value) else value
                for key, value in values.items()
            }
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in given.items() if key != "params"})

    def check_fits(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a state dict has this optimiser's parameters and param groups.

        Raises:
            ConfigError: It has a parameter that is not here, or another number of groups.
        """
        for name in state_dict["state"]:
            if name not in self.params:
                raise ConfigError(f"the state has the parameter {name}, which is not optimised")
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ConfigError(
                f"the state has {len(groups)} param groups, this optimiser {len(self.param_groups)}"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.params)} parameters)"


def _is_wide(value: Any) -> bool:
    """Return whether a value of a state is a tensor on its parameter's device; step counts are on
    the CPU.
    """
    return isinstance(value, Tensor) and value.dim() > 0


class KeyedOptimizerWrapper(KeyedOptimizer):
    """An optimiser of torch over named parameters.

    Args:
        params: Parameters by name.
        optim_factory: Makes the optimiser from the list of parameters.

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
                "KeyedOptimizerWrapper got no parameters: a model of tables alone needs none"
            )
        self.optimizer = optim_factory(list(params.values()))
        super().__init__(params, self.optimizer.state, self.optimizer.param_groups)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step the optimiser."""
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none)


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimisers as one.

    Args:
        optims: The optimisers, or pairs of a name and an optimiser; the name becomes the prefix of
            its parameters' names.

    Raises:
        ConfigError: Two parameters of one name.
    """

    def __init__(self, optims: Iterable[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self.optimizers = [
            ("", one) if isinstance(one, KeyedOptimizer) else (one[0], one[1]) for one in optims
        ]
        params: dict[str, Any] = {}
        for prefix, one in self.optimizers:
            for name, parameter in one.params.items():
                if (whole := _joined(prefix, name)) in params:
                    raise ConfigError(
                        f"two optimisers have a parameter {whole}: give the optimisers names, "
                        '[("dense", ...), ...]'
                    )
                params[whole] = parameter
        groups = [group for _, one in self.optimizers for group in one.param_groups]
        super().__init__(params, {}, groups)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Run the closure once, then step every optimiser."""
        loss = run_closure(closure)
        for _, one in self.optimizers:
            one.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of every optimiser."""
        for _, one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all, with prefixes."""
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for prefix, one in self.optimizers:
            held = one.state_dict()
            state |= {_joined(prefix, name): values for name, values in held["state"].items()}
            groups += [
                {**group, "params": [_joined(prefix, name) for name in group["params"]]}
                for group in held["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ConfigError: Names of parameters or numbers of groups that differ.
        """
        self.check_fits(state_dict)
        groups = list(state_dict["param_groups"])
        for prefix, one in self.optimizers:
            state = {
                name: state_dict["state"][whole]
                for name in one.params
                if (whole := _joined(prefix, name)) in state_dict["state"]
            }
            count = len(one.param_groups)
            one.load_state_dict({"state": state, "param_groups": groups[:count]})
            groups = groups[count:]

    def __repr__(self) -> str:
        inner = [f"{prefix}: {one}" if prefix else str(one) for prefix, one in self.optimizers]
        return f"CombinedOptimizer({', '.join(inner)})"


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that an optimiser in backward does not update.

    Args:
        named_parameters: Of a model, sharded or not. A sharded table is no parameter.
        include: Whether to yield those that one updates instead.
    """
    for name, parameter in named_parameters:
        if hasattr(parameter, "_in_backward_optimizers") == include:
            yield name, parameter
