"""A rank with several threads: the bits of one, and work dealt by what it costs."""

import numpy as np
import pytest
import torch
from engine.engine_cases import batch_of, make_tables, same_bits, sharded, whole_tensors

from recapp.kernels import numba_cpu, numba_vectors
from recapp.tables.config import EmbeddingBagConfig
from recapp.transport.communicator import Comm

pytest.importorskip("numba")
ROWS = 3000  # samples: ids enough for several threads
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


@pytest.mark.parametrize(
    ("kind", "weighted", "most"),
    [("table_wise", False, 3), pytest.param("column_wise", True, 9, marks=pytest.mark.full)],
)
def test_several_threads_train_the_bits_of_one(threads, monkeypatch, kind, weighted, most):
    dealt = []
    assign_threads = numba_vectors.assign_threads
    monkeypatch.setattr(
        numba_cpu.vectors,
        "assign_threads",
        lambda cost_I, n: dealt.append((assign_threads(cost_I, n), n)) or dealt[-1][0],
    )
    threads(1)
    alone = trained(kind, weighted, most)
    assert {n for _, n in dealt} == {1}
    dealt.clear()
    threads(2)
    assert all(same_bits(a, b) for a, b in zip(alone, trained(kind, weighted, most), strict=True))
    steps = [thread_I for thread_I, n in dealt if n == 2 and len(thread_I) > 1]
    assert steps and all(set(thread_I) == {0, 1} for thread_I in steps)


@pytest.mark.full
def test_many_tables_whose_ids_repeat(threads):
    """What a strip's hash table needs follows its own ids, wherever the distinct rows of the strips
    before it end.
    """
    tables = [
        EmbeddingBagConfig(
            name=f"t{k}",
            num_embeddings=60000 if k % 2 else 5,
            embedding_dim=4,
            feature_names=[f"f{k}"],
        )
        for k in range(26)
    ]
    bags = batch_of(tables, 4096, 0, one_hot=True)
    results = []
    for backend, n in (("torch", 1), ("numba", 1), ("numba", 2)):
        threads(n)
        collection = sharded(Comm(), tables, "table_wise", "rowwise_adagrad", backend=backend)
        for _ in range(2):
            values = collection(bags).values()
            values.square().sum().backward()
        results.append([values.detach(), *whole_tensors(Comm(), collection).values()])
    for others in results[1:]:
        assert all(
            torch.allclose(a, b, rtol=1e-3, atol=1e-6)
            for a, b in zip(results[0], others, strict=True)
        )


def test_strips_are_dealt_by_their_ids():
    assert numba_vectors.assign_threads(np.array([10, 20, 30]), 1).tolist() == [0, 0, 0]
    assert numba_vectors.assign_threads(np.array([3, 1, 2, 100, 27, 10]), 2).tolist() == [
        1,
        1,
        1,
        0,
        1,
        1,
    ]
    assert numba_vectors.assign_threads(np.array([5]), 2).tolist() == [0]


def test_bags_are_cut_by_their_entries():
    lengths = np.array([1] * 60 + [30] * 2, np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    assert numba_vectors.split_bags(offsets, 62, 2).tolist() == [0, 46, 62]  # 46 + 46 of 120 + 62
    assert numba_vectors.split_bags(np.zeros(0, np.int32), 62, 2).tolist() == [0, 31, 62]
    assert numba_vectors.split_bags(np.zeros(63, np.int32), 62, 2).tolist() == [0, 31, 62]
