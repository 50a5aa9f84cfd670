"""Steps of dense parts in one pass: those of torch's words, for any sizes, types and threads."""

import numpy as np
import pytest
import torch

from recapp.kernels import dense
from recapp.models.field_aware_pairs import FieldAwarePairs
from recapp.models.masked_crosses import MaskedCross

SIZES = [(0, 6), (1, 2), (63, 10), (64, 4), (700, 130)]  # the last one is work for two threads
TYPES = [torch.float32, torch.float64]
FORMS = [(torch.float32, True), (torch.float32, False), (torch.float64, True)]  # each compiled


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape)).to(dtype)


def test_the_last_size_is_work_for_two_threads():
    rows, columns = SIZES[-1]
    assert rows * columns >= dense.THREADS_FROM


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SIZES)
def test_entries_are_kept_by_their_bits(shape, dtype):
    entries = numbers(*shape, dtype=dtype)
    bits = torch.from_numpy(
        np.random.default_rng(1).integers(-(2**15), 2**15, shape, dtype=np.int16)
    )
    for least in (-(2**15), -7, 2**15 - 1):
        kept = torch.where(bits >= least, 1.25, 0.0).to(dtype)
        assert torch.equal(dense.dropped(entries, bits, least, 1.25), entries * kept)


def crossed(x, factor, half, mask, bias):
    return x + factor * (torch.cat([half, half * mask], -1) + bias)


@pytest.mark.parametrize(("dtype", "own"), FORMS)
@pytest.mark.parametrize("shape", SIZES)
def test_a_masked_cross_has_the_values_and_gradients_of_torch(shape, dtype, own):
    rows, columns = shape
    x, factor = (numbers(rows, 1, columns, dtype=dtype, seed=n) for n in (1, 2))
    half, mask = (numbers(rows, 1, columns // 2, dtype=dtype, seed=n) for n in (3, 4))
    bias = numbers(columns, dtype=dtype, seed=5)
    inputs = [t.requires_grad_() for t in (x, x if own else factor, half, mask, bias)]
    wanted = crossed(*inputs)
    found = dense.masked(*inputs)
    close = {"rtol": 1e-5, "atol": 1e-6 * max(1, rows) ** 0.5}
    torch.testing.assert_close(found, wanted.detach(), **close)
    grad = numbers(rows, 1, columns, dtype=dtype, seed=6)
    gradients = dense.masked_back(grad, *inputs[1:], own=own)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted, inputs[1:], grad), **close)


@pytest.mark.parametrize(("dtype", "own"), FORMS)
@pytest.mark.parametrize(("rows", "fields", "dim"), [(0, 3, 4), (1, 1, 2), (70, 4, 3), (90, 14, 4)])
def test_pairs_have_the_values_and_gradients_of_torch(rows, fields, dim, dtype, own):
    vectors = numbers(rows, fields, fields, dim, dtype=dtype).requires_grad_()
    i, j = torch.tril_indices(fields, fields, -1)
    wanted = (vectors * vectors.transpose(1, 2)).sum(3)[:, i, j]
    if own:
        wanted = torch.cat([vectors.diagonal(dim1=1, dim2=2).mT.flatten(1), wanted], 1)
    found = dense.paired(vectors, own)
    torch.testing.assert_close(found, wanted.detach())
    grad = numbers(*wanted.shape, dtype=dtype, seed=1)
    (of_vectors,) = torch.autograd.grad(wanted, vectors, grad)
    torch.testing.assert_close(dense.paired_back(vectors, grad, own), of_vectors)


def test_results_are_the_same_for_any_number_of_threads():
    x = numbers(700, 130)
    half, mask = numbers(700, 65, seed=3), numbers(700, 65, seed=4)
    vectors = numbers(90, 14, 14, 4)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        of_cross = dense.masked_back(x, x, half, mask, x[0], own=True)
        of_pairs = dense.paired_back(vectors, dense.paired(vectors, True), True)
        found.append([dense.masked(x, x, half, mask, x[0]), *of_cross, of_pairs])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("tensors", "wanted"),
    [
        ((torch.ones(3), torch.nn.Parameter(torch.ones(2))), True),
        ((torch.ones(3).double(), torch.ones(2).double()), True),
        ((torch.ones(3), torch.ones(2).double()), False),
        ((torch.ones(3).bfloat16(),), False),
        ((torch.ones(3, 2).t(),), False),
        ((torch.ones(3, device="meta"),), False),
        ((torch.ones(3, dtype=torch.int64),), False),
    ],
)
def test_only_plain_floats_in_order_are_taken(tensors, wanted):
    with torch.no_grad():
        assert dense.fits(*tensors) is wanted
    assert not dense.fits(*tensors)  # autograd would not see what a kernel does


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (FieldAwarePairs(4, own=True), [(6, 4, 4, 4)]),
        (MaskedCross(8), [(6, 1, 8)] * 2),
    ],
    ids=["pairs", "cross"],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_torch_compiles_what_uses_them(layer, shapes):
    """Into one graph, with its backward."""
    inputs = [numbers(*shape).requires_grad_() for shape in shapes]
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs)
    found.sum().backward()
    assert inputs[0].grad is not None
    torch.testing.assert_close(found, layer(*inputs))


def test_nothing_is_taken_while_torch_transforms_functions_or_without_numba(monkeypatch):
    seen = []

    def see(x):
        with torch.no_grad():
            seen.append(dense.fits(x))
        return x

    torch.func.vmap(see)(torch.ones(2, 3))
    torch.func.jvp(see, (torch.ones(2),), (torch.ones(2),))
    assert seen == [False, False]
    see(torch.ones(3))
    monkeypatch.setattr(dense, "_has_numba", lambda: False)
    see(torch.ones(3))
    assert seen[2:] == [True, False]
