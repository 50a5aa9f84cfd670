"""What the system knows of a process: how long ago it was started, whether it is stopped; for how
long that has been so.
"""

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from recapp.processes.fork_server import PARENT_PID

LONGEST_LOOK_SECONDS = 2.0
"""What counts at most from one look to the next: this process was stopped itself where more has
passed, or so busy that it cannot blame others."""

_START_FIELD = 19  # of /proc/PID/stat behind the name: ticks after the machine's start (proc(5))


def process_age(pid: int | str = "self") -> float | None:
    """Return the seconds since a process was started, to a hundredth; None where the system does
    not say. What happened before its first line of Python counts as well.

    Args:
        pid: Its number, by default that of this process.
    """
    if (fields := _fields(pid)) is None:
        return None
    ticks = int(fields[_START_FIELD])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP: no signal reaches it but SIGKILL."""
    fields = _fields(pid)
    return fields is not None and fields[0] == "T"


class SecondsSeen:
    """For how long things have been seen at each look without a break.

    Time in which this process was itself stopped does not count: whoever stops a job as a whole may
    let it go on after days.
    """

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._seconds: dict[int, float] = {}

    def look(self, seen: Iterable[int]) -> Mapping[int, float]:
        """Return the seconds by thing, 0 for those that are new.

        Args:
            seen: What is seen now; what is not begins anew.
        """
        now = time.monotonic()
        passed = min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        before = self._seconds
        self._seconds = {one: before[one] + passed if one in before else 0.0 for one in seen}
        return self._seconds


def _fields(pid: int | str) -> list[str] | None:
    """Return the fields of /proc/PID/stat behind the name, if there are any."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def command_age() -> float | None:
    """Return the seconds since the command was started whose rank this process is; its own age
    where it is none.
    """
    return process_age(os.environ.get(PARENT_PID, "self"))
