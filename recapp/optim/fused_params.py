"""TorchRec's `fused_params`, the settings of its fused kernels, as a row rule.

    fused_params={"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.02, "eps": 0.002}

The optimiser is a member of `EmbOptimType` (FBGEMM's own as well), its name or its value. What is
left out has FBGEMM's default. Beside TorchRec's settings there is `tables`: settings of single
tables, by name or glob, which count over the others where they name no optimiser.

    fused_params={"learning_rate": 0.02, "tables": {"wide_*": {"optimizer": "adam"}}}
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from recapp.errors import ConfigError, suggest
from recapp.optim.rules import RowRule, adagrad, adam, rowwise_adagrad, sgd
from recapp.optim.rules_by_table import Rules

Given = dict[str, Any]


class EmbOptimType(Enum):
    """The fused optimisers of FBGEMM that are row rules here."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    ADAM = "adam"


_RULES: dict[EmbOptimType, tuple[Callable[[Given], RowRule], tuple[str, ...]]] = {
    EmbOptimType.SGD: (lambda p: sgd(p["learning_rate"]), ()),
    EmbOptimType.EXACT_SGD: (lambda p: sgd(p["learning_rate"]), ()),
    EmbOptimType.EXACT_ADAGRAD: (lambda p: adagrad(p["learning_rate"], p["eps"]), ("eps",)),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (
        lambda p: rowwise_adagrad(p["learning_rate"], p["eps"]),
        ("eps",),
    ),
    EmbOptimType.ADAM: (
        lambda p: adam(p["learning_rate"], p["beta1"], p["beta2"], p["eps"]),
        ("beta1", "beta2", "eps"),
    ),
}
"""How each optimiser becomes a rule, and what it reads beside the learning rate."""

_DEFAULTS = {"learning_rate": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999}


def rules_of_fused_params(fused_params: Mapping[str, Any]) -> Rules:
    """Return the row rule that fused parameters name, or rules by table where they have `tables`.

    Args:
        fused_params: As of `rule_of_fused_params`, and `tables`: the same by table name or glob.

    Raises:
        ConfigError: An optimiser that is no row rule, or a parameter that it does not have.
    """
    others = {name: value for name, value in fused_params.items() if name != "tables"}
    rule = rule_of_fused_params(others)
    tables = fused_params.get("tables")
    if tables is None:
        return rule
    where = "fused_params['tables']"
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{where} is a {type(tables).__name__}: give a dict by table or glob")
    made = {"*": rule}
    for table, given in tables.items():
        own = f"{where}[{table!r}]"
        if not isinstance(given, Mapping):
            raise ConfigError(f'{own}={given}: give a dict such as {{"learning_rate": 0.1}}')
        whole = dict(given) if "optimizer" in given else others | dict(given)
        made[str(table)] = rule_of_fused_params(whole, own)
    return made


def rule_of_fused_params(fused_params: Mapping[str, Any], setting: str = "fused_params") -> RowRule:
    """Return the row rule that fused parameters name.

    Args:
        fused_params: `optimizer`, `learning_rate`, `eps`, `beta1` and `beta2`, those that the
            optimiser has.
        setting: Where they stand, for errors.

    Raises:
        ConfigError: An optimiser that is no row rule, or a parameter that it does not have.
    """
    given = dict(fused_params)
    kind = _kind_of(given.pop("optimizer", EmbOptimType.EXACT_SGD), setting)
    make, read = _RULES[kind]
    allowed = ("learning_rate", *read)
    for name in given:
        if name not in allowed:
            raise ConfigError(
                f"{setting}[{name!r}]: {kind.name} reads optimizer, {', '.join(allowed)}; "
                "leave it out, or name a rule of recapp: EmbeddingBagCollectionSharder(rule=...)"
            )
    return make(_DEFAULTS | {name: float(value) for name, value in given.items()})


def _kind_of(given: Any, setting: str) -> EmbOptimType:
    """Return the optimiser that a member of any such enumeration or a text names."""
    name = given.name if isinstance(given, Enum) else str(given)
    for kind in EmbOptimType:
        if name.lower() in (kind.name.lower(), kind.value):
            return kind
    known = [kind.name for kind in EmbOptimType]
    raise ConfigError(f"{setting}['optimizer']={name}: {suggest(name, known)}")
