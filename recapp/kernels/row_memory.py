"""Memory for rows of a table, which may grow without moving a row.

On the CPU all the addresses that rows may ever need are reserved at once, which takes no memory;
the system gives a page when a row on it is first written. So a table grows in chunks, nothing is
copied, and no step waits for more than the pages that it touches. Rows begin as zeros.

Where the system offers pages of 2 MiB (Linux: `madvise`), memory of some size asks for them: a
random row then costs one miss of the processor's address cache less. Small memory does not: a page
of 2 MiB for a few rows would be waste. A fork takes huge pages apart and copies each page that is
written afterwards, so ranks of a job keep rows from the processes that they fork, which read data.

Where nothing can be reserved (on a GPU, or where the addresses of a process are limited) memory is
allocated, and growing copies rows into twice as much.
"""

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
# memory that asks for huge pages has so much: less gains little, and half a page is waste
HUGE_FROM_BYTES = 16 << 20
CHUNK_BYTES = 64 << 20  # by which memory asks for huge pages as it grows
# addresses that cost no memory before they are touched; Python names the flag from 3.13 on
_NO_RESERVE = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)
_asks_for_huge_pages = True
_children_have_rows = True


class RowMemory:
    """Rows, [capacity, width], of which the first `held` have been written.

    Args:
        capacity: Most rows.
        width: Columns.
        dtype: Type of an element.
        device: Device of the rows.

    Attributes:
        rows: All rows, those beyond `held` are zeros. On a GPU another tensor after growing.
    """

    def __init__(self, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.width = width
        self.held = 0
        self._huge = 0 if _asks_for_huge_pages else sys.maxsize
        self._map: mmap.mmap | None = None
        self.rows = torch.zeros(0, width, dtype=dtype, device=device)
        if device.type == "cpu" and capacity * width and hasattr(mmap, "MAP_ANONYMOUS"):
            with suppress(OSError):  # addresses are limited: ulimit -v, vm.overcommit_memory=2
                self.rows, self._map = _reserved(capacity, width, dtype)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows that are held."""
        return self.held * self.width * self.rows.element_size()

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowMemory":
        made = RowMemory(self.capacity, self.width, self.rows.dtype, self.rows.device)
        made.grow(self.held)
        made.rows[: self.held] = self.rows[: self.held]
        return made

    def grow(self, rows: int) -> None:
        """Have room for a number of rows at least; those that are there keep their places.

        Raises:
            MemoryError: More than the capacity.
        """
        if rows <= self.held:
            return
        if rows > self.capacity:
            raise MemoryError(f"{rows:,} rows where {self.capacity:,} were thought of")
        if self._map is None and rows > len(self.rows):
            held = self.rows
            room = max(rows, min(self.capacity, 2 * len(held)))
            self.rows = torch.zeros(room, self.width, dtype=held.dtype, device=held.device)
            self.rows[: len(held)] = held
        self.held = rows
        self._ask_for_huge_pages()

    def _ask_for_huge_pages(self) -> None:
        if self._map is None or self.nbytes <= self._huge or self.nbytes < HUGE_FROM_BYTES:
            return
        end = -(-self.nbytes // CHUNK_BYTES) * CHUNK_BYTES
        begin = int(self.rows.storage_offset()) * self.rows.element_size()  # in the map
        last = min(begin + end, len(self._map))
        _ask_for_huge_pages(self._map, begin + self._huge, last)
        self._huge = end


@contextmanager
def small_pages() -> Iterator[None]:
    """Have memory that is made in this context ask for no huge pages, so that both can be measured
    in one process.
    """
    global _asks_for_huge_pages
    before = _asks_for_huge_pages
    _asks_for_huge_pages = False
    try:
        yield
    finally:
        _asks_for_huge_pages = before


def keep_rows_from_children() -> None:
    """Have processes that are forked from this one not map the memory that is made from now on,
    where the system can do so (Linux); to read it there ends them.
    """
    global _children_have_rows
    _children_have_rows = False


def _reserved(capacity: int, width: int, dtype: torch.dtype) -> tuple[Tensor, mmap.mmap]:
    """Return zeros in addresses that are reserved, from a huge page's border on, and their map.

    Raises:
        OSError: The system has no such addresses for this process.
    """
    size = capacity * width * dtype.itemsize
    room = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES
    held = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    if not _children_have_rows and hasattr(mmap, "MADV_DONTFORK"):
        held.madvise(mmap.MADV_DONTFORK)
    flat = torch.frombuffer(held, dtype=torch.uint8)
    begin = -flat.data_ptr() % HUGE_PAGE_BYTES
    return flat[begin : begin + size].view(dtype).view(capacity, width), held


def _ask_for_huge_pages(held: mmap.mmap, first: int, last: int) -> None:
    """Ask the system for huge pages in a part of a map, where it knows them."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    with suppress(OSError):  # a system that was built without them
        held.madvise(advice, first, last - first)


def most_bytes(device: torch.device) -> int:
    """Return the bytes of all memory of a device, whoever uses it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
