"""The status of a process: its age, whether it is stopped (SIGSTOP), and for how long."""

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from recapp.processes.fork_server import PARENT_PID

LONGEST_LOOK_SECONDS = 2.0
"""The most time that counts between two looks. A longer gap shows that this process itself was
stopped or too busy, so it cannot blame others for that time."""

_START_FIELD = 19  # index in /proc/PID/stat after the name: start in ticks since boot (proc(5))


def process_age(pid: int | str = "self") -> float | None:
    """Return the seconds since a process started, to a hundredth; None where the system does not
    know. The time before the first line of Python counts too.

    Args:
        pid: The number of the process; by default this process.
    """
    if (fields := _fields(pid)) is None:
        return None
    ticks = int(fields[_START_FIELD])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP. Then only SIGKILL reaches it."""
    fields = _fields(pid)
    return fields is not None and fields[0] == "T"


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


def _fields(pid: int | str) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name; None where the file cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def command_age() -> float | None:
    """Return the seconds since the start of the command that has started this rank; the age of this
    process where it is not such a rank.
    """
    return process_age(os.environ.get(PARENT_PID, "self"))
