"""The index of dynamic tables on a GPU, in Triton's interpreter: programs follow one another there,
so that races between threads do not show.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels.test_key_index import CPU, crowded, few, random_steps, spread

from recapp.kernels.reference import SortedIndex
from recapp.tables.positions import STRETCHES

TESTS = Path(__file__).parents[1]


@pytest.fixture
def made(interpreted, monkeypatch):
    """Return a function that makes an index of few lanes and buckets: several programs, growth."""
    monkeypatch.setattr("recapp.kernels.triton_key_index.LANES", 32)
    monkeypatch.setattr("recapp.kernels.triton_key_index.LEAST_BUCKETS", 16)
    return lambda: interpreted.key_index(range(STRETCHES), 1 << 16, CPU)


@pytest.mark.parametrize("positions", [spread, few])
def test_keys_are_found_added_and_removed_as_in_a_dict(made, positions):
    random_steps(made(), positions, 3, 80)


@pytest.mark.full
@pytest.mark.parametrize("positions", [spread, crowded, few])
def test_many_strips_and_steps(made, positions):
    random_steps(made(), positions, 10, 300, strips=26)


def test_keys_of_one_hash_and_words_of_buckets_are_keys_like_others(made):
    """All keys begin at one bucket, and their positions are the words that mark buckets."""
    index = made()
    index._secret = 0  # every key has the same hash
    strip_N = torch.arange(24).to(torch.int16) % 3
    position_N = torch.arange(-8, 16) // 2
    index.positions.grow(24)
    index.strips.grow(24)
    slot_N, first_U = index.find_or_insert(position_N, strip_N, torch.arange)
    assert slot_N.tolist() == first_U.tolist() == list(range(24))
    index.remove(slot_N[::2])
    assert index.find(position_N, strip_N).tolist() == [-1 if n % 2 == 0 else n for n in range(24)]


def test_removed_keys_leave_no_trace_in_time(made):
    """The table is made anew, not larger, where as many keys go as come."""
    index = made()
    sizes = set()
    for step in range(5):
        position_N = torch.arange(20) + 20 * step
        index.positions.grow(20)
        index.strips.grow(20)
        slot_N, _ = index.find_or_insert(position_N, torch.zeros(20).short(), torch.arange)
        index.remove(slot_N)
        sizes.add(index.nbytes)
    assert len(index) == 0 and max(sizes) <= 8 * 80


def test_clear_forgets_all_keys(made):
    index = made()
    keys = torch.arange(20), torch.zeros(20).short()
    for _ in range(2):
        index.positions.grow(20)
        index.strips.grow(20)
        index.find_or_insert(*keys, torch.arange)
        index.clear()
        assert len(index) == 0 and index.find(*keys).tolist() == [-1] * 20


def test_no_keys_are_no_launch(made):
    none = torch.zeros(0, dtype=torch.int64)
    for index in (made(), SortedIndex(range(STRETCHES), 8, CPU)):
        slot_N, first_U = index.find_or_insert(none, none.short(), torch.arange)
        assert len(slot_N) == len(first_U) == len(index.find(none, none.short())) == 0
        assert len(index.slots_of(0)) == 0


@pytest.mark.full
def test_kernels_compile_for_a_gpu_that_is_not_here():
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "kernels.compile_key_index"],
        env={
            **os.environ,
            "TRITON_INTERPRET": "0",
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "count_new",
        "find",
        "find_or_claim swap least",
        "follow",
        "insert_new swap",
        "rebuild swap",
        "remove",
    ]
