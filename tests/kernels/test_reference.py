"""The arithmetic that defines the result: bags are summed one entry after the other whatever the width, rows are updated once."""

from itertools import product

import pytest
import torch

from recapp.kernels.reference import SQUARE_BLOCK, Links, group, pool, runs, square_sums, starts, update
from recapp.optim.rules import adam, rowwise_adagrad
from recapp.sharding.tilings import COLUMN_WIDTH

R, N, M, WIDEST = 50, 200, 40, 300


def bags(dtype, weighted, index_dtype, empty=True):
    generator = torch.Generator().manual_seed(1)
    rows_RD = torch.randn(R, WIDEST, generator=generator, dtype=dtype)
    index_N = torch.randint(0, R, (N,), generator=generator).to(index_dtype)
    inner = torch.randint(0, N + 1, (M - 1,), generator=generator).sort().values if empty else torch.arange(1, M) * (N // M)
    offsets_M1 = torch.cat([torch.tensor([0]), inner, torch.tensor([N])]).int()
    weights_N = torch.rand(N, generator=generator, dtype=dtype) if weighted else None
    return rows_RD, Links(index_N, offsets_M1, weights_N)


def one_after_the_other(rows_RD, links):
    """The definition for unweighted bags: zero, then each row in its order."""
    edge = links.offsets_M1.tolist()
    out = torch.zeros(len(edge) - 1, rows_RD.shape[1], dtype=rows_RD.dtype)
    for m in range(len(edge) - 1):
        for k in range(edge[m], edge[m + 1]):
            out[m] += rows_RD[links.index_N[k]]
    return out


every_kind = pytest.mark.parametrize(("dtype", "weighted", "index_dtype"), list(product(
    [torch.float32, torch.float64], [False, True], [torch.int32, torch.int64])))


@every_kind
def test_a_strip_of_any_width_is_summed_to_the_bits_of_the_whole_row(dtype, weighted, index_dtype):
    rows_RD, links = bags(dtype, weighted, index_dtype)
    whole = pool(rows_RD, links)
    for width in range(1, WIDEST + 1):
        for first in {0, (WIDEST - width) // 2, WIDEST - width}:
            cols = slice(first, first + width)
            assert torch.equal(pool(rows_RD[:, cols].contiguous(), links), whole[:, cols]), (width, first)


@every_kind
def test_a_bag_has_the_same_bits_among_others_and_alone(dtype, weighted, index_dtype):
    rows_RD, links = bags(dtype, weighted, index_dtype)
    edge, whole = links.offsets_M1.tolist(), pool(rows_RD, links)
    for m in range(M):
        part = slice(edge[m], edge[m + 1])
        alone = Links(links.index_N[part], torch.tensor([0, edge[m + 1] - edge[m]]), None if not weighted else links.weights_N[part])
        assert torch.equal(pool(rows_RD, alone)[0], whole[m])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_are_added_one_after_the_other(dtype):
    rows_RD, links = bags(dtype, False, torch.int64)
    assert torch.equal(pool(rows_RD, links), one_after_the_other(rows_RD, links))


def test_a_matrix_of_one_entry_per_row_selects():
    rows_RD, links = bags(torch.float64, True, torch.int64)
    assert torch.equal(pool(rows_RD, Links(links.index_N)), rows_RD[links.index_N])
    assert torch.equal(pool(rows_RD, Links(links.index_N, None, links.weights_N)), rows_RD[links.index_N] * links.weights_N[:, None])


@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_sums_to_zeros(rows):
    none = torch.zeros(0, dtype=torch.int32)
    assert torch.equal(pool(torch.ones(rows, 3), Links(none, torch.zeros(5, dtype=torch.int32))), torch.zeros(4, 3))
    assert pool(torch.ones(rows, 3), Links(none)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equal_keys_come_together_in_their_order(dtype):
    key_N = torch.tensor([7, 3, 7, 9, 3, 7], dtype=dtype)
    found = group(key_N)
    assert found.key_U.tolist() == [3, 7, 9] and found.key_U.dtype == dtype
    assert found.number_N.tolist() == [1, 0, 1, 2, 0, 1]
    assert found.order_N.tolist() == [1, 4, 0, 2, 5, 3] and found.start_U1.tolist() == [0, 2, 5, 6]
    none = group(key_N[:0])
    assert len(none.key_U) == 0 and none.start_U1.tolist() == [0]


def test_the_transpose_collects_from_the_rows_that_held_a_key():
    generator = torch.Generator().manual_seed(2)
    key_N, bag_N = torch.randint(0, 6, (30,), generator=generator), torch.arange(30) // 3
    weights_N = torch.rand(30, generator=generator, dtype=torch.float64)
    grouped = group(key_N)
    dense = torch.zeros(10, 6, dtype=torch.float64).index_put_((bag_N, key_N), weights_N, accumulate=True)
    grad = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(pool(grad, grouped.transpose(bag_N, weights_N)), (dense.T @ grad)[grouped.key_U])


def test_runs_and_starts():
    assert starts(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]
    assert runs(torch.tensor([10, 5, 0]), torch.tensor([2, 0, 3])).tolist() == [10, 11, 0, 1, 2]


@pytest.mark.parametrize("width", [1, 3, 16, 63, 64, 65, 128, 200, 256])
def test_squares_of_strips_add_up_to_the_bits_of_the_whole_row(width):
    grad_UD = torch.randn(37, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    by_strip = torch.zeros(37, dtype=torch.float64)
    for strip in torch.split(grad_UD, SQUARE_BLOCK, 1):
        by_strip += square_sums(strip.contiguous())
    assert torch.equal(square_sums(grad_UD), by_strip)
    for some in ([0], [5, 36], list(range(20))):
        assert torch.equal(square_sums(grad_UD[some]), by_strip[some])
    torch.testing.assert_close(by_strip, grad_UD.square().sum(1))


def test_a_block_of_squares_is_a_strip_of_the_default_width():
    assert SQUARE_BLOCK == COLUMN_WIDTH


def test_squares_of_single_precision_gradients_are_summed_in_double():
    grad_UD = torch.tensor([[1.0, 1e-5, 1e-5]])
    assert square_sums(grad_UD)[0] == 1 + 2 * float(torch.tensor(1e-5).double() ** 2)
    assert torch.equal(grad_UD, torch.tensor([[1.0, 1e-5, 1e-5]]))                      # and left alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_update_touches_the_given_rows_and_rounds_once(dtype):
    rule = rowwise_adagrad(0.5)
    weights_RD, state = torch.randn(6, 3).to(dtype), [torch.rand(6, 1)]
    before, before_state = weights_RD.clone(), state[0].clone()
    row_U, grad_UD = torch.tensor([1, 4]), torch.randn(2, 3)
    mean = grad_UD.square().mean(1, keepdim=True)
    update(weights_RD, state, row_U, grad_UD, mean, 0.5, rule.step, rule.constants)
    others = [0, 2, 3, 5]
    assert torch.equal(weights_RD[others], before[others]) and torch.equal(state[0][others], before_state[others])
    s = before_state[row_U] + mean
    assert torch.equal(state[0][row_U], s)
    assert torch.equal(weights_RD[row_U], (before[row_U].float() - 0.5 * grad_UD / (s.sqrt() + 1e-8)).to(dtype))


def test_an_update_of_no_rows_changes_nothing():
    rule = adam()
    weights_RD, state = torch.randn(3, 2), [torch.zeros(3, 2), torch.zeros(3, 2)]
    before = weights_RD.clone()
    update(weights_RD, state, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2), None, 0.1, rule.step, rule.constants)
    assert torch.equal(weights_RD, before)
