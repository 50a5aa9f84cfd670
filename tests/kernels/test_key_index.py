"""All indexes of dynamic tables do what a Python dict does, also where keys crowd."""

import pytest
import torch

from recapp.kernels.numba_key_index import HashIndex
from recapp.kernels.reference import SortedIndex
from recapp.tables.positions import STRETCHES, first_position

CPU = torch.device("cpu")


def crowded(generator, n):
    """Positions of one stretch whose lowest 16 bits are equal."""
    return first_position(40) + (torch.randint(0, 2**40, (n,), generator=generator) << 16)


def spread(generator, n):
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)


def few(generator, n):
    """Positions that occur several times each, with the least and the largest ones."""
    pool = torch.tensor([-(2**63), 2**63 - 1, *range(-40, 40)])
    return pool[torch.randint(0, len(pool), (n,), generator=generator)]


class Slots:
    """Free slots, which the test takes from the front."""

    def __init__(self, index):
        self.index = index
        self.free = list(range(1 << 16))

    def __call__(self, n):
        for memory in (self.index.positions, self.index.strips):
            memory.grow(max(self.free[:n], default=-1) + 1)
        return torch.tensor(self.free[:n], device=self.index.positions.rows.device).long()


def random_steps(index, positions, steps, n, strips=2, seed=3):
    """Do what a store does, and compare the index with a dict."""
    generator = torch.Generator().manual_seed(seed)
    known = {}
    slots = Slots(index)
    device = index.positions.rows.device
    for _ in range(steps):
        position_N = positions(generator, n)
        strip_N = torch.randint(0, strips, (n,), generator=generator).to(torch.int16)
        keys = list(zip(position_N.tolist(), strip_N.tolist(), strict=True))
        position_N, strip_N = position_N.to(device), strip_N.to(device)
        assert index.find(position_N, strip_N).tolist() == [known.get(key, -1) for key in keys]
        first = {key: n for n, key in reversed([*enumerate(keys)])}
        new = sorted(n for key, n in first.items() if key not in known)
        known |= {keys[n]: slot for n, slot in zip(new, slots.free, strict=False)}
        slot_N, first_U = index.find_or_insert(position_N, strip_N, slots)
        assert slot_N.tolist() == [known[key] for key in keys] and first_U.tolist() == new
        gone = sorted(known)[::3]
        index.remove(torch.tensor([known[key] for key in gone], device=device).long())
        slots.free = [known.pop(key) for key in gone] + slots.free[len(new) :]
        assert len(index) == len(known)
        assert index.find(position_N, strip_N).tolist() == [known.get(key, -1) for key in keys]
    for strip in range(strips):
        in_order = [slot for (_, s), slot in sorted(known.items()) if s == strip]
        assert index.slots_of(strip).tolist() == in_order
    wanted_IR = torch.rand(strips, STRETCHES, generator=generator) < 0.5
    wanted = [
        slot
        for (position, strip), slot in known.items()
        if wanted_IR[strip, (position >> 58) + STRETCHES // 2]
    ]
    assert sorted(index.slots_of_stretches(wanted_IR.to(device)).tolist()) == sorted(wanted)


@pytest.mark.parametrize("positions", [spread, crowded, few])
@pytest.mark.parametrize("kind", [SortedIndex, HashIndex])
def test_keys_are_found_added_and_removed_as_in_a_dict(kind, positions):
    random_steps(kind(range(STRETCHES), 1 << 16, CPU), positions, 12, 700)


def test_ids_cannot_be_chosen_so_that_the_index_grows_for_a_few():
    generator = torch.Generator().manual_seed(5)
    sizes = []
    for positions in (spread, crowded):
        index = HashIndex([40], 1 << 20, CPU)
        position_M = positions(generator, 20_000).unique()
        strip_M = torch.zeros_like(position_M, dtype=torch.int16)
        for memory in (index.positions, index.strips):
            memory.grow(20_000)
        index.find_or_insert(position_M, strip_M, torch.arange)
        sizes.append(index.nbytes)
    assert sizes[1] < 2 * sizes[0]
