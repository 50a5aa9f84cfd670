"""The user's own sharding types. `plan.sharding_types` adds them to the built-in ones.

plan:
  sharding_types:
    row_wise_on_two: {_target_: my_package.row_wise_on_two}
"""

from recapp.errors import ConfigError
from recapp.run.constructors import make
from recapp.run.recipe import Recipe
from recapp.settings.records import TARGET
from recapp.sharding.sharding_types import ShardingTypeRecord, register


def register_own_types(recipe: Recipe) -> None:
    """Register the sharding types of `plan.sharding_types`. Each target is a function that returns
    a `ShardingTypeRecord`.

    Every process calls this before it plans. Further calls change nothing.

    Raises:
        ConfigError: A target does not exist, fails, returns no record, or returns a record of
            another name.
        PlanError: A built-in type has the same name.
    """
    for name, made in ((recipe.plan and recipe.plan.sharding_types) or {}).items():
        setting = f"plan.sharding_types.{name}"
        record = make(made, setting)
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
