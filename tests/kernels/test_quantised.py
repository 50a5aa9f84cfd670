"""Rows in 8 and 4 bits: what is kept, how it is packed, and that kernels pool packed rows as the
torch definition does.
"""

import pytest
import torch
from tiers import cover

from recapp.kernels.backend import backend
from recapp.kernels.links import Links
from recapp.kernels.quantised import dequantise, quantise
from recapp.kernels.reference import TorchBackend

BITS = pytest.mark.parametrize("bits", [8, 4])


def packed_bags(bits, width, weighted):
    generator = torch.Generator().manual_seed(bits)
    rows = quantise(torch.randn(11, width, generator=generator), bits)
    weights_N = torch.rand(12, generator=generator) if weighted else None
    at_M = torch.tensor([3 * width, 0, 2 * width], dtype=torch.int32)
    return rows, Links(
        torch.randint(0, 11, (12,), generator=generator),
        torch.tensor([0, 5, 5, 12]).int(),
        weights_N,
        at_M,
        3,
    )


@BITS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_packed_rows_are_pooled_as_their_values(kernels, bits, weighted):
    rows, links = packed_bags(bits, 5, weighted)
    target = torch.full((20,), torch.nan)
    edge = links.offsets_M1.tolist()
    kernels = backend(kernels, torch.device("cpu"))
    kernels.pool(rows, rows.width, rows.width, links, target, torch.float32, 0.5)
    values_ND = dequantise(rows, links.index_N)
    if weighted:
        values_ND = values_ND * links.weights_N[:, None]
    for m, at in enumerate(links.at_M.tolist()):
        torch.testing.assert_close(
            target[at : at + 5], 0.5 * values_ND[edge[m] : edge[m + 1]].sum(0)
        )
    assert bool(target[5:10].isnan().all())


@BITS
@pytest.mark.parametrize(("width", "block"), [(5, 128), (1, 128), (16, 3)])
def test_kernels_pool_packed_rows_to_the_bits_of_the_definition(
    interpreted, monkeypatch, bits, width, block
):
    """The bits are equal where a bag is one block; blocks of three entries change the order."""
    monkeypatch.setattr("recapp.kernels.triton_vectors.BLOCK", block)
    rows, links = packed_bags(bits, width, weighted=False)
    found = [torch.full((4 * width,), torch.nan) for _ in range(2)]
    interpreted.pool(rows, rows.width, rows.width, links, found[0], torch.float32, 0.5)
    TorchBackend().pool(rows, rows.width, rows.width, links, found[1], torch.float32, 0.5)
    exact = {"rtol": 0, "atol": 0} if block == 128 else {}
    torch.testing.assert_close(*found, equal_nan=True, **exact)


WIDTHS = [1, 5, 16, 33, 100, 128, 257]
COMPUTED = [torch.float32, torch.float64]
# each case compiles one kernel
PACKED = cover(3, [WIDTHS, [8, 4], COMPUTED, [False, True], [1, 2], ["bags", "rows"]])


@pytest.mark.full
@pytest.mark.parametrize(("width", "bits", "compute", "narrow", "threads", "pooled"), PACKED)
def test_compiled_kernels_pool_packed_rows_to_the_bits_of_the_definition(
    width, bits, compute, narrow, threads, pooled
):
    """One thread and two pool rows and bags of rows into targets of every type."""
    generator = torch.Generator().manual_seed(width)
    rows = quantise(torch.randn(300, width, generator=generator), bits)
    bags = 2500
    index_N = torch.randint(0, 300, (3 * bags,), generator=generator).int()
    inner = torch.randint(0, 3 * bags + 1, (bags - 1,), generator=generator).sort().values
    offsets = torch.cat([torch.tensor([0]), inner, torch.tensor([3 * bags])]).int()
    links = Links(index_N, None, None, None, 3 * bags)
    if pooled == "bags":
        links = Links(index_N, offsets, None, None, bags)
    written = torch.bfloat16 if narrow else compute
    found = [torch.empty(links.bags * width, dtype=written) for _ in range(2)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name, target in zip(("numba", "torch"), found, strict=True):
            kernels = backend(name, torch.device("cpu"))
            kernels.pool(rows, rows.width, rows.width, links, target, compute, 0.5)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@BITS
def test_packed_rows_are_written_past_the_caches_to_the_same_bits(bits):
    width = 64
    rows = quantise(torch.randn(100, width, generator=torch.Generator().manual_seed(bits)), bits)
    bags = 1 << 15
    index_N = torch.arange(bags).remainder(100).int()
    target = torch.empty(bags * width)
    links = Links(index_N, None, None, width * torch.arange(bags).int(), bags)
    kernels = backend("numba", torch.device("cpu"))
    kernels.pool(rows, rows.width, rows.width, links, target, torch.float32, in_lines=True)
    assert torch.equal(target.view(bags, width), dequantise(rows, index_N))
