"""Row rules from the plain values of settings, `fused_params` and plan files.

    {"rule": "adagrad", "lr": 0.05, "eps": 1e-10}    the function `adagrad` of recapp/optim/rules.py
    {"lr": 0.01}                                     the rule of all tables, at another rate

An omitted field has the default of the rule's function.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from recapp.errors import ConfigError, suggest
from recapp.optim import rules
from recapp.optim.rules import RowRule
from recapp.optim.rules_by_table import pick

RULES: Mapping[str, Callable[..., RowRule]] = {
    make.__name__: make
    for make in (
        rules.sgd,
        rules.momentum_sgd,
        rules.adagrad,
        rules.rowwise_adagrad,
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


def make_rule(given: Mapping[str, Any], setting: str) -> RowRule:
    """Make a row rule from its name, `rule`, and its fields.

    Args:
        given: The name and the fields, as plain values.
        setting: The setting that holds the values, for errors.

    Raises:
        ConfigError: The rule is unknown, it does not have a field, or a field may not have its
            value.
    """
    name = given.get("rule")
    make = RULES.get(str(name))
    if make is None:
        raise ConfigError(f"{setting}.rule={name}: {suggest(str(name), RULES)}")
    allowed = list(signature(make).parameters)
    numbers = {}
    for field, value in given.items():
        if field == "rule":
            continue
        if field not in allowed:
            raise ConfigError(
                f"{setting}.{field}: the rule {name} has no {field}; {suggest(field, allowed)}"
            )
        numbers[field] = _number(value, f"{setting}.{field}")
    try:
        return make(**numbers)
    except ConfigError as error:
        text = str(error).removeprefix("optimizer.sparse.")
        raise ConfigError(f"{setting}.{text}") from None


def _number(value: Any, setting: str) -> float:
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
    made = {}
    for table, given in tables.items():
        where = f"{setting}.tables.{table}"
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{where}={given}: must be a mapping of settings, e.g. {{rule: sgd, lr: 0.1}}"
            )
        made[str(table)] = _table_rule(given, sparse, where, construct)
    return made


def _table_rule(
    given: Mapping[str, Any],
    sparse: Mapping[str, Any],
    where: str,
    construct: Callable[[Mapping[str, Any], str], RowRule],
) -> RowRule:
    wanted = effective_settings(given, sparse)
    if "rule" in wanted and TARGET in wanted:
        raise ConfigError(f"{where}: rule and {TARGET} both name a rule: give one")
    home, _, name = str(wanted.get(TARGET, "")).rpartition(".")
    if home == HOME and name in RULES:
        wanted = {"rule": name, **{key: wanted[key] for key in wanted if key != TARGET}}
    return make_rule(wanted, where) if "rule" in wanted else construct(wanted, where)


def effective_settings(given: Mapping[str, Any], sparse: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a table's rule: the table's own, which override those of all tables
    unless they name a rule.
    """
    if "rule" in given or TARGET in given:
        return dict(given)
    return {key: value for key, value in sparse.items() if key != "tables"} | dict(given)


def settings_of_table(table: str, sparse: Any) -> dict[str, Any]:
    """Return the settings of a table's rule in `optimizer.sparse`.

    Args:
        table: The table's name.
        sparse: The settings. They may come from a file and have any value.
    """
    if not isinstance(sparse, Mapping):
        return {}
    tables = sparse.get("tables")
    given = pick(tables, table) if isinstance(tables, Mapping) else None
    return effective_settings(given if isinstance(given, Mapping) else {}, sparse)


def check_tables(sparse: Mapping[str, Any], setting: str) -> None:
    """Check the settings of single tables in `optimizer.sparse`, except those whose `_target_` is
    no rule of recapp: checking these would import the target.

    Raises:
        ConfigError: The settings make no rule.
    """
    table_rules(sparse, setting, lambda wanted, where: rules.sgd())
