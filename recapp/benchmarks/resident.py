"""Memory of this process as Linux counts it, now and at its highest."""

import ctypes
import gc
from pathlib import Path


def resident_bytes() -> int:
    """What is resident now, once what is unused was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def forget_peak() -> None:
    """Let `peak_bytes` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak


def peak_bytes() -> int:
    """The most that was resident since `forget_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0
