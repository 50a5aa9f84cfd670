"""Whether other ranks still run: each counts on, whatever else it does.

    rank 1   counts 17, 18, 19            a number of its own in the store where the ranks met
    rank 0   reads  17, 18, 18, 18, 18    rank 1 has not answered for 3 s

A message to a rank that is stopped would hold up whoever sends it, for half an hour. Nobody waits
for a number, and a thread of its own counts while a model is loaded, which takes minutes.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from recapp.errors import RankError
from recapp.processes.process_status import SecondsSeen

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PULSE_SECONDS = 1.0
QUIET_SECONDS = (
    5.0  # until nobody should ask any more: longer than a busy machine holds a thread up
)
SILENT_SECONDS = 30.0  # until a rank is given up: three looks of a Kubernetes probe


class Pulses:
    """The count of each rank.

    Args:
        store: Where the numbers lie.
        rank: The number of this rank.
        world: The number of ranks.
        pulse_seconds: How often a rank counts, and how often counts are read.
        quiet_seconds: How long a rank may be silent before it is an obstacle.
        silent_seconds: How long it may be silent before it is lost.
    """

    def __init__(
        self,
        store: "Store",
        rank: int,
        world: int,
        *,
        pulse_seconds: float = PULSE_SECONDS,
        quiet_seconds: float = QUIET_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(world) if other != rank]
        self._pulse_seconds = pulse_seconds
        self._quiet_seconds = quiet_seconds
        self._silent_seconds = silent_seconds
        self._silent: tuple[float, int] | None = None
        self._ended = threading.Event()

    def show(self) -> None:
        """Count from now on."""
        threading.Thread(target=self._show, name="pulse", daemon=True).start()

    def watch(self, lost: Callable[[RankError], object]) -> None:
        """Read the counts of all other ranks from now on.

        Args:
            lost: Called once, when one of them is lost.
        """
        threading.Thread(target=self._watch, args=(lost,), name="pulse", daemon=True).start()

    def obstacle(self) -> str:
        """Return which rank has not answered for how long, where that matters; else nothing."""
        if self._silent is None or self._silent[0] < self._quiet_seconds:
            return ""
        return _words(*self._silent)

    def end(self) -> None:
        """Count and read no more."""
        self._ended.set()

    def _show(self) -> None:
        while self._count(self._rank, 1) is not None and not self._ended.wait(self._pulse_seconds):
            pass

    def _watch(self, lost: Callable[[RankError], object]) -> None:
        seen = SecondsSeen()
        before: dict[int, int | None] = {}
        while not self._ended.wait(self._pulse_seconds):
            counts = {rank: self._count(rank, 0) for rank in self._others}
            silent = seen.look([rank for rank in counts if counts[rank] == before.get(rank)])
            before = counts
            self._silent = max(((seconds, rank) for rank, seconds in silent.items()), default=None)
            if self._silent is not None and self._silent[0] >= self._silent_seconds:
                lost(RankError(_words(*self._silent)))
                return

    def _count(self, rank: int, more: int) -> int | None:
        """Add to a rank's number and return it; None where the store is gone with its process."""
        try:
            return self._store.add(str(rank), more)
        except RuntimeError:
            return None


def _words(seconds: float, rank: int) -> str:
    return f"rank {rank} has not answered for {seconds:.0f} s: it is stopped or lost"
