"""The plan that a run starts with: made on rank 0, and the same on every rank.

rank 0: make -> modes of a checkpoint -> modes counted on batches -> broadcast -> all ranks
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from recapp.errors import RecappError
from recapp.sharding.sharding_plan import Mode, ShardingPlan

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of a run as one of them sees them: its number, how many there are, a broadcast."""

    rank: int
    world: int

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank; every rank calls it."""


def from_rank_0(make: Callable[[], T], rank: int, broadcast: Callable[[Any], Any]) -> T:
    """Return on every rank what `make` returns on rank 0, the only rank that calls it.

    Args:
        make: Makes the value.
        rank: The number of this rank.
        broadcast: Returns rank 0's value on every rank; every rank calls it once.

    Raises:
        RecappError: What `make` raises on rank 0 is raised on every rank.
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
    """Return the plan of a run with every mode decided, the same on all ranks; each of them calls
    it.

    Args:
        make: Makes the plan; called on rank 0 alone.
        ranks: The ranks that receive it.
        modes: The modes of tables whose plan leaves them open, by table.
        count: Decides the modes that are then still open by what they exchange; called on rank 0
            alone, where there is more than one rank. None takes `unique`.

    Raises:
        RecappError: What rank 0 raises is raised on every rank.
    """

    def decided() -> ShardingPlan:
        plan = make()
        stored = modes or {}
        plan = plan.with_modes({name: stored[name] for name in plan.undecided if name in stored})
        if plan.undecided and count is not None and ranks.world > 1:
            plan = count(plan)
        return plan.with_modes(dict.fromkeys(plan.undecided, "unique"))

    return from_rank_0(decided, ranks.rank, ranks.broadcast)
