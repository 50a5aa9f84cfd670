"""Rows on a GPU that grow at their addresses. A driver in the place of CUDA's maps memory of the
CPU; no GPU has run this.
"""

import ctypes
import gc
import mmap
from itertools import pairwise

import pytest
import torch
from engine.engine_cases import make_plan
from engine.test_dynamic_tables import batch_of, tables

from recapp.engine.sharded_collection import shard_bags
from recapp.kernels import gpu_addresses, row_memory
from recapp.kernels.gpu_addresses import GpuAddresses
from recapp.kernels.row_memory import RowMemory
from recapp.optim.rules import adam
from recapp.transport.communicator import Comm

CPU = torch.device("cpu")
STEP = 2 << 20
ROW = 16  # bytes
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_uint64
LIBC.mmap.argtypes = [ctypes.c_uint64, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class Driver:
    """The functions of the CUDA driver, whose memory is full of ones at first."""

    def __init__(self, memory=1 << 30):
        self.free = memory
        self.handles = {}
        self.mapped = {}
        self.ranges = {}
        self.refused = ""
        self.reserved = 0
        for name in (n for n in dir(type(self)) if n.startswith("cu")):
            setattr(self, name, self._counted(name))

    def _counted(self, name):
        work = getattr(self, name)

        def function(*arguments):
            values = [getattr(a, "_obj", getattr(a, "value", a)) for a in arguments]
            return 999 if name == self.refused else work(*values) or 0

        function.__name__ = name
        return function

    def cuMemGetAllocationGranularity(self, size, properties, least):
        assert list(properties)[:4] == [1, 0, 1, 3] and least == 0
        assert ctypes.sizeof(properties) == 32
        size.value = STEP

    def cuMemAddressReserve(self, pointer, size, alignment, address, flags):
        assert size % STEP == alignment == address == flags == 0
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # no memory until it is used
        pointer.value = LIBC.mmap(0, size, 0, anonymous, -1, 0)
        self.ranges[pointer.value] = size
        self.reserved += 1

    def cuMemCreate(self, handle, size, properties, flags):
        assert size > 0 and size % STEP == flags == 0
        if size > self.free:
            return 2
        self.free -= size
        handle.value = max(self.handles, default=0) + 1
        self.handles[handle.value] = size
        return 0

    def cuMemMap(self, address, size, offset, handle, flags):
        assert offset == flags == 0 and size == self.handles[handle]
        first = max(r for r in self.ranges if r <= address)
        assert address + size <= first + self.ranges[first]
        assert all(not m < address + size <= m + n for m, n in self.mapped.items())
        self.mapped[address] = size

    def cuMemRelease(self, handle):
        size = self.handles.pop(handle)
        if size not in self.mapped.values():
            self.free += size

    def cuMemSetAccess(self, address, size, access, entries):
        assert list(access) == [1, 3, 3] and entries == 1 and self.mapped[address] == size
        rights = ctypes.c_int(mmap.PROT_READ | mmap.PROT_WRITE)
        assert LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), rights) == 0
        ctypes.memset(address, 1, size)

    def cuMemUnmap(self, address, size):
        assert self.mapped.pop(address) == size
        self.free += size

    def cuMemAddressFree(self, address, size):
        assert self.ranges.pop(address) == size
        assert LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0


def tensor_over(addresses, device):
    """As torch makes one over memory of others, which the tensor keeps."""
    (size,), (first, _) = (addresses.__cuda_array_interface__[k] for k in ("shape", "data"))
    memory = (ctypes.c_ubyte * size).from_address(first)
    memory.owner = addresses
    return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch):
    """Have the memory of rows on the CPU take the way of a GPU, and return its driver."""
    made = Driver()
    monkeypatch.setattr(gpu_addresses, "driver", lambda: made)
    monkeypatch.setattr(row_memory, "tensor_over", tensor_over)
    monkeypatch.setattr(row_memory, "GPU", "cpu")
    monkeypatch.setattr(row_memory, "_reserved", no_map)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda gpu: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    yield made
    gc.collect()
    assert not made.ranges and not made.mapped and not made.handles


def no_map(*_):
    raise OSError(12, "Cannot allocate memory")


def memory(rows, capacity=1 << 26):
    made = RowMemory(capacity, 4, torch.float32, CPU)
    made.grow(rows)
    return made


def test_rows_grow_where_they_are_and_begin_as_zeros(driver):
    held = memory(3)
    held.rows[:3] = 7.0
    rows = held.rows
    assert rows.shape == (1 << 26, 4) and sum(driver.mapped.values()) == STEP
    for count in (4, STEP // ROW + 1, 3 * STEP // ROW, 40 * STEP // ROW):
        held.grow(count)
        assert held.rows is rows and held.nbytes == count * ROW
        assert (rows[:3] == 7).all() and not rows[3:count].any()
    spans = sorted((first, first + size) for first, size in driver.mapped.items())
    assert all(a[1] == b[0] for a, b in pairwise(spans)) and len(spans) == 4


def test_growing_row_by_row_takes_few_calls(driver):
    held = GpuAddresses(1 << 33, CPU)
    for size in range(STEP, 400 * STEP, STEP):
        held.map(size)
    assert len(driver.mapped) < 40
    assert len(held.map(5)) == 0


def test_memory_is_never_more_than_all_rows_take(driver):
    rows = 10 * STEP // ROW + 5
    held = memory(9 * STEP // ROW, capacity=rows)
    held.grow(rows)
    assert sum(driver.mapped.values()) == 11 * STEP
    held.rows[-1] = 2.0
    with pytest.raises(MemoryError, match="were thought of"):
        held.grow(rows + 1)


def test_a_tensor_keeps_the_memory_of_rows_that_are_gone(driver):
    held = memory(3)
    part = held.rows[1:2]
    del held
    gc.collect()
    assert driver.mapped and not part.any()


def test_rows_whose_number_is_known_take_memory_of_torch(driver):
    held = memory(100, capacity=100)
    assert not driver.ranges and held.rows.shape == (100, 4)


@pytest.mark.parametrize("name", ["cuMemGetAllocationGranularity", "cuMemAddressReserve"])
def test_without_addresses_rows_move(driver, name):
    driver.refused = name
    held = memory(3)
    held.rows[:3] = 7.0
    held.grow(100)
    assert (held.rows[:3] == 7).all() and not held.rows[3:].any() and not driver.ranges


def test_a_full_gpu_is_the_error_of_torch_and_takes_no_row_away(driver):
    held = memory(8 * STEP // ROW)
    held.rows[: held.held] = 5.0
    driver.free = STEP  # less than is mapped ahead
    held.grow(held.held + 1)
    assert driver.free == 0
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory: a table grows"):
        held.grow(10 * STEP // ROW)
    assert held.held == 8 * STEP // ROW + 1 and (held.rows[: 8 * STEP // ROW] == 5).all()


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_an_error_of_the_driver_is_one_line(driver, name):
    held = memory(3)
    driver.refused = name
    with pytest.raises(OSError, match=f"^the CUDA driver refuses memory: {name}: error 999$"):
        held.grow(STEP // ROW + 1)
    driver.refused = ""
    assert len(driver.handles) == 0 and held.held == 3


def test_dynamic_tables_train_as_where_rows_move(driver):
    configs = tables()
    plan = make_plan("table_wise", configs, 1)

    def trained():
        collection = shard_bags(configs, plan, Comm(), adam(0.1), 7, "torch")
        for step in range(4):
            collection(batch_of(step, 0)).values().square().sum().backward()
        return collection(batch_of(9, 0)).values().detach()

    values = trained()
    assert driver.reserved > 4
    driver.refused = "cuMemAddressReserve"
    assert torch.equal(values, trained())
