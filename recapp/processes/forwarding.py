"""What the process that has started the ranks does with signals: the first one asks the ranks to
stop, the second one ends them.

    Ctrl-C -> this process -> SIGINT to each rank -> they stop at the same step, save and leave
           -> this process leaves with code 130

Ranks have sessions of their own, so a terminal's Ctrl-C reaches this process alone, and each rank
gets it once. A rank that does not handle signals yet, because Python is still starting, has nothing
to save and is ended by SIGTERM, whichever signal came: SIGINT would have Python print a traceback,
and a rank that is killed looks like one that memory ran out for.
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
from recapp.processes.stopping import SIGNALS, Stopped, raise_if_stopped

# time beyond launch.grace, or after the first rank has ended, until ranks that are left are killed
GRACE_SECONDS = 10.0
LOOK_SECONDS = 0.2


class Forwarding:
    """A context manager that forwards signals from this process to its ranks.

    Args:
        run: The run id of the ranks, which their environment holds.
        grace: The seconds that ranks have to write a checkpoint.
        reloads: Whether SIGHUP is a message for rank 0, and stops nothing.

    Attributes:
        number: The first signal that came; 0 before.
    """

    def __init__(self, run: str, grace: float, reloads: bool = False) -> None:
        self.run = run
        self.grace = grace
        self._reloads = reloads
        self.number = 0
        self._kept: dict[int, Any] = {}
        self._ranks: list[int] = []  # file descriptors of their processes
        self._over = threading.Event()

    def __enter__(self) -> "Forwarding":
        raise_if_stopped()  # a signal that came before there were ranks
        for number in SIGNALS:
            handler = signal.getsignal(number)
            reloads = self._reloads and number == signal.SIGHUP
            if reloads or not (number == signal.SIGHUP and handler == signal.SIG_IGN):  # nohup
                self._kept[number] = handler
                signal.signal(number, self._pass_on if reloads else self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for number, handler in self._kept.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            if not self._ranks:  # the first signal is still looking for them
                self._signal_ranks()
            self._send(signal.SIGKILL)
            raise Stopped(self.number)
        self.number = number
        if self._signal_ranks():
            note(f"stopping after {signal.Signals(number).name}; a second one ends the run at once")
        threading.Thread(target=self._end_late_ones, name="end late ranks", daemon=True).start()
        if not self._ranks:
            raise Stopped(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send a signal to rank 0 alone, once it handles signals."""
        for pid in _ranks_of(self.run, "RANK=0"):
            if _takes_signals(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _signal_ranks(self) -> int:
        """Send the signal to the ranks that are there; return how many of them handle it."""
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
        """Kill ranks that do not end in time.

        All have the grace; once one of them has ended, the others have some seconds.
        """
        end = time.monotonic() + self.grace + GRACE_SECONDS
        while not self._over.wait(LOOK_SECONDS):
            if not self._ranks:  # `Stopped` got lost, and ranks were started after the signal
                self._signal_ranks()
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


def _ranks_of(run: str, *more: str) -> list[int]:
    """Return the ids of the processes that this one has started as ranks of a run.

    Args:
        run: The run id.
        more: What else their environment has to hold, such as `RANK=0`.
    """
    wanted = {entry.encode() for entry in (f"TORCHELASTIC_RUN_ID={run}", *more)}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            variables = (
                (folder / "environ").read_bytes().split(b"\0") if int(parent) == os.getpid() else []
            )
        except OSError:  # it has ended, or is another user's
            continue
        if wanted <= set(variables):
            found.append(int(folder.name))
    return found


def _takes_signals(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM, which Python itself does not install."""
    try:
        caught = re.search(
            r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
        )
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
