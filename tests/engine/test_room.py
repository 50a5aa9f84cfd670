"""Columns left free before the vectors of a sample: another address for everything, the same
numbers.
"""

import pytest
import torch
from engine.engine_cases import batch_of, make_tables, same_bits, sharded, whole_tensors
from tiers import one_of

TABLES = make_tables(dims=(16, 16, 16))
WIDTH = 16 * 5


def trained(comm, kind, mode, room, backend):
    """What two steps give: outputs, the gradient of what stood before, and all rows."""
    collection = sharded(comm, TABLES, kind, "rowwise_adagrad", mode=mode, backend=backend)
    collection.leave_room(room)
    torch.manual_seed(3)
    weight_KK = torch.randn(16 + WIDTH)
    told = []
    for step in range(2):
        features = batch_of(TABLES, 6, 10 * step + comm.rank, weighted=step == 1)
        first = torch.full((6, 16), step + 1.0, requires_grad=True)
        joined = collection(features).prepend(first)
        (joined * weight_KK).square().sum().backward()
        told += [joined.detach().clone(), first.grad]
    return told + list(whole_tensors(comm, collection).values())


@pytest.mark.parametrize(
    ("world", "backend"), one_of(3, [(2, "torch"), (2, "numba"), (1, "numba"), (1, "torch")])
)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("table_wise", "unique"),
        ("row_wise", "pooled"),
        ("column_wise", "unique"),
        ("data_parallel", "unique"),
    ],
)
def test_the_numbers_do_not_depend_on_the_room(ranks, world, kind, mode, backend):
    for copied, in_place, misfit in zip(
        *(ranks.run(trained, world, kind, mode, room, backend) for room in (0, 16, 3)), strict=True
    ):
        assert all(same_bits(a, b) for a, b in zip(copied, in_place, strict=True))
        assert all(same_bits(a, b) for a, b in zip(copied, misfit, strict=True))
