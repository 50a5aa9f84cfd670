"""Memory for rows: what it holds, what it takes, and where it cannot be reserved."""

import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from recapp.kernels import row_memory
from recapp.kernels.row_memory import HUGE_FROM_BYTES, HUGE_PAGE_BYTES, RowMemory
from recapp.processes.process_memory import resident_bytes

CPU = torch.device("cpu")
MIB = 1 << 20

needs_resident = pytest.mark.skipif(
    resident_bytes() is None, reason="the system does not say what a process holds"
)


def memory(rows=0, width=4, capacity=1 << 40):
    made = RowMemory(capacity // (4 * width), width, torch.float32, CPU)
    made.grow(rows)
    return made


def flags_of(held):
    """Return the system's flags of a memory's first rows: `hg`, huge pages; `dc`, not forked."""
    address = held.rows.data_ptr()
    with open("/proc/self/smaps") as lines:
        inside = False
        for line in lines:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                first, last = (int(x, 16) for x in words[0].split("-"))
                inside = first <= address < last
            elif inside and words[0] == "VmFlags:":
                return words[1:]
    raise AssertionError("not mapped")


@pytest.fixture
def refused(monkeypatch):
    """Have the system reserve no addresses."""

    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(row_memory.mmap, "mmap", refuse)


def test_rows_begin_as_zeros_and_stay_where_they_are():
    held = memory(3)
    held.rows[:3] = 7.0
    before = held.rows.data_ptr()
    held.grow(100_000)
    assert held.rows.data_ptr() == before and held.nbytes == 100_000 * 16
    assert (held.rows[:3] == 7).all() and not held.rows[3:100_000].any()


def test_rows_without_reserved_addresses_keep_their_values(refused):
    held = memory(3)
    assert len(held.rows) == 3
    held.rows[:3] = 7.0
    held.grow(5)
    assert (held.rows[:3] == 7).all() and not held.rows[3:].any() and held.held == 5


@pytest.mark.parametrize("reserved", [True, False])
def test_more_rows_than_were_thought_of_are_refused(reserved, request):
    if not reserved:
        request.getfixturevalue("refused")
    held = memory(capacity=10 * 16)
    held.grow(10)
    with pytest.raises(MemoryError, match="11 rows where 10 were thought of"):
        held.grow(11)


def test_a_memory_of_no_rows_holds_nothing():
    assert memory(capacity=0).rows.shape == (0, 4) and memory(capacity=0).nbytes == 0


@needs_resident
def test_reserved_rows_take_memory_when_they_are_written_and_give_it_back():
    before = resident_bytes()
    held = memory(64 * MIB // 16)
    assert resident_bytes() - before < MIB
    held.rows[: 32 * MIB // 16] = 1.0
    assert 31 * MIB < resident_bytes() - before < 36 * MIB
    del held
    gc.collect()
    assert resident_bytes() - before < MIB


@needs_resident
def test_few_rows_take_little_memory():
    before = resident_bytes()
    held = [memory(3) for _ in range(20)]
    for m in held:
        m.rows[:3] = 1.0
    assert resident_bytes() - before < MIB


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps is Linux's")
def test_large_memory_lies_on_huge_pages_and_small_memory_does_not():
    few = memory((HUGE_FROM_BYTES - 1) // 16)
    many = memory(HUGE_FROM_BYTES // 16)
    assert many.rows.data_ptr() % HUGE_PAGE_BYTES == 0
    assert ["hg" in flags_of(m) for m in (few, many)] == [False, True]


def _reads(held, expected, answers):
    answers.put(bool((held.rows[:3] == expected).all()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_process_sees_rows_as_they_were():
    held = memory(3)
    held.rows[:3] = 1.0
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_reads, args=(held, 1.0, answers))
    child.start()
    held.rows[:3] = 2.0
    assert answers.get(timeout=30)
    child.join()
    assert (held.rows[:3] == 2).all()


@pytest.mark.skipif(sys.platform != "linux", reason="MADV_DONTFORK is Linux's")
def test_processes_that_a_rank_forks_do_not_take_its_huge_pages_apart(monkeypatch):
    monkeypatch.setattr(row_memory, "_children_have_rows", True)
    shared = memory(3)
    row_memory.keep_rows_from_children()
    own = memory(3)
    own.rows[:3] = shared.rows[:3] = 1.0
    assert ["dc" in flags_of(m) for m in (shared, own)] == [False, True]
    child = os.fork()
    if child == 0:
        os._exit(int(shared.rows[:3].sum()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 12
    assert (own.rows[:3] == 1).all()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit addresses")
def test_tables_train_where_the_addresses_of_a_process_are_limited():
    program = """
        import resource
        import torch
        from recapp.kernels.row_memory import RowMemory, most_bytes

        torch.zeros(1)
        with open("/proc/self/statm") as f:
            used = int(f.read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
        device = torch.device("cpu")
        held = RowMemory(most_bytes(device) // 64, 16, torch.float32, device)
        held.grow(10)
        held.rows[:10] = 1.0
        held.grow(1000)
        assert held.rows[:1000].sum() == 160
        print("trained")
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout == "trained\n", ran.stderr
