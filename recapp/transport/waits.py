"""How much of an exchange is hidden: for how long messages were under way, and for how long of that
the host was waiting.

    sent                                  wanted      there
     |------- the host does other work -----|-- waits --|

The share of the first part in the whole is hidden. Of a message for which the host does not wait,
but a stream of a GPU, nothing is known here, and nothing is counted.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

Arrived = TypeVar("Arrived")


class Sent(NamedTuple, Generic[Arrived]):
    """A message under way."""

    since: float
    """When it was sent, in seconds of `time.perf_counter`."""
    arrive: Callable[[], Arrived]
    """A function that waits for it and returns what has arrived."""


class Waits:
    """The time that messages were under way and waited for since the start, by phase.

    Args:
        phases: The names of the phases in which the host waits.

    Attributes:
        waited_s: The seconds that the host waited, by phase.
        under_way_s: The seconds from sending to arrival, by phase.
    """

    def __init__(self, phases: Sequence[str]) -> None:
        self.waited_s = dict.fromkeys(phases, 0.0)
        self.under_way_s = dict.fromkeys(phases, 0.0)

    @staticmethod
    def sent(arrive: Callable[[], Arrived]) -> Sent[Arrived]:
        """Return the record of a message that has just been sent.

        Args:
            arrive: Waits for the message and returns what has arrived.
        """
        return Sent(time.perf_counter(), arrive)

    def arrived(self, phase: str, message: Sent[Arrived]) -> Arrived:
        """Wait for a message, count the time for a phase in which the host waits, and return what
        has arrived.
        """
        if phase not in self.waited_s:
            return message.arrive()
        began = time.perf_counter()
        arrived = message.arrive()
        now = time.perf_counter()
        self.waited_s[phase] += now - began
        self.under_way_s[phase] += now - message.since
        return arrived

    def hidden(self) -> dict[str, float]:
        """Return for each phase that had messages the share of their time under way in which the
        host did other work.
        """
        return {
            phase: 1 - self.waited_s[phase] / seconds
            for phase, seconds in self.under_way_s.items()
            if seconds
        }


def mean_hidden(waits: Iterable[Waits]) -> dict[str, float]:
    """Return by phase what `Waits.hidden` returns, of several exchanges the mean."""
    shares: dict[str, list[float]] = {}
    for one in waits:
        for phase, share in one.hidden().items():
            shares.setdefault(phase, []).append(share)
    return {phase: sum(found) / len(found) for phase, found in shares.items()}
