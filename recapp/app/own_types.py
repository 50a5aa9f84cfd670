"""Sharding types of the user's own, which `plan.sharding_types` adds to the built-in ones.

    plan:
      sharding_types:
        row_wise_on_two: {_target_: my_package.row_wise_on_two}

The function that `_target_` names returns a `recapp.sharding.sharding_types.ShardingTypeRecord`.
"""

from collections.abc import Mapping
from typing import Any

from recapp.errors import ConfigError
from recapp.settings.check_settings import TARGET, find_constructor
from recapp.sharding.sharding_types import ShardingTypeRecord, register


def register_own_types(settings: Mapping[str, Any]) -> None:
    """Register every sharding type that `plan.sharding_types` names.

    Every process has to call it before it plans; another call changes nothing.

    Raises:
        ConfigError: A target does not exist, makes no record, or makes one of another name.
        PlanError: A name is that of a built-in type.
    """
    wanted = (settings.get("plan") or {}).get("sharding_types") or {}
    for name, made in wanted.items():
        setting = f"plan.sharding_types.{name}"
        arguments = {key: value for key, value in made.items() if key != TARGET}
        record = find_constructor(str(made.get(TARGET)), setting)(**arguments)
        if not isinstance(record, ShardingTypeRecord):
            raise ConfigError(
                f"{setting}.{TARGET}={made[TARGET]}: must make a ShardingTypeRecord of "
                "recapp.sharding.sharding_types"
            )
        if record.name != name:
            raise ConfigError(
                f"{setting}: its record is named {record.name}: write "
                f"plan.sharding_types.{record.name}"
            )
        register(record)
