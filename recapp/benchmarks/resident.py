"""Memory of this process as numbers that benchmarks subtract; zero where the system is silent."""

from recapp.processes.process_memory import (
    give_back_unused,
    peak_resident_bytes,
    resident_bytes,
)


def settled_bytes() -> int:
    """Return what is resident now, once what is unused was given back."""
    give_back_unused()
    return resident_bytes() or 0


def peak_bytes() -> int:
    """Return the most that was resident since `forget_peak_resident`."""
    return peak_resident_bytes() or 0
