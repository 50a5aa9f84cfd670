"""The settings of planning: the groups `planner`, `plan` and `topology`."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from recapp.errors import ConfigError
from recapp.planner.hardware import Hardware, read_hardware
from recapp.settings.records import Constructor, absent, in_hand
from recapp.settings.values import Natural, Positive, Within
from recapp.tables.positions import RowOrderName

Mode = Literal["auto", "unique", "pooled"]


@dataclass(frozen=True)
class ParameterConstraints:
    """The constraints of a table; None constrains nothing. The names are those of TorchRec's
    `ParameterConstraints`, and a few more.

    Args:
        sharding_types: The names of the allowed sharding types; None allows the built-in types.
        modes: `unique`, `pooled` or both.
        ranks: The only ranks for its shards.
        hosts: The only hosts for its shards (counted from 0).
        together: A label; tables with the same label are cut alike and lie on the same ranks.
        apart: A label; tables with the same label share no rank.
        min_partition: The least columns of a vertical strip.
        pooling_factors: The mean ids of a bag, one number for all features or one for each; for
            tables without statistics.
        statistics: Statistics of its ids (`TableStatistics`), instead of measured ones.
        data_type: The data type of its rows in prices: "fp32", "bf16", ...
        row_orders: `natural`, `mixed` or both, for cuts by rows.
        as_parameter: Whether replicas of the table are a parameter (`TableSharding`).
    """

    sharding_types: Sequence[str] | None = absent(null=True)
    modes: Sequence[str] | None = absent(null=True)
    ranks: Sequence[int] | None = absent(null=True)
    hosts: Sequence[int] | None = absent(null=True)
    together: str | None = absent(null=True)
    apart: str | None = absent(null=True)
    min_partition: int | None = absent(null=True)
    pooling_factors: Sequence[float] | None = absent(null=True)
    statistics: Any = in_hand()
    data_type: str | None = absent(null=True)
    row_orders: Sequence[str] | None = absent(null=True)
    as_parameter: bool | None = absent(null=True)

    def over(self, other: "ParameterConstraints") -> "ParameterConstraints":
        """Return these constraints, with fields of `other` in place of None."""
        mine = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(other, **mine)


@dataclass(frozen=True)
class PlanRule:
    """A rule of a plan; all conditions that are set must hold.

    Args:
        type: A sharding type.
        rows_above, rows_at_most, rows_below: Bounds of the rows.
        dim_above, dim_at_least, dim_below: Bounds of the columns.
        lookups_per_row_above, lookups_per_row_at_most: Mean lookups of a row in a step of all
            ranks.
        access: "frequent" (at least 1 lookup per row) or "sparse" (at most 0.01).
        memory_share_above, memory_share_at_most: The table's weights as a share of the smallest
            rank's memory for tables.
        interconnect: "fast" (a rank sends 30 GB/s or more) or "slow".
        hosts_at_least, hosts_at_most: Bounds of the number of hosts.
        tables: A name or glob, or several, one of which must match.
        mode: "unique", "pooled" or "auto" instead of the plan's mode.
        row_order: "natural" or "mixed" instead of the plan's order.
    """

    type: str
    rows_above: Natural | None = absent()
    rows_at_most: Natural | None = absent()
    rows_below: Natural | None = absent()
    dim_above: Natural | None = absent()
    dim_at_least: Natural | None = absent()
    dim_below: Natural | None = absent()
    lookups_per_row_above: Annotated[float, Within(0)] | None = absent()
    lookups_per_row_at_most: Annotated[float, Within(0)] | None = absent()
    access: Literal["frequent", "sparse"] | None = absent()
    memory_share_above: Annotated[float, Within(0)] | None = absent()
    memory_share_at_most: Annotated[float, Within(0)] | None = absent()
    interconnect: Literal["fast", "slow"] | None = absent()
    hosts_at_least: Natural | None = absent()
    hosts_at_most: Natural | None = absent()
    tables: str | Sequence[str] | None = absent()
    mode: Mode | None = absent()
    row_order: RowOrderName | None = absent()

    @property
    def globs(self) -> Sequence[str]:
        """Return the names and globs, one of which must match; empty if all tables do."""
        return [self.tables] if isinstance(self.tables, str) else self.tables or ()


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """The group `planner`: limits on the planner's decisions.

    Args:
        mode: The mode of all tables.
        constraints: The constraints of tables, by name or glob.
    """

    mode: Mode = "auto"
    constraints: dict[str, ParameterConstraints] | None = None


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The group `plan`: rules written by hand, sharding types of single tables, or a plan file.

    Raises:
        ConfigError: `path`, a whole plan, is set together with other settings.
    """

    name: str | None = absent()
    rules: tuple[PlanRule, ...] | None = absent()
    mode: Mode | None = absent()
    column_width: Positive | None = absent()
    tables: dict[str, str] | None = absent()
    sharding_types: dict[str, Constructor] | None = absent()
    row_order: RowOrderName | None = absent()
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
        hardware: The costs of steps, or the file that has them; None assumes those of the device.
    """

    hosts: Positive | None = None
    memory_bytes: Natural | None = None
    reserve_bytes: Natural | None = None
    ranks: Positive | None = None
    hardware: str | Hardware | None = None

    @cached_property
    def costs(self) -> Hardware | None:
        """Return the costs of steps, from the file if the settings name one.

        Raises:
            ConfigError: The file does not exist, or has no hardware.
        """
        return read_hardware(self.hardware) if isinstance(self.hardware, str) else self.hardware
