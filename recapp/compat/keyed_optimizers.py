"""TorchRec's wrappers of keyed optimisers: one makes a torch optimiser keyed by parameter names,
one combines several optimisers.

    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])

Names and argument order are those of `torchrec/optim/keyed.py`. The wrappers of keyed optimisers
(`recapp/compat/warmup_optimizer.py`, `recapp/compat/clipping_optimizer.py`) are keyed as well.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recapp.errors import ConfigError
from recapp.optim.keyed import KeyedOptimizer
from recapp.optim.optimizer import run_closure
from recapp.optim.table_gradients import TableGradients


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
        """Clear the gradients."""
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
        """Return the parameters of all optimisers by name, with prefixes."""
        return {
            self.prepend_opt_key(name, prefix): parameter
            for prefix, one in self._optimizers
            for name, parameter in one.params.items()
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the live param groups of all optimisers."""
        return [group for _, one in self._optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Return a new dict of the state of all optimisers, by parameter."""
        return {p: values for _, one in self._optimizers for p, values in one.state.items()}

    @property
    def table_gradients(self) -> list[TableGradients]:
        """Return the row gradients of the tables of all optimisers."""
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
        """Clear the gradients of every optimiser."""
        for _, one in self._optimizers:
            one.zero_grad(set_to_none)

    def save_param_groups(self, save: bool) -> None:
        """Set for every optimiser whether its state dict has param groups."""
        self.saves_groups = save
        for _, one in self._optimizers:
            one.save_param_groups(save)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all optimisers, with prefixes."""
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
        """Load a result of `state_dict`.

        Raises:
            ConfigError: The parameters, their state or the param groups differ.
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
        """Call `post_load_state_dict` of every optimiser."""
        for _, one in self._optimizers:
            one.post_load_state_dict()

    def __repr__(self) -> str:
        inner = [f"{prefix}: {one}" if prefix else str(one) for prefix, one in self._optimizers]
        return f"CombinedOptimizer({', '.join(inner)})"


def _check_count(state_dict: Mapping[str, Any], own: int) -> None:
    """Check that a state dict has `own` param groups, as many as the optimiser."""
    found = len(state_dict.get("param_groups", ()))
    if found != own:
        raise ConfigError(f"the state has {found} param groups, this optimiser {own}")


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
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the live param groups of the wrapped optimiser."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """Return the live state of the wrapped optimiser."""
        return self.optimizer.state

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step the wrapped optimiser."""
        return self.optimizer.step(closure=closure)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`.

        Raises:
            ConfigError: The parameters, their state or the param groups differ.
        """
        self.optimizer.load_state_dict(state_dict)
        self.post_load_state_dict()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer})"


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
