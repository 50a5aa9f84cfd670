"""Row rules from the plain values of settings and plan files.

    {"rule": "adagrad", "lr": 0.05, "eps": 1e-10}    the function `adagrad` of recapp/optim/rules.py
    {"lr": 0.01}                                     the rule of all tables, at another rate

An omitted field has the default of the rule's function.

The row rule of each table: one rule for all tables, or rules by table name or glob.

    adagrad(0.05)                                             every table
    {"*": adagrad(0.05), "C3": sgd(0.1), "wide_*": ftrl()}    a name wins over a glob, of globs
                                                              the last

Every argument that takes a row rule takes rules by table as well. Tables of one rule share a param
group and its current learning rate, and one scheduler drives all groups.

A program names the row rule of a model's tables in one of three ways:

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
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recapp.errors import ConfigError, suggest
from recapp.optim import rules
from recapp.optim.rules import (
    FROZEN,
    RowRule,
    adagrad,
    adam,
    momentum_sgd,
    rowwise_adagrad,
    sgd,
)
from recapp.settings.values import shown
from recapp.tables.collections import UnshardedCollection
from recapp.tables.config import EmbeddingConfig, compute_type

Picked = TypeVar("Picked")
Rules = RowRule | Mapping[str, RowRule]
"""One rule for all tables, or rules by table name or glob."""
SETTING = "optimizer.sparse.tables"
"""The name of the setting, for errors."""
RESTARTS = "optimizer.restart_tables"
"""The name of the setting of tables that begin anew at each epoch, for errors."""
RULES: Mapping[str, Callable[..., RowRule]] = {
    make.__name__: make
    for make in (
        rules.sgd,
        rules.momentum_sgd,
        rules.adagrad,
        rules.rowwise_adagrad,
        rules.frequency_adagrad,
        rules.adam,
        rules.partial_row_wise_adam,
        rules.lamb,
        rules.partial_row_wise_lamb,
        rules.lars_sgd,
        rules.ftrl,
    )
}
"""The rules by name."""
TARGET = "_target_"
HOME = "recapp.optim.rules"


def is_rules(value: Any) -> bool:
    """Return whether a value is a row rule, a mapping of names to row rules, or None."""
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and isinstance(v, RowRule) for k, v in value.items())
    return isinstance(value, RowRule | None)


def rule_of(rules: Rules | None, table: str) -> RowRule | None:
    """Return the rule of a table; None if there are no rules, or none for this table."""
    if rules is None or isinstance(rules, RowRule):
        return rules
    return pick(rules, table)


def pick(named: Mapping[str, Picked], table: str) -> Picked | None:
    """Return the entry under a table's name, else under the last glob that matches it; None if
    there is no such entry.
    """
    if table in named:
        return named[table]
    globs = (
        value for pattern, value in reversed(list(named.items())) if fnmatchcase(table, pattern)
    )
    return next(globs, None)


def rules_of(rules: Rules | None, tables: Sequence[str]) -> dict[str, RowRule]:
    """Return the rule of each table by its name; an empty dict if there are no rules.

    Args:
        rules: One rule, or rules by table name or glob.
        tables: The names of all tables.

    Raises:
        ConfigError: A name or glob matches no table, a table has no rule, or a value is no rule.
    """
    if not is_rules(rules):
        raise ConfigError(
            f"{SETTING}={rules}: must be a row rule (recapp.sgd(), ...) or a mapping of table "
            "names or globs to row rules"
        )
    if rules is None or isinstance(rules, RowRule):
        return {} if rules is None else dict.fromkeys(tables, rules)
    names = set(tables)
    globs = {pattern: rule for pattern, rule in rules.items() if pattern not in names}
    for pattern in globs:
        # `*` stands for all other tables and may match none
        if pattern != "*" and not any(fnmatchcase(table, pattern) for table in tables):
            raise ConfigError(f"{SETTING}.{pattern}: no such table; {suggest(pattern, tables)}")
    rule_of_table = {}
    for table in tables:
        rule = rules[table] if table in rules else pick(globs, table)
        if rule is None:
            raise ConfigError(
                f"{SETTING}: table {table} has no rule: name it, or give '*' a rule for all others"
            )
        rule_of_table[table] = rule
    return rule_of_table


def with_frozen(rules: Rules, tables: Sequence[str]) -> Rules:
    """Return row rules in which some tables have the rule `FROZEN`."""
    if not tables:
        return rules
    named = rules if isinstance(rules, Mapping) else {"*": rules}
    return {**named, **dict.fromkeys(tables, FROZEN)}


def tables_that_restart(
    patterns: Sequence[str], rules: Mapping[str, RowRule], setting: str = RESTARTS
) -> list[str]:
    """Return the names of the tables that begin anew at each epoch. Frozen tables do not.

    Args:
        patterns: Names or globs of tables.
        rules: The row rule of each table by its name.
        setting: The setting that holds the patterns, for errors.

    Raises:
        ConfigError: A name or glob matches no table, or is that of a frozen one. Or only some
            tables of a rule begin anew, and the step size of the rule depends on the number of its
            steps.
    """
    for pattern in patterns:
        if not any(fnmatchcase(table, pattern) or table == pattern for table in rules):
            raise ConfigError(f"{setting}: {pattern}: no such table; {suggest(pattern, rules)}")
        if rules.get(pattern) == FROZEN:
            raise ConfigError(
                f"{setting}: {pattern}: the table is frozen and keeps its rows: leave it out, or "
                "train the table"
            )
    moving = [table for table in rules if rules[table] != FROZEN]
    names = [t for t in moving if any(t == p or fnmatchcase(t, p) for p in patterns)]
    for rule in distinct_rules(rules[name] for name in names):
        left = [table for table in rules if rules[table] == rule and table not in names]
        if rule.rate is not None and left:
            raise ConfigError(
                f"{setting}={shown(list(patterns))}: {left[0]} does not begin anew, but tables of "
                f"its rule {rule.name} do, and their steps are counted together: name it too, or "
                f"give it a rule of its own ({SETTING})"
            )
    return names


def check_types(rules: Mapping[str, RowRule], tables: Sequence[EmbeddingConfig]) -> None:
    """Check that tables whose rows all take each step are stored in the type of the arithmetic.

    Args:
        rules: The row rule of each table by its name.
        tables: The tables of a collection.

    Raises:
        ConfigError: A table is stored in a narrower type. Its rows would be rounded after as many
            steps as they have missed, which depends on when they are read.
    """
    data_type = compute_type(tables)
    for table in tables:
        if table.name in rules and rules[table.name].all_rows and table.data_type != data_type:
            raise ConfigError(
                f"optimizer.sparse.l2_all_rows: table {table.name} has "
                f"data_type={table.data_type}, and rows that take several steps at once must have "
                f"the type in which their collection computes, {data_type}: set "
                f"tables.data_type={data_type}, or leave l2_all_rows out"
            )


def distinct_rules(rules: Iterable[RowRule]) -> list[RowRule]:
    """Return each rule once, in the order of first appearance."""
    return list(dict.fromkeys(rules))


def group_names(tables_of_rule: Sequence[tuple[RowRule, Sequence[str]]]) -> list[str]:
    """Return the name of each rule's param group in logs: `sparse/adagrad`.

    If several rules have one name, the group's first table and the number of further tables tell
    them apart: `sparse/adagrad@C3`, `sparse/adagrad@C5+2`.

    Args:
        tables_of_rule: The distinct rules, and the names of each rule's tables.
    """
    count = Counter(rule.name for rule, _ in tables_of_rule)
    names: list[str] = []
    for rule, tables in tables_of_rule:
        name = f"sparse/{rule.name}"
        if count[rule.name] > 1:
            first = re.sub(r"[^\w.-]", "_", tables[0])
            name += f"@{first}" + (f"+{len(tables) - 1}" if len(tables) > 1 else "")
        names.append(name if name not in names else f"{name}.{len(names)}")
    return names


def make_rule(fields: Mapping[str, Any], setting: str) -> RowRule:
    """Make a row rule from its name, `rule`, and its fields.

    Args:
        fields: The name and the fields, as plain values.
        setting: The setting that holds the values, for errors.

    Raises:
        ConfigError: The rule is unknown, it does not have a field, or a field may not have its
            value.
    """
    name = fields.get("rule")
    make = RULES.get(str(name))
    if make is None:
        raise ConfigError(f"{setting}.rule={name}: {suggest(str(name), RULES)}")
    allowed = list(signature(make).parameters)
    numbers = {}
    for field, value in fields.items():
        if field == "rule" or is_default(make, field, value):
            continue
        if field not in allowed:
            raise ConfigError(
                f"{setting}.{field}: the rule {name} has no {field}; {suggest(field, allowed)}"
            )
        numbers[field] = number_of(value, f"{setting}.{field}")
    try:
        return make(**numbers)
    except ConfigError as error:
        text = str(error).removeprefix("optimizer.sparse.")
        raise ConfigError(f"{setting}.{text}") from None


def is_default(make: Callable[..., RowRule], field: str, value: Any) -> bool:
    """Return whether a value is the None that stands for a field left out."""
    parameter = signature(make).parameters.get(field)
    return value is None and parameter is not None and parameter.default is None


def number_of(value: Any, setting: str) -> float:
    """Return a number that a setting gives, also as a text.

    Raises:
        ConfigError: The value is no number.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{setting}={value}: must be a number") from None


def table_rules(
    sparse: Mapping[str, Any], setting: str, construct: Callable[[Mapping[str, Any], str], RowRule]
) -> dict[str, RowRule]:
    """Make the rules of single tables from `optimizer.sparse`.

    Args:
        sparse: The settings of the rule of all tables, and `tables`: settings by table name or
            glob. The settings of a table name another rule (`rule` or `_target_`), or override
            fields of the rule of all tables.
        setting: The setting that holds `sparse`, for errors.
        construct: The function that makes a rule from settings with a `_target_`.

    Raises:
        ConfigError: The settings make no rule.
    """
    tables = sparse.get("tables")
    if tables is None:
        return {}
    if not isinstance(tables, Mapping):
        raise ConfigError(
            f"{setting}.tables={tables}: must be a mapping of table names or globs to settings, "
            f"{setting}.tables='{{C3: {{rule: sgd, lr: 0.1}}}}'"
        )
    rules = {}
    for table, own_settings in tables.items():
        where = f"{setting}.tables.{table}"
        if not isinstance(own_settings, Mapping):
            raise ConfigError(
                f"{where}={own_settings}: must be a mapping of settings, "
                "e.g. {rule: sgd, lr: 0.1}"
            )
        rules[str(table)] = _table_rule(own_settings, sparse, where, construct)
    return rules


def _table_rule(
    own_settings: Mapping[str, Any],
    sparse: Mapping[str, Any],
    where: str,
    construct: Callable[[Mapping[str, Any], str], RowRule],
) -> RowRule:
    settings = effective_settings(own_settings, sparse)
    if "rule" in settings and TARGET in settings:
        raise ConfigError(f"{where}: rule and {TARGET} both name a rule: give one")
    home, _, name = str(settings.get(TARGET, "")).rpartition(".")
    if home == HOME and name in RULES:
        settings = {"rule": name, **{key: settings[key] for key in settings if key != TARGET}}
    return make_rule(settings, where) if "rule" in settings else construct(settings, where)


def effective_settings(
    own_settings: Mapping[str, Any], sparse: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a table's rule: the table's own, which override those of all tables
    unless they name a rule.
    """
    if "rule" in own_settings or TARGET in own_settings:
        return dict(own_settings)
    return {key: value for key, value in sparse.items() if key != "tables"} | dict(own_settings)


def settings_of_table(table: str, sparse: Any) -> dict[str, Any]:
    """Return the settings of a table's rule in `optimizer.sparse`.

    Args:
        table: The table's name.
        sparse: The settings. They may come from a file and have any value.
    """
    if not isinstance(sparse, Mapping):
        return {}
    tables = sparse.get("tables")
    own_settings = pick(tables, table) if isinstance(tables, Mapping) else None
    return effective_settings(own_settings if isinstance(own_settings, Mapping) else {}, sparse)


_WITHOUT_EFFECT = ("params", "dampening", "foreach", "fused", "capturable", "differentiable")
"""Entries of a param group that change no result (dampening acts on momentum alone)."""


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
_Kind = tuple[Callable[[_Group], RowRule], tuple[str, ...]]
"""A function that makes the rule, and the arguments that it reads."""

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
