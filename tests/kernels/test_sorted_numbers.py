"""Numbers are found among sorted ones by both kernels alike, wherever they lie."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recapp.kernels import numba_key_index, reference

INT64 = st.integers(-(2**63), 2**63 - 1)
NEAR = st.integers(-40, 40)


@given(
    st.lists(st.lists(INT64, unique=True) | st.lists(NEAR, unique=True), min_size=1, max_size=4),
    st.lists(NEAR | INT64),
    st.randoms(use_true_random=False),
)
def test_both_find_what_is_there_and_nothing_else(strips, others, rng):
    held = [sorted(strip) for strip in strips]
    number_R = torch.tensor([x for strip in held for x in strip], dtype=torch.int64)
    edges = [0]
    for strip in held:
        edges.append(edges[-1] + len(strip))
    wanted = [x for strip in held for x in strip] + others
    rng.shuffle(wanted)
    strip = [rng.randrange(len(held)) for _ in wanted]
    expected = [
        edges[s] + held[s].index(x) if x in held[s] else -1
        for x, s in zip(wanted, strip, strict=True)
    ]
    arguments = (
        number_R,
        edges,
        torch.tensor(wanted, dtype=torch.int64),
        torch.tensor(strip, dtype=torch.int16),
    )
    assert reference.find_sorted(*arguments).tolist() == expected
    assert numba_key_index.find_sorted(*arguments).tolist() == expected


@pytest.mark.parametrize("find", [reference.find_sorted, numba_key_index.find_sorted])
def test_one_strip_needs_no_numbers_of_strips(find):
    number_R = torch.arange(0, 10_000, 3)
    wanted = torch.arange(-5, 10_010)
    found = find(number_R, [0, len(number_R)], wanted, None)
    there = (wanted % 3 == 0) & (wanted >= 0) & (wanted < 10_000)
    assert torch.equal(found, torch.where(there, wanted // 3, -1))
