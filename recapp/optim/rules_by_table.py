"""The row rule of each table: one rule for all tables, or rules by table name or glob.

    adagrad(0.05)                                             every table
    {"*": adagrad(0.05), "C3": sgd(0.1), "wide_*": ftrl()}    a name wins over a glob, of globs
                                                              the last

Every argument that takes a row rule takes rules by table as well. Tables of one rule share a param
group and its current learning rate, and one scheduler drives all groups.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from recapp.errors import ConfigError, suggest
from recapp.optim.rules import RowRule

Picked = TypeVar("Picked")
Rules = RowRule | Mapping[str, RowRule]
"""One rule for all tables, or rules by table name or glob."""
SETTING = "optimizer.sparse.tables"
"""The name of the setting, for errors."""


def is_rules(given: Any) -> bool:
    """Return whether a value is a row rule, a mapping of names to row rules, or None."""
    if isinstance(given, Mapping):
        return all(isinstance(k, str) and isinstance(v, RowRule) for k, v in given.items())
    return isinstance(given, RowRule | None)


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
    found = [value for pattern, value in named.items() if fnmatchcase(table, pattern)]
    return found[-1] if found else None


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
    check_patterns([] if rules is None or isinstance(rules, RowRule) else rules, tables)
    found = {table: rule_of(rules, table) for table in tables}
    for table, rule in found.items():
        if rule is None and rules is not None:
            raise ConfigError(
                f"{SETTING}: table {table} has no rule: name it, or give '*' a rule for all others"
            )
    return {table: rule for table, rule in found.items() if rule is not None}


def check_patterns(patterns: Iterable[str], tables: Sequence[str]) -> None:
    """Check that every name or glob matches a table. `*` stands for all other tables and may match
    none.

    Raises:
        ConfigError: A name or glob matches no table; the message lists close names.
    """
    for pattern in patterns:
        if pattern != "*" and not any(fnmatchcase(t, pattern) or t == pattern for t in tables):
            raise ConfigError(f"{SETTING}.{pattern}: no such table; {suggest(pattern, tables)}")


def distinct_rules(rules: Iterable[RowRule]) -> list[RowRule]:
    """Return each rule once, in the order of first appearance."""
    found: list[RowRule] = []
    for rule in rules:
        if rule not in found:
            found.append(rule)
    return found


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
