"""How much of an exchange is hidden: for how long messages were under way, and for how long of that
the host stood waiting.

    sent                                  wanted      there
     |------- the host does other work -----|-- waits --|         hidden: the first part's share of
         the whole
"""

import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

Arrived = TypeVar("Arrived")


class Sent(NamedTuple, Generic[Arrived]):
    """A message under way: since when, and what waits for it."""

    since: float
    arrive: Callable[[], Arrived]


class Waits:
    """Seconds since the start, by phase: `waited_s` is what nothing has hidden, `under_way_s` goes
    from sending to having it.

    Args:
        phases: their names.
    """

    def __init__(self, phases: Sequence[str]) -> None:
        self.waited_s = dict.fromkeys(phases, 0.0)
        self.under_way_s = dict.fromkeys(phases, 0.0)

    @staticmethod
    def sent(arrive: Callable[[], Arrived]) -> Sent[Arrived]:
        """A message that has just left."""
        return Sent(time.perf_counter(), arrive)

    def arrived(self, phase: str, message: Sent[Arrived]) -> Arrived:
        """Wait for it."""
        began = time.perf_counter()
        arrived = message.arrive()
        now = time.perf_counter()
        self.waited_s[phase] += now - began
        self.under_way_s[phase] += now - message.since
        return arrived

    def hidden(self) -> dict[str, float]:
        """Share of the time under way in which the host did other work, for phases that had
        messages.
        """
        return {
            phase: 1 - self.waited_s[phase] / seconds
            for phase, seconds in self.under_way_s.items()
            if seconds
        }
