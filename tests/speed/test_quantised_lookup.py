"""What lookups in few bits are compared with computes the same, in its own order of bags."""

from dataclasses import replace

import pytest
import torch
from tiers import one_of

from recapp.benchmarks.workloads import Workload
from recapp.kernels.backend import backend

from .quantised_lookup import jagged_ids_of, lookups_of, stored_rows
from .row_reads import read_rows

TINY = Workload("W1", 16, (50, 7, 300), (8, 8, 8), (1, 3, 2))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_all_who_are_compared_sum_the_same_rows(bits, kernels):
    workload = replace(TINY, batch_size=5)
    weights_RD, packed = stored_rows(sum(workload.rows_F), 8)
    b = jagged_ids_of(workload, workload.draw(0))
    kernels = backend(kernels, torch.device("cpu"))
    found = lookups_of(kernels, weights_RD, packed[bits], b, workload.width)
    by_table = {name: found[name](7) for name in ("torch", "torch_quantised")}
    vectors = {
        name: vectors.view(3, 5, 8).transpose(0, 1).flatten() for name, vectors in by_table.items()
    }
    vectors |= {name: found[name](7) for name in ("recapp", "fp32")}
    torch.testing.assert_close(vectors["fp32"], vectors["torch"])
    torch.testing.assert_close(vectors["recapp"], vectors["torch_quantised"])
    close = {"atol": 3 * 0.06 / 2**bits, "rtol": 0}
    torch.testing.assert_close(vectors["recapp"], vectors["fp32"], **close)
    assert not torch.equal(vectors["recapp"], vectors["fp32"])


@pytest.mark.parametrize("size", one_of(3, [12, 68, 100]))
def test_every_line_of_a_packed_row_is_read_on_any_number_of_threads(size):
    packed_RK = torch.ones(50, size, dtype=torch.uint8)
    index_N = torch.arange(5000, dtype=torch.int32) % 50
    touched = 5000 * len(range(0, size - 1, 64)) + 5000
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert read_rows(packed_RK, index_N) == touched
    finally:
        torch.set_num_threads(before)
