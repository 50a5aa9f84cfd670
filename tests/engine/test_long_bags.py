"""Bags of many ids: gradients are copied strip by strip, then gathered. The reference's result, and
the same bits for any threads.
"""

import pytest
import torch
from engine.engine_cases import RULES, batch_of, make_plan, make_tables, same_bits, whole_tensors

from recapp.engine.sharded_collection import shard_bags
from recapp.kernels import numba_vectors


def trained(comm, backend, rule, kind, threads=1):
    """Whole tensors after three steps; the compiled ones have read copies."""
    tables = make_tables(dims=(16, 8, 16), data_type="fp64")
    before = torch.get_num_threads()
    collection = shard_bags(
        tables, make_plan(kind, tables, comm.world, column_width=8), comm, RULES[rule], 1, backend
    )
    torch.set_num_threads(threads)
    try:
        for step in range(3):
            values = collection(
                batch_of(tables, 300, 10 * step + comm.rank, most=20, weighted=step == 1)
            ).values()
            (values.tanh().sum() / 300).backward()
    finally:
        torch.set_num_threads(before)
    return whole_tensors(comm, collection)


def asked_for():
    """How often kernels that read copies were asked for."""
    info = numba_vectors.run_staged.on_one_thread.cache_info()
    return info.hits + info.misses


def differing(comm, rule, kind):
    before = asked_for()
    compiled = trained(comm, "numba", rule, kind)
    assert asked_for() > before  # copies were made
    reference = trained(comm, "torch", rule, kind)
    for name in reference:
        torch.testing.assert_close(compiled[name], reference[name], rtol=1e-9, atol=1e-9)
    on_threads = trained(comm, "numba", rule, kind, threads=2)
    return [name for name in compiled if not same_bits(compiled[name], on_threads[name])]


@pytest.mark.parametrize(
    ("world", "rule", "kind"),
    [
        pytest.param(1, "rowwise_adagrad", "table_wise", marks=pytest.mark.full),
        pytest.param(2, "adam", "mixed", marks=pytest.mark.full),
        pytest.param(2, "rowwise_adagrad", "column_wise", marks=pytest.mark.full),
    ],
)
def test_copied_gradients_teach_the_same(ranks, world, rule, kind):
    assert ranks.run(differing, world, rule, kind) == [[]] * world
