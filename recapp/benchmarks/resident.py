"""The memory of this process as numbers that benchmarks subtract.

They are zero where the system does not report them.
"""

import gc
from contextlib import suppress

import torch

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


def tensor_bytes() -> int:
    """Return the bytes of memory behind all tensors on the CPU that this process still refers to.

    Tensors that share memory count once. Inherited tensors of a fork do not count where its garbage
    collector was frozen, as that of ranks is; nor do tensors that only autograd keeps.
    """
    gc.collect()  # a model that was deleted may wait in a circle of references
    memories = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            with suppress(RuntimeError):  # a tensor without memory of its own
                memory = found.untyped_storage()
                memories[memory.data_ptr()] = memory.nbytes()
    return sum(memories.values())
