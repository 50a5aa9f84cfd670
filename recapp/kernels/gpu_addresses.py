"""Addresses of a GPU that get memory as it is needed, so a table grows without moving a row.

    reserved:  | 2 MiB | 2 MiB | ...                                     |   addresses of all rows
    memory:    | part 0        | part 1 | part 2   |                         that may ever come

The CUDA driver keeps addresses and memory apart (its virtual memory management): addresses are
reserved once, parts of memory are created and mapped one behind the other. Torch has no function
for it, so the calls go to the driver through ctypes. A tensor over all addresses sees the memory;
nobody may read it behind the last part. A part is at least an eighth of the memory before it, so
growing takes few calls. Memory comes back when neither the object nor a tensor over it is left.

Torch's allocator knows nothing of this memory: its counts leave it out. Where no memory is left,
the allocator gives back what it keeps for later, and only then the error is that of torch.

No GPU has run this file. Tests put a driver in its place that maps memory of the CPU.
"""

import ctypes
import weakref
from ctypes import byref, c_int, c_size_t, c_uint64
from functools import cache
from typing import Any

import torch
from torch import Tensor

NO_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class GpuAddresses:
    """Reserved addresses of a GPU, the first of which have memory.

    Args:
        size: The bytes that may be needed in the end.
        device: The GPU.

    `mapped` is the number of bytes that have memory.

    Raises:
        OSError: The driver cannot reserve addresses.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._driver = driver()
        gpu = torch.cuda.current_device() if device.index is None else device.index
        # CUmemAllocationProp: pinned, for no other process, of this GPU, without flags
        self._properties = (c_int * 8)(1, 0, 1, gpu)
        # CUmemAccessDesc: this GPU reads and writes
        self._access = (c_int * 3)(1, gpu, 3)
        step = c_size_t()
        _call(self._driver.cuMemGetAllocationGranularity, byref(step), self._properties, c_int(0))
        self._step = step.value
        self.size = self._whole_steps(size)
        self._first = c_uint64()
        anywhere = c_size_t(0), c_uint64(0), c_uint64(0)
        _call(self._driver.cuMemAddressReserve, byref(self._first), c_size_t(self.size), *anywhere)
        self._parts: list[tuple[c_uint64, c_size_t]] = []
        self.mapped = 0
        held = self._first, self.size, self._parts
        # the end of the process takes everything with it
        weakref.finalize(self, _free, self._driver, gpu, *held).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The form in which torch takes memory of others."""
        data = self._first.value, False
        return {"shape": (self.size,), "typestr": "|u1", "data": data, "version": 2}

    def map(self, size: int) -> range:
        """Give memory to at least the first bytes. Return the bytes that are new, and undefined.

        Args:
            size: The number of bytes.

        Raises:
            torch.OutOfMemoryError: The GPU has no memory left.
            OSError: The driver refuses for another reason.
        """
        before = self.mapped
        if size > before:
            place = c_uint64(self._first.value + before)
            handle, part = self._memory(size - before)
            try:
                _call(self._driver.cuMemMap, place, part, c_size_t(0), handle, c_uint64(0))
            finally:  # what is mapped stays
                _call(self._driver.cuMemRelease, handle)
            self._parts.append((place, part))
            _call(self._driver.cuMemSetAccess, place, part, self._access, c_size_t(1))
            self.mapped += part.value
        return range(before, self.mapped)

    def _memory(self, least: int) -> tuple[c_uint64, c_size_t]:
        """Return the handle and the size of memory that has no addresses yet: ahead of what is
        needed, if the GPU has so much.
        """
        handle = c_uint64()
        needed = self._whole_steps(least)
        ahead = max(needed, self._whole_steps(self.mapped // 8))
        part = c_size_t(min(ahead, self.size - self.mapped))
        how = self._properties, c_uint64(0)
        try:
            _call(self._driver.cuMemCreate, byref(handle), part, *how)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            part = c_size_t(needed)
            _call(self._driver.cuMemCreate, byref(handle), part, *how)
        return handle, part

    def _whole_steps(self, size: int) -> int:
        return -(-size // self._step) * self._step


def tensor_over(addresses: GpuAddresses, device: torch.device) -> Tensor:
    """Return all addresses as bytes. The first must have memory, by which torch knows the GPU.

    Args:
        addresses: The addresses.
        device: The GPU.
    """
    return torch.as_tensor(addresses, device=device)


@cache
def driver() -> Any:
    """Return the functions of the CUDA driver.

    Raises:
        OSError: There is no driver.
    """
    return ctypes.CDLL("libcuda.so.1")


def _call(function: Any, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        torch.OutOfMemoryError: No memory is left.
        OSError: The function fails for another reason.
    """
    status = function(*arguments)
    if status == NO_MEMORY:
        raise torch.OutOfMemoryError("CUDA out of memory: a table grows, and the GPU is full")
    if status:
        raise OSError(f"the CUDA driver refuses memory: {function.__name__}: error {status}")


def _free(
    driver: Any, gpu: int, first: c_uint64, size: int, parts: list[tuple[c_uint64, c_size_t]]
) -> None:
    """Give memory and addresses back, after the work of the GPU that reads them."""
    torch.cuda.synchronize(gpu)
    for part in parts:
        driver.cuMemUnmap(*part)
    driver.cuMemAddressFree(first, c_size_t(size))
