"""What the system knows of a process: how long ago it was started, whether it is stopped."""

import os
import time
from pathlib import Path

from recapp.processes.fork_server import PARENT_PID

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
