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
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, TypeVar

from recapp.errors import ConfigError, suggest
from recapp.optim import rules
from recapp.optim.rules import FROZEN, RowRule
from recapp.settings.values import shown
from recapp.tables.config import EmbeddingConfig, compute_type

Picked = TypeVar("Picked")
# One rule for all tables, or rules by table name or glob.
Rules = RowRule | Mapping[str, RowRule]
# The name of the setting, for errors.
SETTING = "optimizer.sparse.tables"
# The name of the setting of tables that begin anew at each epoch, for errors.
RESTARTS = "optimizer.restart_tables"
# The rules by name.
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
TARGET = "_target_"
RULES_MODULE = "recapp.optim.rules"


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
    module, _, name = str(settings.get(TARGET, "")).rpartition(".")
    if module == RULES_MODULE and name in RULES:
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
