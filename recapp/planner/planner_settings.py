"""The settings of planning: the groups `planner`, `plan` and `topology`."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from recapp.errors import ConfigError
from recapp.settings.records import Constructor, Made, absent
from recapp.settings.values import Natural, Positive

Mode = Literal["auto", "unique", "pooled"]
OwnShardingType = Annotated[
    Constructor,
    Made(
        tried=True,
        makes="recapp.sharding.sharding_types.ShardingTypeRecord",
        such_as="a function that returns one",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """The group `planner`: limits on the planner's decisions.

    Args:
        mode: The mode of all tables.
        constraints: Fields of `ParameterConstraints`, by table or glob.
    """

    mode: Mode = "auto"
    constraints: dict[str, dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The group `plan`: rules written by hand, sharding types of single tables, or a plan file.

    Raises:
        ConfigError: `path`, a whole plan, is set together with other settings.
    """

    name: str | None = absent()
    rules: tuple[dict[str, Any], ...] | None = absent()
    mode: Mode | None = absent()
    column_width: Positive | None = absent()
    tables: dict[str, str] | None = absent()
    sharding_types: dict[str, OwnShardingType] | None = absent()
    row_order: Literal["natural", "mixed"] | None = absent()
    deal: Literal["balanced", "round_robin"] | None = absent()
    dp_max_rows: Natural | None = absent()
    path: str | None = absent()

    def __post_init__(self) -> None:
        others = [
            each.name
            for each in fields(self)
            if each.name not in ("path", "sharding_types") and getattr(self, each.name) is not None
        ]
        if self.path is not None and others:
            raise ConfigError(
                f"plan.{others[0]}: cannot be set together with plan.path, which names a whole "
                "plan: edit the file"
            )


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The group `topology`: the machines to plan for.

    Args:
        hosts: The number of hosts of the ranks; None detects it.
        memory_bytes: Bytes of each rank for tables and optimiser state; None takes the free memory.
        reserve_bytes: Bytes of this memory to keep free; None computes them.
        ranks: The number of ranks of a plan on paper; None takes the number of `trainer`.
        hardware: The costs of steps: a file, or plain values with its content.
    """

    hosts: Positive | None = None
    memory_bytes: Natural | None = None
    reserve_bytes: Natural | None = None
    ranks: Positive | None = None
    hardware: str | dict[str, Any] | None = None
