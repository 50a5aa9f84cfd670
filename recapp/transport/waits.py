"""The hidden share of an exchange: the time that messages were under way, and the part of that time
in which the host waited.

    sent                                  wanted      there
     |------- the host does other work -----|-- waits --|

The first part, divided by the whole, is the hidden share. Messages for which a GPU stream waits
instead of the host are not counted, because the host cannot measure them.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

Arrived = TypeVar("Arrived")


class Sent(NamedTuple, Generic[Arrived]):
    """A message under way.

    Args:
        since: The time of sending, in seconds of `time.perf_counter`.
        arrive: A function that waits for the message and returns its contents.
    """

    since: float
    arrive: Callable[[], Arrived]


class Waits:
    """The times since the start that messages were under way and that the host waited, by phase.

    Args:
        phases: The names of the phases in which the host waits.

    Attributes:
        waited_s: The seconds in which the host waited, by phase.
        under_way_s: The seconds from sending to arrival, by phase.
    """

    def __init__(self, phases: Sequence[str]) -> None:
        self.waited_s = dict.fromkeys(phases, 0.0)
        self.under_way_s = dict.fromkeys(phases, 0.0)

    @staticmethod
    def sent(arrive: Callable[[], Arrived]) -> Sent[Arrived]:
        """Return the record of a message that was just sent.

        Args:
            arrive: Waits for the message and returns its contents.
        """
        return Sent(time.perf_counter(), arrive)

    def arrived(self, phase: str, message: Sent[Arrived]) -> Arrived:
        """Wait for a message and return its contents. Count the time if the host waits in this
        phase.
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
        """Return the hidden share of each phase with messages: the part of their time under way in
        which the host did other work.
        """
        return {
            phase: 1 - self.waited_s[phase] / seconds
            for phase, seconds in self.under_way_s.items()
            if seconds
        }


def mean_hidden(waits: Iterable[Waits]) -> dict[str, float]:
    """Return the mean of `Waits.hidden` over several exchanges, by phase."""
    shares: dict[str, list[float]] = {}
    for one in waits:
        for phase, share in one.hidden().items():
            shares.setdefault(phase, []).append(share)
    return {phase: sum(found) / len(found) for phase, found in shares.items()}
