"""The row rules of tables, from the settings of the optimiser."""

from typing import Any

from recapp.errors import ConfigError
from recapp.optim.named_rules import RULES, Rules, table_rules
from recapp.optim.rules import RowRule
from recapp.run.constructors import make
from recapp.settings.check_settings import find_constructor
from recapp.settings.records import Constructor, constructor


def rules_of(sparse: Constructor) -> Rules:
    """Return the row rule of all tables, or rules by table name or glob if
    `optimizer.sparse.tables` names some.

    Args:
        sparse: The settings `optimizer.sparse`.

    Raises:
        ConfigError: A `_target_`, or the settings of a table, make no row rule.
    """
    rule = _rule(sparse.without("tables"), "optimizer.sparse")
    of_tables = table_rules(sparse.plain(), "optimizer.sparse", _rule_of_plain)
    return {"*": rule, **of_tables} if of_tables else rule


def _rule_of_plain(wanted: Any, setting: str) -> RowRule:
    return _rule(constructor(wanted), setting)


def _rule(wanted: Constructor, setting: str) -> RowRule:
    target = find_constructor(wanted.target, setting)
    is_other = isinstance(target, type) and not issubclass(target, RowRule)  # an optimiser of torch
    rule = None if is_other else make(wanted, setting)
    if not isinstance(rule, RowRule):
        raise ConfigError(
            f"{setting}._target_={wanted.target}: must make a row rule, as those of "
            f"recapp.optim.rules do: {', '.join(RULES)}"
        )
    return rule
