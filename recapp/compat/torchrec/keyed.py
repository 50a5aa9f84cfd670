"""An optimiser whose state is keyed by the names of parameters, that of sharded tables, and the
settings of fused kernels as row rules.

A state dict with names can be loaded whatever the order of the parameters:

    {"state": {name: {...}}}                          and, after save_param_groups(True),
    {"param_groups": [{"params": [name, ...], "lr": ...}]}

Names and argument order are those of `torchrec/optim/keyed.py`; the wrappers of that file are in
`recapp/compat/torchrec/optimizers.py`. Under Lightning `HybridOptimizer` replaces them
(`recapp/optim/optimizer.py`).

The state of a parameter is a dict whose values are numbers, tensors, sharded tensors, dicts of
these, or objects that have a `state_dict` of their own. Loading copies values into the existing
tensors, so every holder of such a tensor sees the loaded values.

`FusedOptimizer` is the `fused_optimizer` of sharded models. Backward updates the tables, so its
`step` and `zero_grad` do nothing, unless an optimiser that clips gradients defers the update
(`recapp/optim/optimizer.py`). The object serves everything else that a program does with an
optimiser: read and set the learning rate, print it, save and load its state with that of the dense
optimiser (`CombinedOptimizer`).

TorchRec's `fused_params`, the settings of its fused kernels, as row rules:

    fused_params={"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.02, "eps": 0.002}

The optimiser is a member of `EmbOptimType` (FBGEMM's own as well), its name or its value. An
omitted setting has FBGEMM's default. recapp adds `tables`: settings of single tables by name or
glob. They override the settings of all tables; with an `optimizer` of their own they replace them.

    fused_params={"learning_rate": 0.02, "tables": {"wide_*": {"optimizer": "adam"}}}
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from enum import Enum
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from recapp.engine.sharded_state import TableStrips, load_strips
from recapp.errors import ConfigError, suggest
from recapp.optim.named_rules import RULES, Rules, make_rule
from recapp.optim.optimizer import TableGradients, run_closure
from recapp.optim.rules import RowRule
from recapp.sharding.layout import Block
from recapp.tables.config import EmbeddingConfig


class KeyedOptimizer(Optimizer):
    """An optimiser that knows the names of its parameters. A subclass's `step` updates them.

    Args:
        params: Parameters by name.
        state: State by parameter, shared and not copied.
        param_groups: Param groups, shared and not copied.

    Raises:
        ConfigError: A key of `state` is no parameter.
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
        identities = {id(parameter) for parameter in params.values()}
        for key in state:
            if id(key) not in identities:
                shown = f"a tensor {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
                raise ConfigError(
                    f"All state keys must be params, which {shown} is not: a keyed optimiser "
                    "has state of its parameters alone"
                )

    def _begin(self) -> None:
        """Set the attributes that torch's optimisers have, without its copies of groups."""
        self.saves_groups = False
        super().__setstate__({"defaults": {}})

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse to add a group: the constructor fixes the parameters and their names.

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
            ConfigError: The subclass has no `step`.
        """
        raise ConfigError(
            f"{type(self).__name__} has no step of its own: use KeyedOptimizerWrapper, or a "
            "subclass that defines step"
        )

    @property
    def table_gradients(self) -> list[TableGradients]:
        """Return the gradients of table rows whose update this optimiser's step can end. Only an
        optimiser that holds a sharded model's `fused_optimizer` has some.
        """
        return []

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Make the state that the optimiser would make in its first step, by a step with zero
        gradients. Then a checkpoint's values can be copied into this state.

        Args:
            sparse_grad_parameter_names: Parameters whose gradients are sparse tensors.

        Raises:
            ConfigError: A name is no parameter's.
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
        """Set whether state dicts contain param groups, with their learning rates, and loading
        reads them. The default is that they do not.
        """
        self.saves_groups = save

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter names, and the param groups with names if
        `save_param_groups` asked for them.
        """
        names = {id(parameter): name for name, parameter in self.params.items()}
        state = {names[id(p)]: plain_state(values) for p, values in self.state.items()}
        return {"state": state} | self._stored_groups()

    def _stored_groups(self) -> dict[str, Any]:
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
        """Load a result of `state_dict`. A parameter without state gets a copy.

        Raises:
            ConfigError: Parameters, values of their state, or param groups differ.
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
        """Do the work that follows a load; this class has none."""

    def check_names(self, stored: Mapping[str, Any]) -> None:
        """Check that a stored state belongs to this optimiser's parameters.

        Raises:
            ConfigError: The stored state has a parameter that is not here, or lacks one that has
                state here.
        """
        for name in stored:
            if name not in self.params:
                raise ConfigError(f"the state has the parameter {name}, which is not optimised")
        with_state = {id(parameter) for parameter in self.state}
        for name, parameter in self.params.items():
            if name not in stored and id(parameter) in with_state:
                raise ConfigError(
                    f"the state has nothing of parameter {name}, which has state here"
                )

    def load_groups(self, state_dict: Mapping[str, Any]) -> None:
        """Load the param groups of a state dict, if they are saved. The names of a group's
        parameters identify the group.

        Raises:
            ConfigError: Groups, or keys of a group, differ.
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
        for target in self.param_groups:
            names = self.names_of(target)
            group = of_names.get(tuple(names))
            if group is None:
                raise ConfigError(f"the state has no param group of {', '.join(names)}")
            for key in target:
                if key not in group:
                    raise ConfigError(f"the state's param group of {', '.join(names)} has no {key}")
            # a rule's group keeps the name and tables of this run
            run_keys = ("params", "name", "tables")
            target.update(
                {key: deepcopy(value) for key, value in group.items() if key not in run_keys}
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.params)} parameters)"


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with objects replaced by their state dicts, at any depth.

    Args:
        state: The state of one parameter: its values by name.
    """
    plain: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            plain[name] = plain_state(value)
        elif _has(value, "state_dict"):
            plain[name] = value.state_dict()
        else:
            plain[name] = value
    return plain


@torch.no_grad()
def load_values(state: dict[str, Any], stored: Mapping[str, Any], path: str) -> None:
    """Copy stored values into a parameter's state.

    Args:
        state: The state, changed in place.
        stored: The result of `plain_state` for an equal state.
        path: The parameter's name, for errors.

    Raises:
        ConfigError: The state has other values, or tensors of other shapes.
    """
    if not isinstance(stored, Mapping):
        raise ConfigError(f"state of {path} is a {type(stored).__name__}: give a dict")
    if state.keys() != stored.keys():
        raise ConfigError(
            f"state of {path} has {', '.join(map(str, stored)) or 'nothing'}, this optimiser "
            f"{', '.join(map(str, state)) or 'nothing'}: the two optimisers differ"
        )
    for name, value in state.items():
        state[name] = _loaded(value, stored[name], f"{path}, {name}")


def copied(stored: Any, device: torch.device | None) -> Any:
    """Return a copy of a stored value for a parameter that has no state yet.

    Args:
        stored: A value, or a dict of values.
        device: The device of the copied tensors. Step counts, which have no dimensions, stay on
            their device.
    """
    if isinstance(stored, Mapping):
        return {name: copied(value, device) for name, value in stored.items()}
    if isinstance(stored, Tensor):
        return stored.detach().clone().to(device if stored.dim() else stored.device)
    return deepcopy(stored)


def _loaded(target: Any, stored: Any, path: str) -> Any:
    """Return the loaded value: the held object with the stored content where possible, else a new
    one.
    """
    if isinstance(target, dict):
        load_values(target, stored, path)
    elif _has(target, "load_state_dict"):
        target.load_state_dict(stored)
    elif _has(target, "local_shards"):
        _load_shards(target, stored, path)
    elif isinstance(target, Tensor):
        _copy(target, stored, path)
    else:
        return deepcopy(stored)
    return target


def _load_shards(target: Any, stored: Any, path: str) -> None:
    if not _has(stored, "local_shards"):
        raise ConfigError(f"state of {path} is a {type(stored).__name__}: give a sharded tensor")
    shards = target.local_shards()
    stored_shards = stored.local_shards()
    if len(shards) != len(stored_shards):
        raise ConfigError(
            f"state of {path} has {len(stored_shards)} shards on this rank, this optimiser "
            f"{len(shards)}: "
            "load it under the plan that it was saved under"
        )
    for number, (shard, other) in enumerate(zip(shards, stored_shards, strict=True)):
        _copy(shard.tensor, other.tensor, f"{path}, shard {number}")


def _copy(target: Tensor, stored: Any, path: str) -> None:
    if not isinstance(stored, Tensor):
        raise ConfigError(f"state of {path} is a {type(stored).__name__}: give a tensor")
    if target.shape != stored.shape:
        raise ConfigError(
            f"state of {path} has shape {tuple(stored.shape)}, this optimiser {tuple(target.shape)}"
        )
    if target.layout != stored.layout:
        raise ConfigError(f"state of {path} is {stored.layout}, this optimiser's {target.layout}")
    target.detach().copy_(stored)


def _has(value: Any, method: str) -> bool:
    return callable(getattr(value, method, None))


class FusedOptimizer(KeyedOptimizer):
    """The fused updates of some sharded collections.

    `param_groups` are the live param groups: a learning rate that a user or a schedule sets there
    applies from the next backward on. `params` has the config of each table by the name of its
    weight in the unsharded model.

    Args:
        collections: Sharded collections by path. The path is empty where the model itself is the
            collection.

    Raises:
        ConfigError: The tables are read-only.
    """

    def __init__(self, collections: Mapping[str, Any]) -> None:
        self.collections = dict(collections)
        params = {
            _name(path, collection, table.name): table
            for path, collection in self.collections.items()
            for table in _updated_here(collection)
        }
        self.shared = list(dict.fromkeys(c.shared for c in self.collections.values()))
        groups = [group for shared in self.shared for group in shared.param_groups]
        super().__init__(params, {}, groups)

    @property
    def parts(self) -> list[Optimizer]:
        """No optimisers: backward updates the tables."""
        return []

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Run the closure once, and update the tables if their update was deferred. Else backward
        has updated them. Every rank calls it.
        """
        loss = run_closure(closure)
        for gradients in self.table_gradients:
            gradients.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a deferred update. Without one, tables have no gradients."""
        for gradients in self.table_gradients:
            gradients.drop()

    @property
    @override
    def table_gradients(self) -> list[TableGradients]:
        return [shared.update for shared in self.shared]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's strips of the optimiser's state. Every rank calls it.

        Each tensor consists of strips, as tables do in the state dict of the model. `updates` is
        the number of updates of the table.
        """
        state: dict[str, dict[str, Any]] = {}
        for path, collection in self.collections.items():
            configs = {table.name: table for table in collection.tables()}
            for table, tensors in _state_blocks(collection).items():
                shared = collection.shared
                table_state: dict[str, Any] = {
                    part: TableStrips.of(
                        blocks,
                        configs[table],
                        blocks[0].shape[1],
                        shared.state.layout,
                        shared.comm.rank,
                    )
                    for part, blocks in tensors.items()
                }
                table_state[_UPDATES] = torch.tensor(collection.shared.updates, device="cpu")
                state[_name(path, collection, table)] = table_state
        return {"state": state} | self._stored_groups()

    @override
    def names_of(self, group: Mapping[str, Any]) -> list[str]:
        return sorted(
            _name(path, collection, table)
            for path, collection in self.collections.items()
            if any(group is param_group for param_group in collection.shared.param_groups)
            for table in (t.name for t in collection.tables())
            if table in group["tables"]
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict` on a rank that holds the same rectangles, or load whole
        tensors. Every rank calls it.

        Raises:
            ConfigError: A table is missing, or its state does not fit.
        """
        self.check_names(state_dict["state"])
        for path, collection in self.collections.items():
            for table, tensors in _state_blocks(collection).items():
                weight = _name(path, collection, table)
                stored = state_dict["state"].get(weight, {})
                for name, blocks in tensors.items():
                    if name not in stored:
                        raise ConfigError(f"the state has no entry for {weight}, {name}")
                    first = blocks[0]
                    fault = load_strips(stored[name], blocks, first.shape, first.data.dtype)
                    if fault:
                        raise ConfigError(f"{weight}, {name}: {fault}")
                if _UPDATES not in stored:
                    raise ConfigError(f"the state has no entry for {weight}, {_UPDATES}")
                collection.shared.updates = int(stored[_UPDATES])
        self.load_groups(state_dict)

    def __repr__(self) -> str:
        groups = ", ".join(f"{g['name']}, lr {g['lr']:g}" for g in self.param_groups)
        return f"FusedOptimizer({len(self.params)} tables: {groups})"


_UPDATES = "updates"
"""The entry of a table's state that counts its updates."""


def _name(path: str, collection: Any, table: str) -> str:
    return f"{path}.{collection.weight_name(table)}".removeprefix(".")


def _updated_here(collection: Any) -> list[EmbeddingConfig]:
    return [t for t in collection.tables() if t.name not in collection.parameters_of]


def _state_blocks(collection: Any) -> dict[str, dict[str, list[Block]]]:
    """Return this rank's blocks of the optimiser's state, by table and by tensor.

    Raises:
        ConfigError: A table is dynamic.
    """
    for table in _updated_here(collection):
        if table.dynamic is not None:
            raise ConfigError(
                f"table {table.name} is dynamic: the state of its rows is in checkpoints and not "
                "in state dicts: save it with recapp.stored.checkpoint.write_checkpoint"
            )
    blocks: dict[str, dict[str, list[Block]]] = {t.name: {} for t in _updated_here(collection)}
    for block in collection.blocks():
        if block.tensor != "weight":
            blocks[block.table].setdefault(block.tensor, []).append(block)
    return blocks


_FIELDS = {"learning_rate": "lr", "initial_accumulator_value": "initial_accumulator"}
"""The name of a parameter's field in the rule, where the two differ."""
_DEFAULTS = {"learning_rate": 0.01, "eps": 1e-8}
"""FBGEMM's defaults, where they differ from the rule's."""
_DECOUPLED = ("decouple", "2", "weightdecaymode.decouple", "none", "0", "weightdecaymode.none")
"""Values of `weight_decay_mode` that stand for the decay of row rules."""


class EmbOptimType(Enum):
    """The fused optimisers of FBGEMM that are row rules here. FTRL and SGD with momentum are
    recapp's own; FBGEMM has neither.
    """

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    ADAM = "adam"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    LAMB = "lamb"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    LARS_SGD = "lars_sgd"
    FTRL = "ftrl"
    MOMENTUM_SGD = "momentum_sgd"


_RULE_NAMES = {
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
}
"""The name of an optimiser's rule, where the two differ."""


def rules_of_fused_params(fused_params: Mapping[str, Any]) -> Rules:
    """Return the row rule that fused parameters name, or rules by table if they have `tables`.

    Args:
        fused_params: The parameters of `rule_of_fused_params`, and `tables`: the same parameters by
            table name or glob.

    Raises:
        ConfigError: The optimiser is no row rule, or does not have a parameter.
    """
    others = {name: value for name, value in fused_params.items() if name != "tables"}
    rule = rule_of_fused_params(others)
    tables = fused_params.get("tables")
    if tables is None:
        return rule
    where = "fused_params['tables']"
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{where} is a {type(tables).__name__}: give a dict by table or glob")
    rules = {"*": rule}
    for table, params in tables.items():
        entry = f"{where}[{table!r}]"
        if not isinstance(params, Mapping):
            raise ConfigError(f'{entry}={params}: give a dict such as {{"learning_rate": 0.1}}')
        whole = dict(params) if "optimizer" in params else others | dict(params)
        rules[str(table)] = rule_of_fused_params(whole, entry)
    return rules


def rule_of_fused_params(fused_params: Mapping[str, Any], setting: str = "fused_params") -> RowRule:
    """Return the row rule that fused parameters name.

    Args:
        fused_params: `optimizer`, `learning_rate`, `eps`, `beta1`, `beta2`, `momentum`, `eta`,
            `weight_decay`, `initial_accumulator_value`, ...: the parameters of the optimiser.
        setting: The setting that holds the parameters, for errors.

    Raises:
        ConfigError: The optimiser is no row rule, does not have a parameter, or a parameter may not
            have its value.
    """
    params: dict[str, Any] = dict(fused_params)
    kind = _kind_of(params.pop("optimizer", EmbOptimType.EXACT_SGD), setting)
    rule = _RULE_NAMES.get(kind, kind.value)
    names = {field: name for name, field in _FIELDS.items()}
    allowed = [names.get(field, field) for field in signature(RULES[rule]).parameters]
    mode = params.pop("weight_decay_mode", "none") if "weight_decay" in allowed else "none"
    if str(mode).lower() not in _DECOUPLED:
        raise ConfigError(
            f"{setting}['weight_decay_mode']={mode}: weight decay is decoupled here "
            "(WeightDecayMode.DECOUPLE): leave it out, or set weight_decay to 0"
        )
    for name in params:
        if name not in allowed:
            raise ConfigError(
                f"{setting}[{name!r}]: {kind.name} reads optimizer, {', '.join(allowed)}; "
                "leave it out, or name a rule of recapp: EmbeddingBagCollectionSharder(rule=...)"
            )
    defaults = {name: value for name, value in _DEFAULTS.items() if name in allowed}
    fields = {_FIELDS.get(name, name): value for name, value in {**defaults, **params}.items()}
    try:
        return make_rule({"rule": rule} | fields, setting)
    except ConfigError as error:
        field, _, text = str(error).removeprefix(f"{setting}.").partition("=")
        raise ConfigError(f"{setting}[{names.get(field, field)!r}]={text}") from None


def _kind_of(optimizer: Any, setting: str) -> EmbOptimType:
    name = optimizer.name if isinstance(optimizer, Enum) else str(optimizer)
    for kind in EmbOptimType:
        if name.lower() in (kind.name.lower(), kind.value):
            return kind
    known = [kind.name for kind in EmbOptimType]
    raise ConfigError(f"{setting}['optimizer']={name}: {suggest(name, known)}")
