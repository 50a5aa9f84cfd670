"""Optimisers whose state is keyed by the names of parameters, as TorchRec's are.

    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])

A state dict with names can be loaded whatever the order in which parameters were listed:

    {"state": {name: {...}}}                          and, after save_param_groups(True),
    {"param_groups": [{"params": [name, ...], "lr": ...}]}

Names and argument order are those of `torchrec/optim/keyed.py`. What wraps a keyed optimiser
(`recapp/optim/warmup.py`, `recapp/optim/clipping.py`) is one again. Under Lightning one
`HybridOptimizer` does this work (`recapp/optim/optimizer.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recapp.errors import ConfigError
from recapp.optim.keyed_state import copied, load_values, plain_state
from recapp.optim.optimizer import run_closure
from recapp.optim.table_gradients import TableGradients


class KeyedOptimizer(Optimizer):
    """An optimiser that knows the names of its parameters. What updates them is a subclass's
    `step`.

    Args:
        params: Parameters by name.
        state: State by parameter; it is shared and not copied.
        param_groups: Param groups, which are shared and not copied.

    Raises:
        ConfigError: State of something that is no parameter.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        state: Mapping[Any, Any],
        param_groups: Sequence[dict[str, Any]],
    ) -> None:
        self._begin()
        self.params = params
        self.state = state  # type: ignore[assignment]
        self.param_groups = param_groups  # type: ignore[assignment]
        held = {id(parameter) for parameter in params.values()}
        for key in state:
            if id(key) not in held:
                raise ConfigError(
                    f"All state keys must be params, which {_shown(key)} is not: a keyed optimiser "
                    "has state of its parameters alone"
                )

    def _begin(self) -> None:
        """Set what torch's optimisers keep beside parameters, without its copies of groups."""
        self.saves_groups = False
        super().__setstate__({"defaults": {}})

    def __getstate__(self) -> dict[str, Any]:
        """Return everything that is pickled: names and parameters too."""
        return self.__dict__

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the parameters and their names were given when the optimiser was made.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"add_param_group: a {type(self).__name__} has the parameters that it was made with, "
            "by name: make a KeyedOptimizerWrapper of the others and combine both with "
            "CombinedOptimizer"
        )

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Run the closure once, then update the parameters.

        Raises:
            ConfigError: The class has no update of its own.
        """
        raise ConfigError(
            f"{type(self).__name__} has no step of its own: use KeyedOptimizerWrapper, or a "
            "subclass that defines step"
        )

    @property
    def table_gradients(self) -> list[TableGradients]:
        """Return the gradients of table rows that this optimiser's step can wait for; there are
        some where it has `fused_optimizer`s of sharded models.
        """
        return []

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Let the optimiser make the state that it makes in its first step, by a step with
        gradients of zeros: then a checkpoint's values can be copied into it.

        Args:
            sparse_grad_parameter_names: Parameters whose gradients are sparse tensors.

        Raises:
            ConfigError: A name that is no parameter.
        """
        sparse = sparse_grad_parameter_names or set()
        for name in sorted(sparse - self.params.keys()):
            raise ConfigError(f"sparse_grad_parameter_names has {name}, which is not optimised")
        for name, parameter in self.params.items():
            if isinstance(parameter, Tensor) and parameter.requires_grad:
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros.to_sparse() if name in sparse else zeros
        self.step(closure=None)

    def save_param_groups(self, save: bool) -> None:
        """Say whether param groups, with their learning rates, are in state dicts and are loaded
        from them; without a call they are not.
        """
        self.saves_groups = save

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter names, and the param groups with names if they are
        wanted.
        """
        names = {id(parameter): name for name, parameter in self.params.items()}
        state = {names[id(p)]: plain_state(values) for p, values in self.state.items()}
        return {"state": state} | self._stored_groups()

    def _stored_groups(self) -> dict[str, Any]:
        """Return the param groups as a state dict has them; nothing where it has none."""
        if not self.saves_groups:
            return {}
        groups = [
            {key: deepcopy(value) for key, value in group.items() if key != "params"}
            | {"params": self.names_of(group)}
            for group in self.param_groups
        ]
        return {"param_groups": groups}

    def names_of(self, group: Mapping[str, Any]) -> list[str]:
        """Return the sorted names of the parameters of a param group."""
        names = {id(parameter): name for name, parameter in self.params.items()}
        return sorted(names[id(parameter)] for parameter in group["params"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. A parameter that has no state yet gets a copy.

        Raises:
            ConfigError: Parameters, values of their state or param groups that differ.
        """
        stored = state_dict["state"]
        self.check_names(stored)
        for name, parameter in self.params.items():
            if parameter in self.state:
                load_values(self.state[parameter], stored[name], name)
            elif name in stored:
                self.state[parameter] = copied(stored[name], getattr(parameter, "device", None))
        self.load_groups(state_dict)
        self.post_load_state_dict()

    def post_load_state_dict(self) -> None:
        """Do what is to follow a load; here nothing."""

    def check_names(self, stored: Mapping[str, Any]) -> None:
        """Check that a state is that of this optimiser's parameters.

        Raises:
            ConfigError: It has a parameter that is not here, or nothing of one that has state.
        """
        for name in stored:
            if name not in self.params:
                raise ConfigError(f"the state has the parameter {name}, which is not optimised")
        held = {id(parameter) for parameter in self.state}
        for name, parameter in self.params.items():
            if name not in stored and id(parameter) in held:
                raise ConfigError(
                    f"the state has nothing of parameter {name}, which has state here"
                )

    def load_groups(self, state_dict: Mapping[str, Any]) -> None:
        """Load the param groups of a state dict, if they are saved: each is found by the names of
        its parameters.

        Raises:
            ConfigError: Groups or keys of a group that differ.
        """
        if not self.saves_groups:
            return
        if "param_groups" not in state_dict:
            raise ConfigError(
                "the state has no param_groups: call save_param_groups(True) before state_dict, or "
                "save_param_groups(False) before load_state_dict"
            )
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ConfigError(
                f"the state has {len(groups)} param groups, this optimiser {len(self.param_groups)}"
            )
        of_names = {tuple(sorted(group["params"])): group for group in groups}
        for own in self.param_groups:
            names = self.names_of(own)
            group = of_names.get(tuple(names))
            if group is None:
                raise ConfigError(f"the state has no param group of {', '.join(names)}")
            self._load_group(own, group)

    def _load_group(self, own: dict[str, Any], group: Mapping[str, Any]) -> None:
        for key in own:
            if key not in group:
                raise ConfigError(
                    f"the state's param group of {', '.join(group['params'])} has no {key}"
                )
        # names and tables of a rule's group are those of this run
        kept = ("params", "name", "tables")
        own.update({key: deepcopy(value) for key, value in group.items() if key not in kept})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.params)} parameters)"


def _shown(key: Any) -> str:
    return f"a tensor {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)


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
        ConfigError: Two parameters of one name, or optimisers of which some save param groups and
            some do not.
    """

    def __init__(self, optims: list[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optimizers = [
            ("", one) if isinstance(one, KeyedOptimizer) else (one[0], one[1]) for one in optims
        ]
        self._begin()
        found: set[str] = set()
        for prefix, one in self._optimizers:
            for name in one.params:
                if (whole := self.prepend_opt_key(name, prefix)) in found:
                    raise ConfigError(
                        f"two optimisers have a parameter {whole}: give the optimisers names, "
                        '[("dense", ...), ...]'
                    )
                found.add(whole)
        saves = {one.saves_groups for _, one in self._optimizers}
        if len(saves) > 1:
            raise ConfigError(
                "some optimisers save param groups and some do not: combine them first, then call "
                "save_param_groups on the whole"
            )
        self.saves_groups = True in saves

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """Return the optimisers and the prefix of each, which may be empty."""
        return self._optimizers

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """Return a parameter's name with the name of its optimiser in front."""
        return ".".join(part for part in (opt_key, name) if part)

    @property
    def params(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Return the parameters of all by name, with prefixes."""
        return {
            self.prepend_opt_key(name, prefix): parameter
            for prefix, one in self._optimizers
            for name, parameter in one.params.items()
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the live param groups of all."""
        return [group for _, one in self._optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Return the state of all by parameter, collected now."""
        return {p: values for _, one in self._optimizers for p, values in one.state.items()}

    @property
    def table_gradients(self) -> list[TableGradients]:
        """Return the gradients of table rows of all."""
        return [gradients for _, one in self._optimizers for gradients in one.table_gradients]

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Run the closure once, then step every optimiser."""
        loss = run_closure(closure)
        for _, one in self._optimizers:
            one.step(closure=None)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of every optimiser."""
        for _, one in self._optimizers:
            one.zero_grad(set_to_none)

    def save_param_groups(self, save: bool) -> None:
        """Say of every optimiser whether param groups are in state dicts."""
        self.saves_groups = save
        for _, one in self._optimizers:
            one.save_param_groups(save)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all, with prefixes."""
        whole: dict[str, Any] = {"state": {}}
        for prefix, one in self._optimizers:
            held = one.state_dict()
            for name, values in held["state"].items():
                whole["state"][self.prepend_opt_key(name, prefix)] = values
            for group in held.get("param_groups", ()):
                names = [self.prepend_opt_key(name, prefix) for name in group["params"]]
                whole.setdefault("param_groups", []).append({**group, "params": names})
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ConfigError: Parameters, values of their state or param groups that differ.
        """
        self.check_names(state_dict["state"])
        if self.saves_groups:
            _check_count(state_dict, len(self.param_groups))
        for prefix, one in self._optimizers:
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

    def post_load_state_dict(self) -> None:
        """Let every optimiser do what is to follow a load."""
        for _, one in self._optimizers:
            one.post_load_state_dict()

    def __repr__(self) -> str:
        inner = [f"{prefix}: {one}" if prefix else str(one) for prefix, one in self._optimizers]
        return f"CombinedOptimizer({', '.join(inner)})"


def _check_count(state_dict: Mapping[str, Any], own: int) -> None:
    """Check that a state dict has as many param groups as an optimiser."""
    found = len(state_dict.get("param_groups", ()))
    if found != own:
        raise ConfigError(f"the state has {found} param groups, this optimiser {own}")


class OptimizerWrapper(KeyedOptimizer):
    """A keyed optimiser that does something around another one's step; this class does nothing.

    Args:
        optimizer: The keyed optimiser; its parameters, state and param groups are this one's.

    Raises:
        ConfigError: It is no keyed optimiser.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        if not isinstance(optimizer, KeyedOptimizer):
            raise ConfigError(
                f"{type(self).__name__} got a {type(optimizer).__name__}: wrap it first, "
                "KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: ...)"
            )
        self.optimizer = optimizer
        self._begin()

    @property
    def params(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Return the parameters of the wrapped optimiser."""
        return self.optimizer.params

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the live param groups of the wrapped optimiser."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """Return the state of the wrapped optimiser."""
        return self.optimizer.state

    @property
    def table_gradients(self) -> list[TableGradients]:
        """Return the gradients of table rows of the wrapped optimiser."""
        return self.optimizer.table_gradients

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step the wrapped optimiser."""
        return self.optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def save_param_groups(self, save: bool) -> None:
        """Say of the wrapped optimiser whether param groups are in state dicts."""
        self.saves_groups = save
        self.optimizer.save_param_groups(save)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimiser's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ConfigError: Parameters, values of their state or param groups that differ.
        """
        self.optimizer.load_state_dict(state_dict)
        self.post_load_state_dict()

    def post_load_state_dict(self) -> None:
        """Let the wrapped optimiser do what is to follow a load."""
        self.optimizer.post_load_state_dict()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer})"


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
