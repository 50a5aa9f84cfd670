"""The GPU backend on a GPU: the essentials of the suite for every backend, bits included, and that
nothing waits for the device.
"""

from copy import deepcopy

import pytest
import torch
from kernels.gradient_squares import square_sums
from kernels.test_key_index import crowded, few, random_steps, spread

from recapp.kernels.backend import backend
from recapp.kernels.links import Links
from recapp.kernels.quantised import QuantisedRows, quantise
from recapp.kernels.reference import TorchBackend
from recapp.kernels.row_memory import RowMemory
from recapp.kernels.sums import BLOCK, GPU_ORDER
from recapp.kernels.widths import SQUARE_BLOCK
from recapp.models.layers import MLP, DotInteraction
from recapp.optim.rules import adagrad, adam, rowwise_adagrad, sgd

pytest.importorskip("triton", reason="triton is not installed")

from recapp.kernels.triton_launch import LAUNCHES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

GPU = torch.device("cuda")
R = 500
WIDEST = 200
RULES = [sgd(0.3), adagrad(0.3), rowwise_adagrad(0.3), adam(0.1, 0.8, 0.95)]


@pytest.fixture
def reference():
    """Return the reference in the order of a GPU."""
    backend = TorchBackend()
    backend.blocks = GPU_ORDER
    return backend


@pytest.fixture
def kernels():
    return backend("triton", GPU)


def there(links):
    return Links(*(x.to(GPU) if isinstance(x, torch.Tensor) else x for x in links))


def bags(dtype=torch.float32, weighted=True, stride=1):
    """Return links of empty bags, short ones, of blocks, and of blocks of blocks."""
    lengths = torch.randint(0, 9, (300,), generator=torch.Generator().manual_seed(1))
    lengths[[0, 7, 8, 299]] = torch.tensor([0, 1000, BLOCK**2 + 7, 2 * BLOCK])
    offsets = torch.tensor([0, *lengths.cumsum(0)]).int()
    generator = torch.Generator().manual_seed(2)
    index_N = stride * torch.randint(0, R, (int(offsets[-1]),), generator=generator)
    return Links(
        index_N,
        offsets,
        torch.rand(len(index_N), generator=generator, dtype=dtype) if weighted else None,
        None,
        300,
    )


def pooled(kernels, rows_RD, links, scale=1.0, device=GPU):
    out_MD = torch.full(
        (links.bags, rows_RD.shape[1]),
        torch.nan,
        dtype=torch.promote_types(rows_RD.dtype, torch.float32),
        device=device,
    )
    kernels.pool(
        rows_RD.to(device).contiguous().view(-1),
        rows_RD.shape[1],
        rows_RD.shape[1],
        there(links) if device == GPU else links,
        out_MD.view(-1),
        out_MD.dtype,
        scale,
    )
    return out_MD.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_have_the_bits_of_the_definition_whatever_the_width(
    kernels, reference, dtype, weighted
):
    rows_RD = torch.randn(R, WIDEST, dtype=dtype)
    links = bags(dtype, weighted)
    expected = pooled(reference, rows_RD, links, device=torch.device("cpu"))
    for width in (1, 3, 16, 64, 128, WIDEST):
        for first in {0, (WIDEST - width) // 2, WIDEST - width}:
            cols = slice(first, first + width)
            assert torch.equal(pooled(kernels, rows_RD[:, cols], links), expected[:, cols]), (
                width,
                first,
            )


def test_vectors_are_read_from_places_and_written_to_places(kernels):
    source = torch.randn(60)
    target = torch.full((50,), torch.nan, device=GPU)
    index = torch.tensor([1, 57, 8, 8]).int()
    at = torch.tensor([47, 0, 5]).int()
    kernels.pool(
        source.to(GPU),
        1,
        3,
        there(Links(index, torch.tensor([0, 2, 2, 4]).int(), None, at, 3)),
        target,
        torch.float32,
    )
    expected = torch.full((50,), torch.nan)
    expected[47:50] = source[1:4] + source[57:60]
    expected[0:3] = torch.zeros(3)
    expected[5:8] = source[8:11] + source[8:11]
    torch.testing.assert_close(target.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_halves_are_read_as_fp32_and_written_rounded(kernels, half):
    rows_RD = torch.randn(R, 5).to(half)
    each = Links(torch.arange(R), None, None, None, R)
    assert torch.equal(pooled(kernels, rows_RD, each), rows_RD.float())
    many = torch.cat(
        [
            torch.randn(4000) * 10.0 ** torch.randint(-9, 5, (4000,)),
            torch.tensor([0.0, -0.0, 65519.9, 1e30, torch.nan]),
        ]
    )
    target = torch.zeros(len(many), dtype=half, device=GPU)
    each = Links(torch.arange(len(many)), None, None, None, len(many))
    kernels.pool(many.to(GPU), 1, 1, there(each), target, torch.float32)
    torch.testing.assert_close(target.cpu(), many.to(half), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [1, 16, 64, 128, WIDEST])
def test_squares_of_strips_add_up_to_the_bits_of_the_whole_row(kernels, width):
    grad_RD = torch.randn(R, width)
    gradient_links = bags()

    def squares(grad):
        links = gradient_links._replace(index_N=grad.shape[1] * gradient_links.index_N)
        return square_sums(
            kernels, grad.to(GPU).contiguous().view(-1), grad.shape[1], there(links), torch.float32
        ).cpu()

    assert torch.equal(
        squares(grad_RD), sum(squares(strip) for strip in torch.split(grad_RD, SQUARE_BLOCK, 1))
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 16, WIDEST])
def test_an_update_is_the_reference_s(kernels, rule, stored, width):
    dtype = torch.promote_types(stored, torch.float32)
    generator = torch.Generator().manual_seed(4)
    gradients = torch.randn(R * width, generator=generator, dtype=dtype)
    gradient_links = bags(dtype, stride=width)
    weights_RD = torch.randn(R, width, generator=generator).to(stored)
    row_U = torch.randperm(R, generator=generator)[: gradient_links.bags].int()
    state = [
        torch.rand(R, width if kind == "element" else 1, generator=generator, dtype=dtype)
        for _, kind in rule.state
    ]
    held = [x.to(GPU) for x in (weights_RD, *state)]
    for mean_U in [None, torch.rand(gradient_links.bags, dtype=dtype)][: 1 + rule.needs_row]:
        TorchBackend().update(
            gradients,
            gradient_links,
            row_U,
            mean_U,
            weights_RD,
            state,
            dtype,
            rule.rate_of(0.1, 1),
            rule,
        )
        mean = None if mean_U is None else mean_U.to(GPU)
        kernels.update(
            gradients.to(GPU),
            there(gradient_links),
            row_U.to(GPU),
            mean,
            held[0],
            held[1:],
            dtype,
            rule.rate_of(0.1, 1),
            rule,
        )
        close = (
            {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
        )
        torch.testing.assert_close([x.cpu() for x in held[1:]], state, **close)
        torch.testing.assert_close(held[0].cpu(), weights_RD, **(close if stored == dtype else {}))


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_rows_are_pooled_as_in_the_definition(kernels, bits):
    rows = quantise(torch.randn(R, 33), bits)
    links = bags()
    found = torch.zeros(300 * 33)
    TorchBackend().pool(rows, 33, 33, links, found, torch.float32)
    packed = QuantisedRows(rows.packed_RK.to(GPU), rows.width, rows.bits)
    target = torch.zeros(300 * 33, device=GPU)
    kernels.pool(packed, 33, 33, there(links), target, torch.float32)
    torch.testing.assert_close(target.cpu(), found, rtol=1e-4, atol=1e-4)


def test_results_are_the_same_bits_every_time(kernels):
    rows_RD = torch.randn(R, 64)
    links = bags()
    first = pooled(kernels, rows_RD, links)
    assert all(torch.equal(pooled(kernels, rows_RD, links), first) for _ in range(20))


def test_nothing_behind_the_count_is_read_or_written(kernels):
    links = bags()
    rows_RD = torch.randn(R, 64)
    roomy = Links(
        torch.cat([links.index_N, torch.full((5000,), 2**60)]),
        torch.cat([links.offsets_M1, torch.full((400,), 2**30, dtype=torch.int32)]),
        torch.cat([links.weights_N, torch.full((5000,), torch.nan)]),
        None,
        links.bags + 400,
        used=torch.tensor([links.bags], dtype=torch.int32),
    )
    found = pooled(kernels, rows_RD, roomy)
    assert torch.equal(found[: links.bags], pooled(kernels, rows_RD, links))
    assert bool(found[links.bags :].isnan().all())


def test_a_recorded_update_reads_new_rates_and_obeys_the_flag(kernels):
    """The bits are those of updates that are launched one by one."""
    links = there(bags())
    gradients = torch.randn(R * 64, device=GPU)
    links = links._replace(index_N=64 * links.index_N)
    row_U = torch.randperm(R, device=GPU)[: links.bags]
    rule = RULES[2]
    kernels.in_lines = True

    def update(weights_RD, state, lr):
        kernels.update(gradients, links, row_U, None, weights_RD, [state], torch.float32, lr, rule)

    held = [[torch.ones(R, 64, device=GPU), torch.zeros(R, 1, device=GPU)] for _ in range(2)]
    stopped = torch.zeros(1, dtype=torch.int32, device=GPU)
    (lr,) = kernels.on_device([0.3], [rule], GPU)
    for _ in range(3):
        update(*held[0], 0.3)
        update(*held[1], lr)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(*held[1], lr._replace(stopped=stopped))
    for rate in (0.3, 0.2, 0.1):
        update(*held[0], rate)
        lr.numbers[0] = rate
        graph.replay()
    stopped.fill_(1)
    graph.replay()
    assert all(map(torch.equal, *held))


def test_nothing_waits_for_the_device(kernels):
    links = there(bags())
    rows_RD = torch.randn(R, 64, device=GPU)
    target = torch.zeros(300 * 64, device=GPU)
    row_U = torch.arange(300, device=GPU)
    rule = RULES[2]
    weights_RD = torch.randn(R, 64, device=GPU)
    state = torch.zeros(R, 1, device=GPU)
    gradient_links = links._replace(index_N=64 * links.index_N)
    before = torch.cuda.get_sync_debug_mode()
    for mode in ("default", "error"):  # the first round compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            kernels.pool(rows_RD.view(-1), 64, 64, links, target, torch.float32, 0.5)
            squares_U = square_sums(kernels, rows_RD.view(-1), 64, gradient_links, torch.float32)
            for mean_U in (None, squares_U.float()):
                kernels.update(
                    rows_RD.view(-1),
                    gradient_links,
                    row_U,
                    mean_U,
                    weights_RD,
                    [state],
                    torch.float32,
                    rule.rate_of(0.1, 1),
                    rule,
                )
            assert all(LAUNCHES[name] for name in ("pool", "sum_blocks", "update"))
        finally:
            torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "width"), [(27, 128), (27, 16), (5, 3), (100, 200)])
def test_dots_of_pairs_and_their_gradients_are_those_of_fp64(dtype, count, width):
    """Tensor cores read 11 bits of an fp32 number, 8 of a bf16 one."""
    layer = DotInteraction(count, keeps_first=True).to(GPU)
    vectors_BFD = torch.randn(50, count, width, device=GPU).to(dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    results = []
    try:
        for values_BFD in (vectors_BFD, vectors_BFD.double()):  # fp64 is left to torch
            values_BFD.requires_grad_()
            out_BK = layer(values_BFD)[:, : width + layer.pairs]
            (grad_BFD,) = torch.autograd.grad(out_BK.sum(), values_BFD)
            results.append((out_BK.detach().double(), grad_BFD.double()))
    finally:
        torch.set_float32_matmul_precision(before)
    for computed, expected in zip(*results, strict=True):
        assert float((computed - expected).abs().max() / expected.abs().max()) < 1e-2


def test_a_tower_that_tensor_cores_compute_learns_as_in_fp64():
    tower = MLP(13, [512, 19, 1], last_relu=False)
    x_BK = torch.randn(300, 13)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    results = []
    try:
        for copy, device in ((deepcopy(tower).to(GPU), GPU), (deepcopy(tower).double(), "cpu")):
            kind = next(copy.parameters()).dtype
            y_BO = copy(x_BK.to(device, kind))
            y_BO.square().sum().backward()
            results.append([y_BO.detach(), *(p.grad for p in copy.parameters())])
    finally:
        torch.set_float32_matmul_precision(before)
    for computed, expected in zip(*results, strict=True):
        assert float((computed.cpu() - expected).abs().max() / expected.abs().max()) < 2e-2


@pytest.mark.parametrize("positions", [spread, crowded, few])
def test_keys_are_found_added_and_removed_as_in_a_dict(kernels, positions):
    """Thousands of threads insert at once, many of them the same keys (`few`)."""
    for seed in range(3):
        random_steps(
            kernels.key_index(range(64), 1 << 16, GPU), positions, 12, 3000, strips=26, seed=seed
        )


def test_rows_of_a_gpu_grow_where_they_are():
    held = RowMemory(1 << 30, 4, torch.float32, GPU)
    held.grow(3)
    held.rows[:3] = 7.0
    rows = held.rows
    for count in (1 << 16, 1 << 20, 5 << 20):
        held.grow(count)
        assert held.rows is rows and len(rows) == 1 << 30 and rows.is_cuda
        assert bool((rows[:3] == 7).all()) and not bool(rows[3:count].any())
        found = rows[torch.tensor([0, count - 1], device=GPU)]
        assert found[:, 0].tolist() == [7.0, 0.0]
