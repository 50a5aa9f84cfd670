"""The memory of this process as numbers that benchmarks subtract.

They are zero where the system does not report them.
"""

from recapp.processes.process_memory import (
    give_back_unused,
    peak_resident_bytes,
    resident_bytes,
)


def settled_bytes() -> int:
    """Return the resident bytes after giving unused memory back to the system."""
    give_back_unused()
    return resident_bytes() or 0


def peak_bytes() -> int:
    """Return the most bytes that were resident at once since `forget_peak_resident`."""
    return peak_resident_bytes() or 0
