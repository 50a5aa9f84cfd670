"""A rank with several threads: the bits of one."""

import numpy as np
import pytest
import torch
from engine_cases import batch_of, make_tables, same_bits, sharded, whole_tensors

from recapp.distributed.comm import Comm
from recapp.kernels import numba_cpu

pytest.importorskip("numba")
ROWS = 3000             # samples: ids enough for several threads
TABLES = make_tables(rows=(5000, 40, 7), dims=(16, 16, 16))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def trained(kind, weighted, most):
    """Outputs and rows of two steps, and by how many threads the strips were worked on."""
    collection = sharded(Comm(), TABLES, kind, "rowwise_adagrad", backend="numba")
    told = []
    for step in range(2):
        values = collection(batch_of(TABLES, ROWS, step, most=most, weighted=weighted)).values()
        values.square().sum().backward()
        told.append(values.detach())
    return told + list(whole_tensors(Comm(), collection).values())


@pytest.mark.parametrize(("weighted", "most"), [(False, 3), (True, 9)])
@pytest.mark.parametrize("kind", ["table_wise", "column_wise"])
def test_several_threads_train_the_bits_of_one(threads, monkeypatch, kind, weighted, most):
    dealt, deal = [], numba_cpu._dealt
    monkeypatch.setattr(numba_cpu, "_dealt", lambda pair_I1: dealt.append(deal(pair_I1)) or dealt[-1])
    threads(1)
    alone = trained(kind, weighted, most)
    assert {len(edge_T1) - 1 for edge_T1 in dealt} == {1}
    dealt.clear()
    threads(2)
    assert all(same_bits(a, b) for a, b in zip(alone, trained(kind, weighted, most), strict=True))
    steps = [edge_T1 for edge_T1 in dealt if edge_T1[-1] > 1]           # kernels are compiled on one strip of one id
    assert steps and all(len(edge_T1) == 3 and 0 < edge_T1[1] < edge_T1[2] for edge_T1 in steps)


def test_strips_are_dealt_by_their_ids_and_a_few_ids_to_one_thread(threads):
    threads(2)
    few, half = np.array([0, 10, 20, 30]), numba_cpu.SPREAD_FROM_PAIRS
    assert numba_cpu._dealt(few).tolist() == [0, 3]
    assert numba_cpu._dealt(np.array([0, half, half + 5, 2 * half])).tolist() == [0, 1, 3]
    assert numba_cpu._dealt(np.array([0, 2 * half])).tolist() in ([0, 0, 1], [0, 1, 1])         # one strip cannot be dealt
