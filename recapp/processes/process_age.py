"""How long ago a process was started, as the system knows it: what happened before its first line
of Python counts as well.
"""

import os
import time
from pathlib import Path

from recapp.processes.fork_server import PARENT_PID

_START_FIELD = 19  # of /proc/PID/stat behind the name: ticks after the machine's start (proc(5))


def process_age(pid: int | str = "self") -> float | None:
    """Return the seconds since a process was started, to a hundredth; None where the system does
    not say.

    Args:
        pid: Its number, by default that of this process.
    """
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    ticks = int(said.rpartition(")")[2].split()[_START_FIELD])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def command_age() -> float | None:
    """Return the seconds since the command was started whose rank this process is; its own age
    where it is none.
    """
    return process_age(os.environ.get(PARENT_PID, "self"))
