"""Memory for rows of a table, which may grow without moving a row.

On the CPU, all addresses that rows may ever need are reserved at once, which takes no memory. The
system provides a page when a row on it is first written. So a table grows in chunks without copies,
and a step waits only for the pages that it touches. Rows begin as zeros.

Where the system offers pages of 2 MiB (Linux: `madvise`), large memory asks for them: a random row
then costs one miss less of the processor's address cache (TLB). Small memory does not, because a
page of 2 MiB for a few rows would be waste. A fork splits huge pages and copies each page that is
written afterwards. So ranks do not share rows with the processes that they fork to read data.

On a GPU the driver does the same (`gpu_addresses.py`) for rows of which there may be more than at
first. Where addresses cannot be reserved (those of a process are limited, or the driver has no
function for it), memory is allocated, and growing copies the rows into twice the memory.
"""

import mmap
import os
import sys
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from recapp.kernels.gpu_addresses import GpuAddresses, tensor_over

GPU = "cuda"
HUGE_PAGE_BYTES = 2 << 20
# least memory that asks for huge pages: less gains little, and half a page is waste on average
HUGE_FROM_BYTES = 16 << 20
CHUNK_BYTES = 64 << 20  # the step in which growing memory asks for huge pages
# the flag for addresses that cost no memory until they are touched; Python names it from 3.13 on
_NO_RESERVE = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)
_children_have_rows = True


class RowMemory:
    """Rows, [capacity, width]; the first `held` rows have been written.

    Args:
        capacity: The largest number of rows.
        width: The columns of a row.
        dtype: The type of an element.
        device: The device of the rows.

    Attributes:
        rows: All rows; those beyond `held` are zeros. On a GPU those beyond have no memory, and the
            first growth replaces this tensor. Where addresses are not reserved, each growth does.
    """

    def __init__(self, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.width = width
        self.held = 0
        self._huge = 0
        self._map: mmap.mmap | None = None
        self._gpu: GpuAddresses | None = None
        self.rows = torch.zeros(0, width, dtype=dtype, device=device)
        if device.type == "cpu" and capacity * width and hasattr(mmap, "MAP_ANONYMOUS"):
            with suppress(OSError):  # limited addresses: ulimit -v, vm.overcommit_memory=2
                self.rows, self._map = _reserved(capacity, width, dtype)

    @property
    def stays(self) -> bool:
        """Return whether rows keep their places in memory, whatever their number."""
        return self._map is not None or self._gpu is not None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows that are held."""
        return self.held * self._bytes_of_row

    @property
    def _bytes_of_row(self) -> int:
        return self.width * self.rows.element_size()

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowMemory":
        clone = RowMemory(self.capacity, self.width, self.rows.dtype, self.rows.device)
        clone.grow(self.held)
        clone.rows[: self.held] = self.rows[: self.held]
        return clone

    def grow(self, rows: int) -> None:
        """Make room for at least a number of rows; existing rows keep their places.

        Raises:
            MemoryError: The number is above the capacity.
        """
        if rows <= self.held:
            return
        if rows > self.capacity:
            raise MemoryError(f"{rows:,} rows where {self.capacity:,} were thought of")
        if not self.held and rows < self.capacity and self.rows.device.type == GPU:
            with suppress(OSError, AttributeError):  # a driver that cannot reserve addresses
                self._gpu = GpuAddresses(self.capacity * self._bytes_of_row, self.rows.device)
        if self._gpu is not None:
            self._grow_on_gpu(self._gpu, rows)
        elif self._map is None and rows > len(self.rows):
            old_rows = self.rows
            room = max(rows, min(self.capacity, 2 * len(old_rows)))
            self.rows = torch.zeros(room, self.width, dtype=old_rows.dtype, device=old_rows.device)
            self.rows[: len(old_rows)] = old_rows
        self.held = rows
        self._ask_for_huge_pages()

    def _grow_on_gpu(self, addresses: GpuAddresses, rows: int) -> None:
        """Give rows memory at their addresses."""
        new = addresses.map(rows * self._bytes_of_row)
        if not self.held:
            flat = tensor_over(addresses, self.rows.device)[: self.capacity * self._bytes_of_row]
            self.rows = flat.view(self.rows.dtype).view(self.capacity, self.width)
        self.rows.view(-1).view(torch.uint8)[new.start : new.stop].zero_()

    def _ask_for_huge_pages(self) -> None:
        if self._map is None or self.nbytes <= self._huge or self.nbytes < HUGE_FROM_BYTES:
            return
        end = -(-self.nbytes // CHUNK_BYTES) * CHUNK_BYTES
        begin = int(self.rows.storage_offset()) * self.rows.element_size()  # in the map, in bytes
        first = begin + self._huge
        last = min(begin + end, len(self._map))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE, first, last - first)
        self._huge = end


def is_finite(values: Tensor) -> bool:
    """Return whether all values are finite.

    This reads the values once and allocates no memory.
    """
    if not values.is_floating_point() or not values.numel():
        return True
    least, greatest = torch.aminmax(values)  # aminmax returns NaN if a value is NaN
    return bool(torch.isfinite(least) & torch.isfinite(greatest))


def keep_rows_from_children() -> None:
    """Keep the memory that is made from now on out of forked processes, where the system can
    (Linux). A forked process that reads this memory ends with an error.
    """
    global _children_have_rows
    _children_have_rows = False


def _reserved(capacity: int, width: int, dtype: torch.dtype) -> tuple[Tensor, mmap.mmap]:
    """Return zeros in reserved addresses, aligned to a huge page, and their map.

    Raises:
        OSError: The system does not give this process the addresses.
    """
    size = capacity * width * dtype.itemsize
    room = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES
    pages = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    if not _children_have_rows and hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -flat.data_ptr() % HUGE_PAGE_BYTES
    return flat[begin : begin + size].view(dtype).view(capacity, width), pages


def most_bytes(device: torch.device) -> int:
    """Return the total memory of a device in bytes, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
