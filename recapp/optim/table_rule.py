"""The row rule of a model's tables. A user names it in one of three ways:

    sharders=[EmbeddingBagCollectionSharder(rule)]
    _apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
    torch.optim.Adam(module.parameters(), 0.1)      in a LightningModule

Tables whose weight does not require a gradient are frozen: they get the rule `FROZEN`.

    collection.requires_grad_(False)

The second call comes before the collection is sharded. Tables are updated by a row rule
(`recapp/optim/rules.py`). So an optimiser of torch becomes the rule that computes the same update,
or is refused. No optimiser that a user names is ignored in silence.

An optimiser in backward stands for TorchRec's fused optimiser, which updates touched rows alone. An
optimiser over parameters is torch's, which visits all rows where its moments or `weight_decay` move
them (`l2_all_rows`).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recapp.errors import ConfigError
from recapp.optim.named_rules import Rules, distinct_rules, is_rules, rule_of, with_frozen
from recapp.optim.rules import (
    FROZEN,
    RowRule,
    adagrad,
    adam,
    momentum_sgd,
    rowwise_adagrad,
    sgd,
)
from recapp.tables.collections import UnshardedCollection

# Entries of a param group that change no result (dampening acts on momentum alone).
_WITHOUT_EFFECT = ("params", "dampening", "foreach", "fused", "capturable", "differentiable")


def table_rule(module: nn.Module, sharders: Sequence[Any] | None = None) -> Rules | None:
    """Find the row rule, or the rules by table, that the user has named.

    Args:
        module: A model whose collections are not sharded yet.
        sharders: The argument of `DistributedModelParallel`.

    Returns:
        The rule of all tables, or rules by table; None if the user named none.

    Raises:
        ConfigError: Sharders cannot be used, an optimiser is no row rule, or two named rules
            differ.
    """
    from_sharders = rule_of_sharders(sharders)
    in_backward = rule_in_backward(module)
    if from_sharders and in_backward:
        check_same_rule(in_backward, from_sharders, "sharders")
    return from_sharders or in_backward


def with_frozen_of(rules: Rules, module: nn.Module) -> Rules:
    """Return row rules in which the frozen tables of a model have the rule `FROZEN`.

    Args:
        rules: The rule of all tables, or rules by table name or glob.
        module: A model whose collections may be sharded or not.
    """
    frozen = [
        t.name
        for part in module.modules()
        if isinstance(part, UnshardedCollection)
        for t in part.tables()
        if not part.weight(t.name).requires_grad
    ]
    return with_frozen(rules, frozen)


def check_same_rule(in_backward: Rules, other: Rules, who: str) -> None:
    """Check that a rule does not contradict the optimiser applied in backward.

    Args:
        in_backward: The rule of the optimiser applied in backward, or rules by table.
        other: The rule, or rules by table, named elsewhere.
        who: The argument that named it, for the message.

    Raises:
        ConfigError: The rules differ; the message names both.
    """
    if isinstance(in_backward, Mapping):
        same = all(rule_of(other, t) in (rule, FROZEN) for t, rule in in_backward.items())
    elif isinstance(other, Mapping):
        same = all(rule in (in_backward, FROZEN) for rule in other.values())
    else:
        same = in_backward == other
    if not same:
        raise ConfigError(
            f"the tables have {describe(in_backward)} by apply_optimizer_in_backward, "
            f"but {describe(other)} by {who}: say one of them"
        )


def rule_of_sharders(sharders: Sequence[Any] | None) -> Rules | None:
    """Return the one rule, or the rules by table, that sharders name; None if they name none.

    Raises:
        ConfigError: The argument is no list, is empty, has an entry that is no sharder, or has
            sharders that differ.
    """
    if sharders is None:
        return None
    use = "pass sharders=[EmbeddingBagCollectionSharder(rule)], or leave sharders out"
    if not isinstance(sharders, Sequence):
        raise ConfigError(f"sharders is a {type(sharders).__name__}, not a list: {use}")
    if not sharders:
        raise ConfigError(f"sharders=[]: with none of them no table would be sharded: {use}")
    rules: list[Rules | None] = []
    for number, sharder in enumerate(sharders):
        rule: Any = getattr(sharder, "rule", "it has none")
        if not is_rules(rule):
            raise ConfigError(
                f"sharders[{number}] is a {type(sharder).__name__}, no sharder: {use}"
            )
        rules.append(rule)
        if rule != rules[0]:
            raise ConfigError(
                f"sharders[0] has {describe(rules[0])} and sharders[{number}] {describe(rule)}: "
                "one sharder shards all tables of a model, so pass one"
            )
    return rules[0]


def rule_in_backward(module: nn.Module) -> Rules | None:
    """Return the rule of the optimisers that `_apply_optimizer_in_backward` set.

    That function leaves an optimiser on the weights of a model's tables. Frozen tables have none.

    Returns:
        The row rule that computes the same update of touched rows, or the rule of each table if
        they differ; None if no table has such an optimiser.

    Raises:
        ConfigError: No row rule has an optimiser or argument, or only some tables have an
            optimiser.
    """
    collections = [m for m in module.modules() if isinstance(m, UnshardedCollection)]
    weights = {t.name: c.weight(t.name) for c in collections for t in c.tables()}
    rules = {name: _rule_on(name, w) for name, w in weights.items() if w.requires_grad}
    if not any(rules.values()):
        return None
    first = next(name for name, rule in rules.items() if rule)
    for name, rule in rules.items():
        if rule is None:
            raise ConfigError(
                f"table {first} has {describe(rules[first])} by apply_optimizer_in_backward and "
                f"table {name} no rule: all tables of a model follow some rule, so apply one to "
                "each of them"
            )
    rule_of_table = {name: rule for name, rule in rules.items() if rule}
    return (
        rule_of_table if len(distinct_rules(rule_of_table.values())) > 1 else rule_of_table[first]
    )


def _rule_on(table: str, weight: Tensor) -> RowRule | None:
    """Return the rule of the optimiser on one table's weight; None if there is no optimiser."""
    optimizers: list[Optimizer] = getattr(weight, "_in_backward_optimizers", [])
    if not optimizers:
        return None
    if len(optimizers) > 1:
        names = " and ".join(type(o).__name__ for o in optimizers)
        raise ConfigError(f"table {table} has {names} by apply_optimizer_in_backward: apply one")
    (optimizer,) = optimizers
    kind = type(optimizer)
    group = optimizer.param_groups[0]
    kind_of_rule = _KINDS.get(kind) or _of_rowwise_adagrad(kind)
    if kind_of_rule is None:
        raise ConfigError(
            f"table {table} has {kind.__name__} by apply_optimizer_in_backward, "
            f"which is no row rule: {_ALLOWED}"
        )
    for name, value in _not_in_rule(kind, group, kind_of_rule):
        raise ConfigError(
            f"table {table} has {kind.__name__} with {name}={value} by "
            "apply_optimizer_in_backward, which would reach rows that no id touched or is no "
            f"part of the row rule: {_ALLOWED}"
        )
    return _rule_from(kind_of_rule, group)


def rule_over(kind: type[Optimizer], group: Mapping[str, Any], table: str) -> RowRule:
    """Return the row rule that updates a table as an optimiser of torch does that has the table as
    a parameter. The learning rate is that before any schedule.

    Args:
        kind: The class of the optimiser.
        group: The param group of the table.
        table: The name of the table, for the error.

    Raises:
        ConfigError: No row rule computes the same update.
    """
    kind_of_rule = _KINDS_OF_PARAMETERS.get(kind) or _of_rowwise_adagrad(kind)
    others = [] if kind_of_rule is None else _not_in_rule(kind, group, kind_of_rule)
    if group.get("momentum") and group.get("dampening"):
        others.append(("dampening", group["dampening"]))
    if kind_of_rule is None or others:
        argument = "".join(f" with {name}={value}" for name, value in others[:1])
        raise ConfigError(
            f"table {table} has {kind.__name__}{argument} by configure_optimizers, and no row rule "
            f"computes its update: {_ALLOWED_OF_PARAMETERS}"
        )
    return _rule_from(kind_of_rule, {**group, "lr": group.get("initial_lr", group["lr"])})


def numbers_of_rule(kind: type[Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a param group that `rule_over` reads, without the learning rate."""
    kind_of_rule = _KINDS_OF_PARAMETERS.get(kind) or _of_rowwise_adagrad(kind)
    return (
        {}
        if kind_of_rule is None
        else {name: group[name] for name in kind_of_rule[1] if name != "lr"}
    )


def _not_in_rule(
    kind: type[Optimizer], group: Mapping[str, Any], kind_of_rule: "_Kind"
) -> list[tuple[str, Any]]:
    """Return the arguments of an optimiser that its row rule does not have."""
    known = inspect.signature(kind).parameters
    return [
        (name, value)
        for name, value in group.items()
        if name in known and name not in kind_of_rule[1] and name not in _WITHOUT_EFFECT
        # with the default, an argument has no effect
        if value != (0 if name == "weight_decay" else known[name].default)
    ]


def _rule_from(kind_of_rule: "_Kind", group: Mapping[str, Any]) -> RowRule:
    make, read = kind_of_rule
    return make({name: group[name] for name in read})


_Group = Mapping[str, Any]
# A function that makes the rule, and the arguments that it reads.
_Kind = tuple[Callable[[_Group], RowRule], tuple[str, ...]]

_ALLOWED = (
    "use SGD(lr), Adagrad(lr, eps) or SparseAdam(lr, betas, eps) of torch.optim, "
    "RowWiseAdagrad(lr, eps) of recapp.optim or torchrec.optim, or name a rule of recapp in "
    "sharders"
)

_KINDS: dict[type[Optimizer], _Kind] = {
    torch.optim.SGD: (lambda group: sgd(float(group["lr"])), ("lr",)),
    torch.optim.Adagrad: (
        lambda group: adagrad(float(group["lr"]), float(group["eps"])),
        ("lr", "eps"),
    ),
    torch.optim.SparseAdam: (
        lambda group: adam(
            float(group["lr"]),
            float(group["betas"][0]),
            float(group["betas"][1]),
            float(group["eps"]),
        ),
        ("lr", "betas", "eps"),
    ),
}


def _l2(group: _Group) -> float | None:
    """Return the `l2_all_rows` of an optimiser without moments; None if it has no weight decay."""
    return float(group["weight_decay"]) or None


def _sgd_of_parameters(group: _Group) -> RowRule:
    lr = float(group["lr"])
    if not group["momentum"]:
        return sgd(lr, l2_all_rows=_l2(group))
    return momentum_sgd(lr, float(group["momentum"]), l2_all_rows=float(group["weight_decay"]))


def _adagrad_of_parameters(group: _Group) -> RowRule:
    start = float(group["initial_accumulator_value"])
    return adagrad(float(group["lr"]), float(group["eps"]), start, l2_all_rows=_l2(group))


def _adam_of_parameters(group: _Group) -> RowRule:
    beta1, beta2 = map(float, group["betas"])
    l2 = float(group.get("weight_decay", 0))
    return adam(float(group["lr"]), beta1, beta2, float(group["eps"]), l2_all_rows=l2)


_KINDS_OF_PARAMETERS: dict[type[Optimizer], _Kind] = {
    torch.optim.SGD: (_sgd_of_parameters, ("lr", "momentum", "weight_decay")),
    torch.optim.Adagrad: (
        _adagrad_of_parameters,
        ("lr", "eps", "initial_accumulator_value", "weight_decay"),
    ),
    torch.optim.Adam: (_adam_of_parameters, ("lr", "betas", "eps", "weight_decay")),
    # its decay is decoupled and reaches all rows, so it is not read, and only 0 has no effect
    torch.optim.AdamW: (_adam_of_parameters, ("lr", "betas", "eps")),
    torch.optim.SparseAdam: _KINDS[torch.optim.SparseAdam],
}

_ALLOWED_OF_PARAMETERS = (
    "use SGD, Adagrad, Adam or SparseAdam of torch.optim, or name the rule of tables by "
    "EmbeddingShardingStrategy(rule=recapp.adam(0.001)) and return "
    "HybridOptimizer(optimizer, self.trainer.strategy.sparse_groups())"
)


def _of_rowwise_adagrad(kind: type[Optimizer]) -> _Kind | None:
    """Return the rule's function and arguments for `RowWiseAdagrad` of TorchRec or of
    `recapp/compat/torchrec/optimizers.py`; None for any other optimiser.

    TorchRec's sharded tables compute it as FBGEMM does. The class is recognised by name, because
    neither module is imported here.
    """
    of_torchrec = kind.__module__.partition(".")[0] in ("torchrec", "recapp")
    if not of_torchrec or kind.__name__ != "RowWiseAdagrad":
        return None
    return lambda group: rowwise_adagrad(float(group["lr"]), float(group["eps"])), ("lr", "eps")


def describe(rule: Rules | None) -> str:
    """Return a readable text with a rule and its numbers, or with rules by table."""
    if rule is None:
        return "no rule"
    if isinstance(rule, Mapping):
        return (
            f"{{{', '.join(f'{name}: {describe(of_table)}' for name, of_table in rule.items())}}}"
        )
    constants = "".join(f", {number:g}" for number in rule.constants)
    if rule.decay:
        constants += f", {rule.decay:g}"
    return f"{rule.name}({rule.lr:g}{constants})"
