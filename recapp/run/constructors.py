"""Call the constructors that settings name by `_target_`, for row rules and sharding types, too."""

from contextlib import suppress
from inspect import signature
from typing import Any

from recapp.errors import ConfigError, RecappError
from recapp.optim.named_rules import RULES, Rules, table_rules
from recapp.optim.rules import RowRule
from recapp.planner.planner_settings import PlanSettings
from recapp.settings.check_settings import find_constructor, told
from recapp.settings.records import TARGET, Constructor, constructor

REFUSALS = (TypeError, ValueError, ImportError)  # ImportError: a logger is not installed
MISCONFIGURED = "MisconfigurationException"  # Lightning's; scoring does not import it


def make(settings: Constructor, setting: str, /, *args: Any, **extra: Any) -> Any:
    """Call the constructor that settings name, with their arguments.

    Hydra's own `instantiate` would pass its list type instead of plain lists and wrap the
    exceptions of constructors.

    Args:
        settings: The constructor and its arguments.
        setting: The dotted name of `settings`, for errors.
        args: Positional arguments that recapp adds.
        extra: Keyword arguments that recapp adds.

    Raises:
        ConfigError: The constructor does not exist, does not take an argument, or refuses a value.
    """
    wanted = settings.arguments
    target = find_constructor(settings.target, setting)
    try:
        with suppress(ValueError):  # a class of C tells no signature
            signature(target).bind(*args, **wanted, **extra)
    except TypeError as e:
        raise ConfigError(f"{setting} ({settings.target}): {e}") from None
    return construct(target, f"{setting} ({settings.target})", *args, **wanted, **extra)


def construct(target: Any, setting: str, /, *args: Any, **extra: Any) -> Any:
    """Call a constructor, and turn every exception of it into a ConfigError.

    An exception that is no usual refusal of arguments is shown with its type and its line.

    Args:
        target: The constructor.
        setting: The dotted name of the constructor's settings, for errors.
        args: Its positional arguments.
        extra: Its keyword arguments.

    Raises:
        ConfigError: The constructor refuses its arguments, or fails.
    """
    try:
        return target(*args, **extra)
    except (RecappError, MemoryError):
        raise
    except Exception as e:
        usual = isinstance(e, REFUSALS) or any(c.__name__ == MISCONFIGURED for c in type(e).__mro__)
        raise ConfigError(f"{setting}: {' '.join(str(e).split()) if usual else told(e)}") from e


def row_rules(sparse: Constructor) -> Rules:
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


def register_own_types(plan: PlanSettings) -> None:
    """Register the sharding types of `plan.sharding_types`. Each target is a function that returns
    a `ShardingTypeRecord`.

    Raises:
        ConfigError: A target does not exist, fails, returns no record, or returns a record of
            another name.
        PlanError: A built-in type has the same name.
    """
    for name, own_type in (plan.sharding_types or {}).items():
        from recapp.sharding.sharding_types import ShardingTypeRecord, register  # imports numpy

        setting = f"plan.sharding_types.{name}"
        record = make(own_type, setting)
        if not isinstance(record, ShardingTypeRecord):
            raise ConfigError(
                f"{setting}.{TARGET}={own_type.target}: must make a ShardingTypeRecord of "
                "recapp.sharding.sharding_types"
            )
        if record.name != name:
            raise ConfigError(
                f"{setting}: its record is named {record.name}: write "
                f"plan.sharding_types.{record.name}"
            )
        register(record)
