"""Sharding types of the user's own, which `plan.sharding_types` adds to the built-in ones.

plan:
  sharding_types:
    row_wise_on_two: {_target_: my_package.row_wise_on_two}
"""

from recapp.errors import ConfigError
from recapp.recipe.recipe import Recipe
from recapp.settings.check_settings import find_constructor
from recapp.settings.records import TARGET
from recapp.sharding.sharding_types import ShardingTypeRecord, register


def register_own_types(recipe: Recipe) -> None:
    """Register every sharding type that `plan.sharding_types` names: the function of each returns
    a `ShardingTypeRecord`.

    Every process has to call it before it plans; another call changes nothing.

    Raises:
        ConfigError: A target does not exist, makes no record, or makes one of another name.
        PlanError: A name is that of a built-in type.
    """
    for name, made in ((recipe.plan and recipe.plan.sharding_types) or {}).items():
        setting = f"plan.sharding_types.{name}"
        record = find_constructor(made.target, setting)(**made.arguments)
        if not isinstance(record, ShardingTypeRecord):
            raise ConfigError(
                f"{setting}.{TARGET}={made.target}: must make a ShardingTypeRecord of "
                "recapp.sharding.sharding_types"
            )
        if record.name != name:
            raise ConfigError(
                f"{setting}: its record is named {record.name}: write "
                f"plan.sharding_types.{record.name}"
            )
        register(record)
