"""Pulses show whether other ranks still run: each rank counts all the time, during any other work.

    rank 1   counts 17, 18, 19            a number of its own in the store where the ranks met
    rank 0   reads  17, 18, 18, 18, 18    rank 1 has not answered for 3 s

A message to a stopped rank would block the sender for half an hour. No rank waits for a number. A
separate thread counts, so the count goes on while a model is loaded, which takes minutes.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from recapp.errors import RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PULSE_SECONDS = 1.0
QUIET_SECONDS = (
    5.0  # silent for so long, a rank is an obstacle: longer than a busy machine delays a thread
)
SILENT_SECONDS = 30.0  # silent for so long, a rank is lost: three looks of a Kubernetes probe

LONGEST_LOOK_SECONDS = 2.0
"""The most time that counts between two looks. A longer gap shows that this process itself was
stopped or too busy, so it cannot blame others for that time."""


class SecondsSeen:
    """For each item, such as a stopped rank, the seconds for which every look has seen the item.

    Time in which this process itself was stopped does not count: a user who stops a whole job may
    continue it days later.
    """

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._seconds: dict[int, float] = {}

    def look(self, seen: Iterable[int]) -> Mapping[int, float]:
        """Return the seconds of each item that is seen now, 0 for a new one.

        Args:
            seen: The items that are seen now. The seconds of every other item are forgotten.
        """
        now = time.monotonic()
        passed = min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        before = self._seconds
        self._seconds = {one: before[one] + passed if one in before else 0.0 for one in seen}
        return self._seconds


class Pulses:
    """The counts of all ranks.

    Args:
        store: The store of the counts.
        rank: The number of this rank.
        world: The number of ranks.
        pulse_seconds: The interval at which a rank counts, and reads the counts of the others.
        quiet_seconds: The time of silence after which a rank is an obstacle.
        silent_seconds: The time of silence after which a rank is lost.
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
        """Start to count."""
        threading.Thread(target=self._show, name="pulse", daemon=True).start()

    def watch(self, lost: Callable[[RankError], object]) -> None:
        """Start to read the counts of all other ranks.

        Args:
            lost: Called once, when a rank is lost.
        """
        threading.Thread(target=self._watch, args=(lost,), name="pulse", daemon=True).start()

    def obstacle(self) -> str:
        """Return a text that names a rank silent for `quiet_seconds` and the time of its silence;
        empty where no rank is silent.
        """
        if self._silent is None or self._silent[0] < self._quiet_seconds:
            return ""
        return _words(*self._silent)

    def end(self) -> None:
        """Stop counting and reading."""
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
        """Add to the count of a rank and return the count; None where the process of the store has
        ended.
        """
        try:
            return self._store.add(str(rank), more)
        except RuntimeError:
            return None


def _words(seconds: float, rank: int) -> str:
    return f"rank {rank} has not answered for {seconds:.0f} s: it is stopped or lost"
