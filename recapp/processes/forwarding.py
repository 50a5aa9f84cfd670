"""What the process that has started the ranks does with signals: the first one asks the ranks to
stop, the second one ends them.

    Ctrl-C -> this process -> SIGINT to each rank -> they agree on a step, save and leave
           -> this process leaves with code 130

Ranks have sessions of their own, so a terminal's Ctrl-C reaches this process alone, and each rank
hears of it once. A rank that does not take signals yet, because Python is still starting, has
nothing to save and is ended by SIGTERM, whatever has come: SIGINT would have Python print a
traceback, and a rank that is killed looks like one that memory ran out for.
"""

import os
import re
import select
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from recapp.console import note
from recapp.processes.stopping import SIGNALS, Stopped, heed

# beyond launch.grace, or after the first rank has ended, before ranks that are still there are
# killed
GRACE_SECONDS = 10.0
LOOK_SECONDS = 0.2


class Forwarding:
    """While this lasts, signals to this process are meant for its ranks.

    Args:
        run: the run id of the ranks, which their environment holds.
        grace: seconds that ranks have to write a checkpoint.

    `number` is the first signal that came, 0 before.
    """

    def __init__(self, run: str, grace: float) -> None:
        self.run = run
        self.grace = grace
        self.number = 0
        self._kept: dict[int, Any] = {}
        self._ranks: list[int] = []  # file descriptors of their processes
        self._over = threading.Event()

    def __enter__(self) -> "Forwarding":
        heed()  # nobody has told the ranks of a signal that came before them
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if not (number == signal.SIGHUP and handler == signal.SIG_IGN):  # nohup
                self._kept[number] = handler
                signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for number, handler in self._kept.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            if not self._ranks:  # the first signal is still looking for them
                self._tell_ranks()
            self._send(signal.SIGKILL)
            raise Stopped(self.number)
        self.number = number
        if self._tell_ranks():
            note(f"stopping after {signal.Signals(number).name}; a second one ends the run at once")
        threading.Thread(target=self._end_late_ones, name="end late ranks", daemon=True).start()
        if not self._ranks:
            raise Stopped(number)

    def _tell_ranks(self) -> int:
        """Send the signal to the ranks that are there; how many of them leave in their own time."""
        asked = 0
        for pid in _ranks_of(self.run):
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                takes = _takes_signals(pid)
                self._ranks.append(descriptor)
                _send(descriptor, self.number if takes else signal.SIGTERM)
                asked += takes
        return asked

    def _end_late_ones(self) -> None:
        """Kill ranks that do not end: all of them have the grace, and some seconds once one of them
        has gone.
        """
        end = time.monotonic() + self.grace + GRACE_SECONDS
        while not self._over.wait(LOOK_SECONDS):
            if not self._ranks:  # whoever was about to start them has lost `Stopped`
                self._tell_ranks()
            now = time.monotonic()
            if any(_has_ended(descriptor) for descriptor in self._ranks):
                end = min(end, now + GRACE_SECONDS)
            if now > end:
                self._send(signal.SIGKILL)
                return

    def _send(self, number: int) -> None:
        for descriptor in self._ranks:
            _send(descriptor, number)


def _send(descriptor: int, number: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, number)


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _ranks_of(run: str) -> list[int]:
    """The processes that this one has started as ranks of a run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            variables = (
                (folder / "environ").read_bytes().split(b"\0") if int(parent) == os.getpid() else []
            )
        except OSError:  # it has ended, or is another user's
            continue
        if f"TORCHELASTIC_RUN_ID={run}".encode() in variables:
            found.append(int(folder.name))
    return found


def _takes_signals(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM: Python itself puts in none."""
    try:
        caught = re.search(
            r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
        )
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
