"""Both indexes of dynamic tables do what a Python dict does, also where keys crowd."""

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


@pytest.mark.parametrize("positions", [spread, crowded])
@pytest.mark.parametrize("kind", [SortedIndex, HashIndex])
def test_keys_are_found_added_and_removed_as_in_a_dict(kind, positions):
    generator = torch.Generator().manual_seed(3)
    index = kind(range(STRETCHES), 1 << 16, CPU)
    known = {}
    free = list(range(1 << 15))
    for _ in range(12):
        position_M = positions(generator, 700)
        strip_M = torch.randint(0, 2, (700,), generator=generator).to(torch.int16)
        keys = list(zip(position_M.tolist(), strip_M.tolist(), strict=True))
        assert index.find(position_M, strip_M).tolist() == [known.get(key, -1) for key in keys]
        new = torch.tensor([key not in known for key in keys])
        fresh = torch.tensor([free.pop(0) for _ in range(int(new.sum()))])
        slot_M, first_U = index.insert(position_M[new], strip_M[new], fresh)
        added = [key for key, is_new in zip(keys, new.tolist(), strict=True) if is_new]
        for key, slot in zip(added, slot_M.tolist(), strict=True):
            assert known.setdefault(key, slot) == slot
        free += fresh[len(first_U) :].tolist()
        gone = sorted(known)[::3]
        slots = torch.tensor([known.pop(key) for key in gone])
        index.remove(slots)
        free += slots.tolist()
        assert len(index) == len(known)
    for strip in range(2):
        slots = [slot for (_, s), slot in sorted(known.items()) if s == strip]
        assert index.slots_of(strip).tolist() == slots


def test_ids_cannot_be_chosen_so_that_the_index_grows_for_a_few():
    generator = torch.Generator().manual_seed(5)
    sizes = []
    for positions in (spread, crowded):
        index = HashIndex([40], 1 << 20, CPU)
        position_M = positions(generator, 20_000).unique()
        index.insert(
            position_M, torch.zeros_like(position_M, dtype=torch.int16), torch.arange(20_000)
        )
        sizes.append(index.nbytes)
    assert sizes[1] < 2 * sizes[0]
