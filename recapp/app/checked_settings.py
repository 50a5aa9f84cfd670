"""The settings of a command, checked before anything is started."""

from collections.abc import Mapping, Sequence
from typing import Any

from recapp.errors import ConfigError, suggest
from recapp.settings import check_settings


def checked(
    settings: Mapping[str, Any], command: str, overrides: Sequence[str] | None = None
) -> dict[str, Any]:
    """Check the settings of a command, the names of sharding types included.

    Args:
        settings: As `check_settings.checked` takes them, which does all but the names of types.
        command: The name of the command.
        overrides: What its command line says; None where nothing is known of it.

    Raises:
        ConfigError: It names the setting, the value, what is allowed and what is close.
    """
    found = check_settings.checked(settings, command, overrides)
    plan = found.get("plan")
    if isinstance(plan, Mapping) and plan.get("tables"):
        from recapp.sharding.sharding_types import SHARDING_TYPES  # imports numpy

        known = [*SHARDING_TYPES, *(plan.get("sharding_types") or {})]
        for name, type_name in plan["tables"].items():
            if type_name not in known:
                raise ConfigError(f"plan.tables.{name}={type_name}: {suggest(type_name, known)}")
    return found
