"""TorchRec's `fused_params`, the settings of its fused kernels, as row rules:

    fused_params={"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.02, "eps": 0.002}

The optimiser is a member of `EmbOptimType` (FBGEMM's own as well), its name or its value. An
omitted setting has FBGEMM's default. recapp adds `tables`: settings of single tables by name or
glob. They override the settings of all tables; with an `optimizer` of their own they replace them.

    fused_params={"learning_rate": 0.02, "tables": {"wide_*": {"optimizer": "adam"}}}
"""

from collections.abc import Mapping
from enum import Enum
from inspect import signature
from typing import Any

from recapp.errors import ConfigError, suggest
from recapp.optim.named_rules import RULES, Rules, make_rule
from recapp.optim.rules import RowRule

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
