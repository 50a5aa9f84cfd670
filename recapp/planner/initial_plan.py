"""Make the initial plan of a run on rank 0, and broadcast it to every rank.

rank 0: make -> modes of a checkpoint -> modes counted on batches -> broadcast -> all ranks
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from recapp.errors import RecappError
from recapp.sharding.sharding_plan import Mode, ShardingPlan

T = TypeVar("T")


class Ranks(Protocol):
    """The view of a rank: its number, the number of ranks, and a broadcast."""

    rank: int
    world: int

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank; every rank calls this."""


def from_rank_0(make: Callable[[], T], rank: int, broadcast: Callable[[Any], Any]) -> T:
    """Call `make` on rank 0 only, and return its result on every rank.

    Args:
        make: Makes the value.
        rank: The number of this rank.
        broadcast: Returns rank 0's value on every rank; every rank calls it once.

    Raises:
        RecappError: `make` raised it on rank 0; every rank raises it.
    """
    made: Any = None
    if rank == 0:
        try:
            made = make()
        except RecappError as error:
            made = error
    made = broadcast(made)
    if isinstance(made, RecappError):
        raise made
    value: T = made
    return value


def initial_plan(
    make: Callable[[], ShardingPlan],
    ranks: Ranks,
    *,
    modes: Mapping[str, Mode] | None = None,
    count: Callable[[ShardingPlan], ShardingPlan] | None = None,
) -> ShardingPlan:
    """Return the plan of a run with every mode decided, the same on all ranks. Every rank calls
    this.

    Args:
        make: Makes the plan; called on rank 0 only.
        ranks: The ranks that receive it.
        modes: Modes for tables with an open mode, by table.
        count: Decides the modes that are still open by counted bytes; called on rank 0 only, if
            there are several ranks. None takes `unique`.

    Raises:
        RecappError: Rank 0 raised it; every rank raises it.
    """

    def decided() -> ShardingPlan:
        plan = make()
        stored = modes or {}
        plan = plan.with_modes({name: stored[name] for name in plan.undecided if name in stored})
        if plan.undecided and count is not None and ranks.world > 1:
            plan = count(plan)
        return plan.with_modes(dict.fromkeys(plan.undecided, "unique"))

    return from_rank_0(decided, ranks.rank, ranks.broadcast)
