"""The check of a command's settings before anything is started, tasks, sharding types and
columns included.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from recapp.app.build_task import build_task
from recapp.compat.hugectr_words import in_recapp_words
from recapp.errors import ConfigError, suggest
from recapp.settings import check_settings


def checked(
    settings: Mapping[str, Any], command: str, overrides: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the settings of a command, checked, in recapp's words, defaults filled in.

    Args:
        settings: As `check_settings.checked` takes them, which checks all but the names of sharding
            types.
        command: The name of the command.
        overrides: What its command line sets; None where nothing is known of it.

    Raises:
        ConfigError: A setting is wrong; the error names the setting, the value, what is allowed and
            what is close.
    """
    _check_one_for_each_column(settings.get("dataset"))
    translated = {"tables": in_recapp_words(settings["tables"])} if "tables" in settings else {}
    found = check_settings.checked({**settings, **translated}, command, overrides)
    if "metrics" in found:
        build_task(found)
    plan = found.get("plan")
    if isinstance(plan, Mapping) and plan.get("tables"):
        from recapp.sharding.sharding_types import SHARDING_TYPES  # imports numpy

        known = [*SHARDING_TYPES, *(plan.get("sharding_types") or {})]
        for name, type_name in plan["tables"].items():
            if type_name not in known:
                raise ConfigError(f"plan.tables.{name}={type_name}: {suggest(type_name, known)}")
    return found


def _check_one_for_each_column(dataset: object) -> None:
    """Check that what must be one number for each sparse column is not one number for all."""
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
