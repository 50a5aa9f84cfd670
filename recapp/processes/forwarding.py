"""Forward signals from the launcher to the ranks: the first signal asks the ranks to stop, the
second one ends them.

    Ctrl-C -> this process -> SIGINT to each rank -> they stop at the same step, save and leave
           -> this process leaves with code 130

Each rank has a session of its own, so a terminal's Ctrl-C reaches only this process, and each rank
gets the signal once. A rank that is still starting blocks signals. It gets the signal as soon as it
handles signals, and leaves with nothing to save.
"""

import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from recapp.console import note
from recapp.processes.stopping import SIGNALS, Stopped, raise_if_stopped

# time after launch.grace, or after the end of the first rank, until the launcher kills the others
GRACE_SECONDS = 10.0
LOOK_SECONDS = 0.2


class Forwarding:
    """A context manager that forwards signals from this process to its ranks.

    Args:
        grace: The seconds that ranks have to write a checkpoint.
        reloads: Whether SIGHUP only goes to rank 0, which reloads, and stops nothing.

    Attributes:
        number: The first signal; 0 before.
    """

    def __init__(self, grace: float, reloads: bool = False) -> None:
        self.grace = grace
        self._reloads = reloads
        self.number = 0
        self._deadline = float("inf")
        self._kept: dict[int, Any] = {}
        self._ranks: Mapping[int, Any] = {}

    def __enter__(self) -> "Forwarding":
        raise_if_stopped()  # for a signal that arrived before the start of the ranks
        for number in SIGNALS:
            handler = signal.getsignal(number)
            reloads = self._reloads and number == signal.SIGHUP
            if reloads or not (number == signal.SIGHUP and handler == signal.SIG_IGN):  # nohup
                self._kept[number] = handler
                signal.signal(number, self._pass_on if reloads else self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)

    def watch(self, ranks: Mapping[int, Any]) -> None:
        """Forward signals to the ranks from now on.

        Args:
            ranks: The process of each rank that runs. The caller removes ranks that have ended.

        Raises:
            Stopped: A signal has arrived already, and the exception of its handler got lost.
        """
        self._ranks = ranks
        if self.number:
            raise Stopped(self.number)

    def deadline(self, *, one_has_ended: bool) -> float:
        """Return the time at which ranks that still run are killed: infinite before a signal, the
        end of the grace after it, or some seconds after the end of the first rank.
        """
        if self.number and one_has_ended:
            self._deadline = min(self._deadline, time.monotonic() + GRACE_SECONDS)
        return self._deadline

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            send_signal(self._ranks, signal.SIGKILL)
            raise Stopped(self.number)
        self.number = number
        self._deadline = time.monotonic() + self.grace + GRACE_SECONDS
        if not self._ranks:
            raise Stopped(number)
        send_signal(self._ranks, number)
        note(f"stopping after {signal.Signals(number).name}; a second one ends the run at once")

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send a signal only to rank 0, and only if that rank handles signals already."""
        rank = self._ranks.get(0)
        if rank is not None and _takes_signals(rank.pid):
            send_signal({0: rank}, number)


def send_signal(ranks: Mapping[int, Any], number: int) -> None:
    """Send a signal to processes, some of which may just have ended."""
    for rank in list(ranks.values()):
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)


def _takes_signals(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM, which Python itself does not install."""
    try:
        caught = re.search(
            r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
        )
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
