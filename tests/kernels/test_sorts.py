"""Sorts of the integer kernels in torch: one for the distinct rows of a group, of 32-bit keys where
they fit, and one that numbers the rows of each owner.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_backends import batch, routes
from torch.utils._python_dispatch import TorchDispatchMode

from recapp.kernels.links import Scratch
from recapp.kernels.reference import TorchBackend

SORTS = {"sort", "_unique2", "unique_consecutive", "unique_dim", "argsort", "topk"}
WORLD = 2


class Sorts(TorchDispatchMode):
    """`types`: the type of the numbers of each sort."""

    def __init__(self):
        super().__init__()
        self.types = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in SORTS:
            self.types.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def sorts_of(route, r):
    with Sorts() as sorts:
        found, _ = route(r, batch(seed=1), WORLD, Scratch())
    return sorts.types, found


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [(100, torch.int32), (2**31 - 8, torch.int32), (2**31 - 7, torch.int64), (2**40, torch.int64)],
)
def test_the_distinct_rows_of_a_group_are_sorted_in_the_smallest_type(rows, wanted):
    """The second table has 7 rows; no memory is taken for the rows of the first."""
    r = replace(routes(), rows_I=torch.tensor([rows, 7]))
    types, _ = sorts_of(TorchBackend().route_rows, r)
    assert types == [wanted, torch.int64]


def test_rows_beyond_32_bits_are_found_as_those_below_are():
    far = 2**40
    small = routes()
    large = replace(
        small, rows_I=torch.tensor([far + 100, 7]), start_K=torch.tensor([0, far + 10, far + 60, 0])
    )
    b = batch()
    far_L = b.rows_L.clone()
    for slot in (0, 1):  # of the first table; what lies beyond its first piece moves
        here = slice(int(b.first_S[slot]), int(b.last_S[slot]))
        far_L[here] += far * (far_L[here] >= 10)
    moved = replace(b, rows_L=far_L)
    (a, n_a), (c, n_c) = (
        TorchBackend().route_rows(r, x, WORLD, Scratch()) for r, x in ((small, b), (large, moved))
    )
    assert large.key_dtype == torch.int64 and np.array_equal(n_a, n_c)
    for name in ("row_U", "rank_U", "nth_U"):
        assert torch.equal(getattr(a, name), getattr(c, name))
    assert torch.equal(a.grouped.order_N, c.grouped.order_N)


def test_bags_take_a_sort_of_pairs_and_those_that_number_vectors_and_pairs_of_owners():
    types, _ = sorts_of(TorchBackend().route_bags, routes("pooled"))
    assert types == [torch.int32, torch.int64, torch.int64]


def test_equal_keys_of_dynamic_tables_are_found_by_all_64_bits_and_strips_by_32():
    r = replace(routes(), dynamic=True)
    types, _ = sorts_of(TorchBackend().route_rows, r)
    assert types == [torch.int64, torch.int32, torch.int64]
