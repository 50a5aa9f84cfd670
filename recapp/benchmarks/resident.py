"""The memory of this process, as numbers that benchmarks can subtract.

A number is zero where the system does not report it.
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
    """Return unused memory to the system, and return the resident bytes that are left."""
    give_back_unused()
    return resident_bytes() or 0


def peak_bytes() -> int:
    """Return the peak of the resident bytes since `forget_peak_resident`."""
    return peak_resident_bytes() or 0


def tensor_bytes() -> int:
    """Return the bytes of memory behind all CPU tensors that this process still refers to.

    Tensors that share memory count once. Tensors that only autograd keeps do not count. Nor do
    tensors that a fork inherits, if its garbage collector was frozen, as in ranks.
    """
    gc.collect()  # a deleted model may still be kept by a cycle of references
    memories = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            with suppress(RuntimeError):  # a tensor without memory of its own
                memory = found.untyped_storage()
                memories[memory.data_ptr()] = memory.nbytes()
    return sum(memories.values())
