"""Turn plain settings into the record of a command: checked, complete, typed.

plain settings, from Hydra or from a file -> checked -> record
"""

from collections.abc import Mapping, Sequence
from typing import Any

from recapp.errors import ConfigError, suggest
from recapp.run.commands import COMMANDS
from recapp.run.recipe import Command
from recapp.run.task_of_run import build_task
from recapp.settings import check_settings
from recapp.settings.records import constructor, record
from recapp.settings.values import shown
from recapp.tables.table_settings import WIDE


def read_settings(
    plain: Mapping[str, Any], command: str, overrides: Sequence[str] | None = None
) -> Any:
    """Return the record of a command's settings.

    Args:
        plain: The `settings` of `checked`, and the key `choices`.
        command: The name of the command.
        overrides: The `overrides` of `checked`.

    Raises:
        ConfigError: A setting is wrong, or two settings conflict.
    """
    settings = dict(plain)
    choices = settings.pop("choices", {})
    found = checked(settings, command, overrides)
    return recipe_of(found | {"choices": choices}, command)


def recipe_of(plain: Mapping[str, Any], command: str) -> Any:
    """Return the record of settings that are already checked, such as those that a command gives to
    its ranks.

    Raises:
        ConfigError: Two settings conflict.
    """
    made: Command = record(COMMANDS[command], plain)
    return made


def checked(
    settings: Mapping[str, Any], command: str, overrides: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the plain settings of a command, checked and with defaults filled in.

    Args:
        settings: Plain settings, resolved. A setting that must be given may still be `???`.
        command: The name of the command.
        overrides: The command line. Only constructors in groups that it changes are checked; None
            checks all.

    Raises:
        ConfigError: A setting is wrong; the error names the setting, the value, the allowed values
            and a close one.
    """
    _check_one_for_each_column(settings.get("dataset"))
    given = {"model": _named_collections(settings.get("tables"))}
    found = check_settings.checked(settings, COMMANDS[command], overrides, given)
    if isinstance(found.get("metrics"), Mapping):
        named = found.get("task")
        build_task(constructor(named) if named else None, found["metrics"]["names"])
    _check_columns_of_criteo(found.get("dataset"), overrides or ())
    plan = found.get("plan")
    if isinstance(plan, Mapping) and plan.get("tables"):
        from recapp.sharding.sharding_types import SHARDING_TYPES  # imports numpy

        known = [*SHARDING_TYPES, *(plan.get("sharding_types") or {})]
        for name, type_name in plan["tables"].items():
            if type_name not in known:
                raise ConfigError(f"plan.tables.{name}={type_name}: {suggest(type_name, known)}")
    return found


def _named_collections(tables: object) -> dict[str, str]:
    """Return the further collections that settings of tables name or may make, with their
    meaning.
    """
    if not isinstance(tables, Mapping):
        return {}
    further = tables.get("collections")
    entries = [
        entry
        for key in ("tables", "lookups")
        if isinstance(tables.get(key), list)
        for entry in tables[key]
        if isinstance(entry, Mapping)
    ]
    named = [str(entry["collection"]) for entry in entries if entry.get("collection")]
    named += [WIDE, *(further if isinstance(further, Mapping) else ())]
    return dict.fromkeys(named, "the tables of this collection, tables=...")


def _check_columns_of_criteo(dataset: object, overrides: Sequence[str]) -> None:
    """Check that settings with `naming=criteo` name no columns, because Criteo's are fixed."""
    if not isinstance(dataset, Mapping) or dataset.get("naming") != "criteo":
        return
    named = check_settings.override_names(overrides)
    for key in ("dense", "sparse"):
        if dataset.get(key) or f"dataset.{key}" in named:
            raise ConfigError(
                f"dataset.{key}={shown(dataset.get(key))}: dataset.naming=criteo reads all "
                "columns of Criteo's logs; set dataset.naming=exact to name columns"
            )


def _check_one_for_each_column(dataset: object) -> None:
    """Check that settings with a number for each sparse column are lists, not one number."""
    if not isinstance(dataset, Mapping):
        return
    for key in ("table_rows", "cardinality"):
        value = dataset.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            from recapp.dataset.schema import criteo_schema  # imports numpy

            criteo = dataset.get("naming") == "criteo"
            columns = criteo_schema().sparse if criteo else dataset.get("sparse") or ()
            raise ConfigError(
                f"dataset.{key}={value}: must be a list of {len(columns)} whole numbers, one for "
                f"each sparse column, or null"
            )
