"""One behaviour suite for every kernel backend: bags are summed one entry after the other whatever
the width, rows are updated once.
"""

from itertools import product

import numpy as np
import pytest
import torch
from kernels.gradient_squares import square_sums
from tiers import cover, one_of

from recapp.errors import ConfigError
from recapp.kernels.backend import backend
from recapp.kernels.links import (
    Bags,
    Links,
    Routes,
    Scratch,
    gather,
    group,
    ranges,
    starts,
)
from recapp.kernels.reference import TorchBackend
from recapp.kernels.widths import SQUARE_BLOCK
from recapp.optim.rules import adagrad, adam, momentum_sgd, rowwise_adagrad, sgd
from recapp.sharding.sharding_types import COLUMN_WIDTH

CPU = torch.device("cpu")
R = 50
N = 200
M = 40
WIDEST = 200
RULES = [sgd(0.3), adagrad(0.3), rowwise_adagrad(0.3), adam(0.1, 0.8, 0.95)]
STRIPS = {"torch": range(1, WIDEST + 1), "numba": (3, 64), "triton": (3, 64)}
MORE_STRIPS = {"numba": (1, 5, 16, 128)}
"""In the full tier, as each is compiled."""


@pytest.fixture(params=["torch", "numba", "triton"])
def kernels(request):
    return (
        request.getfixturevalue("interpreted")
        if request.param == "triton"
        else backend(request.param, CPU)
    )


@pytest.fixture(params=["torch", "numba"])
def cpu_kernels(request):
    """Return each backend of the CPU, for what concerns threads and caches of a CPU."""
    return backend(request.param, CPU)


def bags(dtype, weighted, index_dtype):
    generator = torch.Generator().manual_seed(1)
    rows_RD = torch.randn(R, WIDEST, generator=generator, dtype=dtype)
    index_N = torch.randint(0, R, (N,), generator=generator).to(index_dtype)
    inner = torch.randint(0, N + 1, (M - 1,), generator=generator).sort().values
    offsets_M1 = torch.cat([torch.tensor([0]), inner, torch.tensor([N])]).int()
    weights_N = torch.rand(N, generator=generator, dtype=dtype) if weighted else None
    return rows_RD, Links(index_N, offsets_M1, weights_N, None, M)


def pooled(kernels, rows_RD, links, scale=1.0):
    dtype = torch.float64 if rows_RD.dtype == torch.float64 else torch.float32
    out = torch.full((links.bags * rows_RD.shape[1],), torch.nan, dtype=dtype)
    kernels.pool(
        rows_RD.contiguous().view(-1), rows_RD.shape[1], rows_RD.shape[1], links, out, dtype, scale
    )
    return out.view(links.bags, rows_RD.shape[1])


def one_after_the_other(rows_RD, links):
    """Return the defined sums of unweighted bags: zero, then each row in its order."""
    edge = links.offsets_M1.tolist()
    out = torch.zeros(links.bags, rows_RD.shape[1], dtype=rows_RD.dtype)
    for m in range(links.bags):
        for k in range(edge[m], edge[m + 1]):
            out[m] += rows_RD[links.index_N[k]]
    return out


KINDS = [
    (torch.float32, True, torch.int64),
    (torch.float64, False, torch.int32),
]
every_kind = pytest.mark.parametrize(
    ("dtype", "weighted", "index_dtype"),
    [
        kind if kind in KINDS else pytest.param(*kind, marks=pytest.mark.full)
        for kind in product(
            [torch.float32, torch.float64], [False, True], [torch.int32, torch.int64]
        )
    ],
)


@every_kind
def test_a_strip_of_any_width_is_summed_to_the_bits_of_the_whole_row(
    kernels, dtype, weighted, index_dtype
):
    rows_RD, links = bags(dtype, weighted, index_dtype)
    whole = pooled(kernels, rows_RD, links)
    more = () if (dtype, weighted, index_dtype) in KINDS else MORE_STRIPS.get(kernels.name, ())
    for width in (*STRIPS[kernels.name], *more):
        for first in {0, (WIDEST - width) // 2, WIDEST - width}:
            cols = slice(first, first + width)
            assert torch.equal(pooled(kernels, rows_RD[:, cols], links), whole[:, cols]), (
                width,
                first,
            )


@every_kind
def test_a_bag_has_the_same_bits_among_others_and_alone(kernels, dtype, weighted, index_dtype):
    rows_RD, links = bags(dtype, weighted, index_dtype)
    rows_RD = rows_RD[:, :64]
    edge = links.offsets_M1.tolist()
    whole = pooled(kernels, rows_RD, links)
    for m in range(0, M, 8 if kernels.name == "triton" else 1):
        part = slice(edge[m], edge[m + 1])
        ends = torch.tensor([0, edge[m + 1] - edge[m]], dtype=torch.int32)
        alone = Links(
            links.index_N[part], ends, None if not weighted else links.weights_N[part], None, 1
        )
        assert torch.equal(pooled(kernels, rows_RD, alone)[0], whole[m])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_are_added_one_after_the_other(kernels, dtype):
    rows_RD, links = bags(dtype, False, torch.int64)
    rows_RD = rows_RD[:, :64]
    assert torch.equal(pooled(kernels, rows_RD, links), one_after_the_other(rows_RD, links))


def test_a_matrix_of_one_entry_per_bag_selects(kernels):
    rows_RD, links = bags(torch.float64, True, torch.int64)
    rows_RD = rows_RD[:, :64]
    index_N = links.index_N
    weights_N = links.weights_N
    assert torch.equal(
        pooled(kernels, rows_RD, Links(index_N, None, None, None, N)), rows_RD[index_N]
    )
    assert torch.equal(
        pooled(kernels, rows_RD, Links(index_N, None, weights_N, None, N)),
        rows_RD[index_N] * weights_N[:, None],
    )
    assert torch.equal(
        pooled(kernels, rows_RD, Links(index_N, None, None, None, N), 0.25), rows_RD[index_N] * 0.25
    )


def test_vectors_are_read_from_offsets_and_written_to_offsets(kernels):
    """A buffer holds vectors of several widths, so offsets are multiples of no width."""
    source = torch.randn(60)
    target = torch.full((50,), torch.nan)
    index = torch.tensor([1, 57, 8, 8], dtype=torch.int32)
    at = torch.tensor([47, 0, 5], dtype=torch.int32)
    kernels.pool(
        source,
        1,
        3,
        Links(index, torch.tensor([0, 2, 2, 4], dtype=torch.int32), None, at, 3),
        target,
        torch.float32,
    )
    expected = torch.full((50,), torch.nan)
    expected[47:50] = source[1:4] + source[57:60]
    expected[0:3] = torch.zeros(3)
    expected[5:8] = source[8:11] + source[8:11]
    torch.testing.assert_close(target, expected, rtol=0, atol=0, equal_nan=True)


def test_a_target_larger_than_the_caches_gets_the_same_vectors(cpu_kernels):
    rows = 1 << 15
    width = 64
    source = torch.randn(100 * width)
    index = torch.randint(0, 100, (rows,)).int()
    target = torch.full((rows * 2 * width,), torch.nan)
    at = (2 * width * torch.arange(rows)).int()
    cpu_kernels.pool(
        source,
        width,
        width,
        Links(index, None, None, at, rows),
        target,
        torch.float32,
        0.5,
        in_lines=True,
    )
    found = target.view(rows, 2, width)
    assert torch.equal(found[:, 0], source.view(100, width)[index] * 0.5) and bool(
        found[:, 1].isnan().all()
    )


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_halves_are_read_as_fp32_and_written_rounded(kernels, half):
    rows_RD = torch.randn(R, 5).to(half)
    rows_RD[0, :3] = torch.tensor([torch.inf, 0.0, 6e-5])
    links = Links(torch.arange(R), None, None, None, R)
    assert torch.equal(pooled(kernels, rows_RD, links), rows_RD.float())
    many = torch.cat(
        [
            torch.randn(4000) * 10.0 ** torch.randint(-9, 5, (4000,)),
            torch.tensor([0.0, -0.0, 65519.9, 1e30, torch.nan]),
        ]
    )
    target = torch.zeros(len(many), dtype=half)
    kernels.pool(
        many,
        1,
        1,
        Links(torch.arange(len(many)), None, None, None, len(many)),
        target,
        torch.float32,
    )
    torch.testing.assert_close(target, many.to(half), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_sums_to_zeros(kernels, rows):
    none = torch.zeros(0, dtype=torch.int32)
    ends = torch.zeros(5, dtype=torch.int32)
    assert torch.equal(
        pooled(kernels, torch.ones(rows, 3), Links(none, ends, None, None, 4)), torch.zeros(4, 3)
    )
    assert pooled(kernels, torch.ones(rows, 3), Links(none, None, None, None, 0)).shape == (0, 3)


@pytest.mark.parametrize(
    "rule",
    one_of(2, [rowwise_adagrad(), adam(weight_decay=0.1)]),
    ids=["rowwise_adagrad", "decaying_adam"],
)
def test_several_threads_give_the_bits_of_one(cpu_kernels, rule):
    rows_RD = torch.randn(3000, 16)
    row_U = torch.randperm(5000)[:4000].int()
    index = torch.randint(0, 3000, (9000,)).int()
    offsets = torch.cat(
        [torch.tensor([0]), torch.randint(0, 9001, (3999,)).sort().values, torch.tensor([9000])]
    ).int()
    gradient_links = Links(16 * index, offsets, None, None, 4000)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            weights_RD = torch.ones(5000, 16)
            state = [torch.zeros(5000, 16 if kind == "element" else 1) for _, kind in rule.state]
            cpu_kernels.update(
                rows_RD.view(-1),
                gradient_links,
                row_U,
                None,
                weights_RD,
                state,
                torch.float32,
                rule.rate_of(0.1, 1),
                rule,
            )
            found.append(
                (
                    pooled(cpu_kernels, rows_RD, gradient_links._replace(index_N=index)),
                    weights_RD,
                    *state,
                )
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- squares and updates


def one_gradient_each(rows):
    """Return links of rows to their gradients, by width: one for each, side by side."""
    return lambda width: Links(
        width * torch.arange(rows), torch.arange(rows + 1).int(), None, None, rows
    )


@pytest.mark.parametrize(
    "width", [3, 128, 200, *(pytest.param(width, marks=pytest.mark.full) for width in (1, 16, 64))]
)
def test_squares_of_strips_add_up_to_the_bits_of_the_whole_row(kernels, width):
    grad_UD = torch.randn(37, width, generator=torch.Generator().manual_seed(3))
    by_strip = torch.zeros(37, dtype=torch.float64)

    def squares(grad):
        return square_sums(
            kernels,
            grad.contiguous().view(-1),
            grad.shape[1],
            one_gradient_each(len(grad))(grad.shape[1]),
            torch.float32,
        )

    for strip in torch.split(grad_UD, SQUARE_BLOCK, 1):
        by_strip += squares(strip)
    assert torch.equal(squares(grad_UD), by_strip)
    for some in ([0], [5, 36], list(range(20))):
        assert torch.equal(squares(grad_UD[some]), by_strip[some])
    torch.testing.assert_close(by_strip, grad_UD.double().square().sum(1))


def test_a_block_of_squares_is_a_strip_of_the_default_width():
    assert SQUARE_BLOCK == COLUMN_WIDTH


def test_squares_of_single_precision_gradients_are_summed_in_double(kernels):
    grad = torch.tensor([1.0, 1e-5, 1e-5])
    assert square_sums(kernels, grad, 3, one_gradient_each(1)(3), torch.float32)[
        0
    ] == 1 + 2 * float(torch.tensor(1e-5).double() ** 2)


@pytest.mark.parametrize(
    ("rule", "stored"),
    one_of(5, product(RULES, [torch.float32, torch.float64, torch.float16, torch.bfloat16])),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_an_update_sums_gradients_touches_the_given_rows_and_rounds_once(kernels, rule, stored):
    dtype = torch.float64 if stored == torch.float64 else torch.float32
    D = 3
    generator = torch.Generator().manual_seed(4)
    weights_RD = torch.randn(6, D, generator=generator).to(stored)
    state = [
        torch.rand(6, D if kind == "element" else 1, generator=generator).to(dtype)
        for _, kind in rule.state
    ]
    before = weights_RD.clone()
    state_before = [s.clone() for s in state]
    gradients = torch.randn(40, generator=generator).to(dtype)
    use = torch.rand(3, generator=generator).to(dtype)
    gradient_links = Links(
        torch.tensor([30, 2, 7]), torch.tensor([0, 2, 3], dtype=torch.int32), use, None, 2
    )
    row_U = torch.tensor([4, 1], dtype=torch.int32)
    kernels.update(
        gradients, gradient_links, row_U, None, weights_RD, state, dtype, rule.rate_of(0.5, 1), rule
    )
    others = [0, 2, 3, 5]
    assert torch.equal(weights_RD[others], before[others])
    grad_UD = torch.stack(
        [gradients[30:33] * use[0] + gradients[2:5] * use[1], gradients[7:10] * use[2]]
    )
    mean = grad_UD.square().mean(1, keepdim=True)
    w, *new = rule.step(
        before[[4, 1]].to(dtype),
        grad_UD,
        mean,
        rule.rate_of(0.5, 1),
        torch.sqrt,
        *rule.constants,
        *(s[[4, 1]] for s in state_before),
    )
    torch.testing.assert_close(weights_RD[[4, 1]], w.to(stored))
    for s, s0, value in zip(state, state_before, new, strict=True):
        assert torch.equal(s[others], s0[others])
        torch.testing.assert_close(s[[4, 1]], value)


def test_a_strip_learns_with_the_mean_of_the_whole_row(kernels):
    rule = rowwise_adagrad()
    weights_RD = torch.zeros(2, 3)
    state = [torch.zeros(2, 1)]
    kernels.update(
        torch.ones(3),
        one_gradient_each(1)(3),
        torch.tensor([1]),
        torch.tensor([4.0]),
        weights_RD,
        state,
        torch.float32,
        1.0,
        rule,
    )
    assert state[0].tolist() == [[0.0], [4.0]] and weights_RD.tolist() == [[0.0] * 3, [-0.5] * 3]


def test_an_update_of_no_rows_changes_nothing(kernels):
    rule = rowwise_adagrad()
    weights_RD = torch.randn(3, 3)
    state = [torch.rand(3, 1)]
    before = weights_RD.clone(), state[0].clone()
    none = torch.zeros(0, dtype=torch.int64)
    kernels.update(
        torch.zeros(0),
        Links(none, torch.zeros(1, dtype=torch.int32), None, None, 0),
        none,
        None,
        weights_RD,
        state,
        torch.float32,
        rule.rate_of(0.1, 1),
        rule,
    )
    assert torch.equal(weights_RD, before[0]) and torch.equal(state[0], before[1])


# ---- integers: one batch of two tables, the first cut into three pieces, asked of two ranks


WIDTH = 2
B = 5


def routes(mode="unique", row_dtype=torch.int32):
    def numbers(*values):
        return torch.tensor(values, dtype=torch.int64)

    return Routes(
        mode,
        WIDTH,
        [0, 2, 1],
        np.array([0, 4, 2]),
        numbers(0, 0, 1),
        numbers(100, 7),
        numbers(0, 3, 4),
        numbers(0, 10, 60, 0),
        numbers(0, 1, 0, 1),
        numbers(0, 0, 10, 40),
        row_dtype,
    )


def batch(weighted=False, row_dtype=torch.int64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths_FB = torch.randint(0, 4, (3, B), generator=generator)
    per_F = lengths_FB.sum(1).tolist()
    rows_L = torch.cat(
        [
            torch.randint(0, n, (k,), generator=generator)
            for n, k in zip((100, 7, 100), per_F, strict=True)
        ]
    ).to(row_dtype)
    edge = np.array([0, *np.cumsum(per_F)])
    f = [0, 2, 1]
    where_M = (torch.tensor([0, 4, 2])[:, None] + 6 * torch.arange(B)).int().view(-1)
    scale_M = torch.rand(3 * B, generator=generator, dtype=torch.float64) if weighted else None
    weights_L = (
        torch.rand(len(rows_L), generator=generator, dtype=torch.float64) if weighted else None
    )
    bag_S = B * np.array(f)
    bags_S1 = B * np.arange(len(f) + 1)
    return Bags(
        rows_L,
        lengths_FB.view(-1),
        bag_S,
        bags_S1,
        edge[f],
        edge[1:][f],
        where_M,
        scale_M,
        weights_L,
    )


def wanted(bags):
    """Return the defined weight of each (offset in the output, rank, row of the rank's store)."""
    found = {}
    for slot, (feature, first) in enumerate(zip([0, 2, 1], bags.first_S.tolist(), strict=True)):
        at = first
        for b, n in enumerate(bags.lengths_N.view(3, B)[feature].tolist()):
            for _ in range(n):
                row = int(bags.rows_L[at])
                piece = 3 if slot == 2 else 0 if row < 10 else 1 if row < 60 else 2
                rank, local = [(0, row), (1, row - 10), (0, row - 60 + 10), (1, row + 40)][piece]
                scale = (
                    1.0
                    if bags.scale_M is None
                    else float(bags.scale_M[slot * B + b] * bags.weights_L[at])
                )
                key = int(bags.where_M[slot * B + b]), rank, local
                found[key] = found.get(key, 0) + scale
                at += 1
    return found


def spans(counts_W, stride=1, first=3):
    """Return the first offsets of two ranks' blocks that follow each other, and the end."""
    return np.array([first, first + counts_W[0] * stride], np.int64), first + int(
        counts_W.sum()
    ) * stride


@pytest.mark.parametrize(("weighted", "row_dtype"), [(False, torch.int32), (True, torch.int64)])
def test_distinct_rows_are_asked_once_of_their_owner_and_make_every_bag(
    kernels, weighted, row_dtype
):
    r = routes(row_dtype=row_dtype)
    b = batch(weighted, row_dtype)
    take = Scratch()
    found, n_IW = kernels.route_rows(r, b, 2, take)
    n_W = n_IW.sum(0)
    assert n_IW.shape == (len(r.rows_I), 2) and (n_IW.sum(1) > 0).any()
    (first_W, end), (vector_W, _) = spans(n_W), spans(n_W, WIDTH)
    ids = torch.full((end,), -1, dtype=row_dtype)
    at_U = kernels.write_row_requests(r, found, ids, first_W, vector_W, torch.int32, take)
    asked = [ids[first_W[0] : first_W[1]].tolist(), ids[first_W[1] :].tolist()]
    assert all(len(rows) == len(set(rows)) and -1 not in rows for rows in asked)
    combine, spread = kernels.link_rows(r, b, found, at_U, torch.float64, take)
    row_of = {
        int(first + WIDTH * k): (rank, row)
        for rank, first in enumerate(vector_W)
        for k, row in enumerate(asked[rank])
    }
    made = {}
    back = {}
    for m in range(combine.bags):
        for k in range(int(combine.offsets_M1[m]), int(combine.offsets_M1[m + 1])):
            key = int(b.where_M[m]), *row_of[int(combine.index_N[k])]
            made[key] = made.get(key, 0) + (
                1.0 if combine.weights_N is None else float(combine.weights_N[k])
            )
    for u in range(spread.bags):
        for k in range(int(spread.offsets_M1[u]), int(spread.offsets_M1[u + 1])):
            key = int(spread.index_N[k]), *row_of[int(at_U[u])]
            back[key] = back.get(key, 0) + (
                1.0 if spread.weights_N is None else float(spread.weights_N[k])
            )
    assert (
        made == pytest.approx(wanted(b))
        and back == pytest.approx(made)
        and len(row_of) == len(found.row_U)
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_asked_of_each_owner_and_what_is_served_makes_them(kernels, weighted):
    r = routes("pooled")
    b = batch(weighted)
    take = Scratch()
    found, counts_W2 = kernels.route_bags(r, b, 2, take)
    words_L = b.weights_L.view(torch.int32).view(-1, 2) if weighted else None
    rows_W, vectors_W = counts_W2.T
    words_W = rows_W * (3 if weighted else 1) + vectors_W
    (first_W, end), (vector_W, _) = spans(words_W), spans(vectors_W, WIDTH)
    ids = torch.full((end,), -1, dtype=torch.int32)
    combine, spread = kernels.write_bag_requests(
        r, b, found, ids, first_W, vector_W, words_L, torch.int32, take
    )
    assert (
        (ids[3:] != -1).any()
        and combine.bags == 3 * B
        and torch.equal(spread.at_M, combine.index_N)
    )
    made = {}
    for rank in range(2):
        counts_W3 = np.array([[rows_W[rank], vectors_W[rank], words_W[rank]]])
        served = kernels.serve(
            ids,
            first_W[[rank]],
            counts_W3,
            vector_W[[rank]],
            WIDTH,
            True,
            2 if weighted else 0,
            torch.float64,
            torch.int32,
            Scratch(),
        )
        vector_at = {int(at): v for v, at in enumerate(served.at_M)}
        for m in range(combine.bags):
            for k in range(int(combine.offsets_M1[m]), int(combine.offsets_M1[m + 1])):
                v = vector_at.get(int(combine.index_N[k]))
                for n in (
                    []
                    if v is None
                    else range(int(served.offsets_M1[v]), int(served.offsets_M1[v + 1]))
                ):
                    scale = (
                        1.0 if not weighted else float(combine.weights_N[k] * served.weights_N[n])
                    )
                    key = int(b.where_M[m]), rank, int(served.index_N[n])
                    made[key] = made.get(key, 0) + scale
                    assert int(spread.index_N[k]) == int(b.where_M[m])
    assert made == pytest.approx(wanted(b))


@pytest.mark.parametrize("pooled_bags", [False, True])
def test_an_owner_learns_each_row_once_from_its_gradients_in_the_order_of_asking(
    kernels, pooled_bags
):
    row_N = torch.tensor([7, 3, 7, 9, 3, 7], dtype=torch.int32)
    ends = torch.tensor([0, 2, 2, 6], dtype=torch.int32) if pooled_bags else None
    at = torch.tensor([40, 0, 20] if pooled_bags else [50, 40, 30, 20, 10, 0], dtype=torch.int32)
    use = torch.arange(6.0) if pooled_bags else None
    for _ in range(2):  # the hash table is clean again after a call
        row_U, gradient_links = kernels.group_rows(
            12, Links(row_N, ends, use, at, len(at)), Scratch()
        )
        offsets_of = {
            int(row): gradient_links.index_N[
                gradient_links.offsets_M1[u] : gradient_links.offsets_M1[u + 1]
            ].tolist()
            for u, row in enumerate(row_U)
        }
        assert offsets_of == (
            {7: [40, 20, 20], 3: [40, 20], 9: [20]}
            if pooled_bags
            else {7: [50, 30, 0], 3: [40, 10], 9: [20]}
        )
        if use is not None:
            uses = [
                gradient_links.weights_N[
                    gradient_links.offsets_M1[u] : gradient_links.offsets_M1[u + 1]
                ].tolist()
                for u in range(3)
            ]
            assert dict(zip(row_U.tolist(), uses, strict=True)) == {
                7: [0.0, 2.0, 5.0],
                3: [1.0, 4.0],
                9: [3.0],
            }


def test_rows_are_numbered_within_their_pieces(kernels):
    """Pieces begin at rows 0, 10 and 30 of the store."""
    row_U = torch.tensor([31, 4, 12, 30, 10, 9, 0], dtype=torch.int32)
    base_K = torch.tensor([0, 10, 30])
    piece_U, nth_U, n_K = kernels.find_pieces(row_U, base_K)
    assert (piece_U.tolist(), nth_U.tolist(), n_K.tolist()) == (
        [2, 0, 1, 2, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 2],
        [3, 2, 2],
    )


def test_rows_of_a_huge_table_are_distinguished_with_little_memory():
    """Some rows differ in high bits only, and many meet in one bucket of the hash table."""
    kernels = backend("numba", CPU)
    rows = [k << 40 for k in range(500)] + list(range(1, 501)) + [2**62 + k for k in range(500)]
    row_N = torch.tensor(rows + rows[::-1])
    row_U, gradient_links = kernels.group_rows(
        2**63 - 1, Links(row_N, None, None, torch.arange(3000).int(), 3000), Scratch()
    )
    assert row_U.tolist() == rows and [
        gradient_links.index_N[k : k + 2].tolist() for k in (0, 2)
    ] == [
        [0, 2999],
        [1, 2998],
    ]
    assert kernels._bucket_H.nbytes < 2**18 and bool((kernels._bucket_H == -1).all())


# ---- pieces of the reference


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equal_keys_come_together_in_their_order(dtype):
    found = group(torch.tensor([7, 3, 7, 9, 3, 7], dtype=dtype))
    assert found.key_U.tolist() == [3, 7, 9] and found.key_U.dtype == dtype
    assert found.number_N.tolist() == [1, 0, 1, 2, 0, 1]
    assert found.order_N.tolist() == [1, 4, 0, 2, 5, 3] and found.start_U1.tolist() == [0, 2, 5, 6]
    none = group(torch.zeros(0, dtype=dtype))
    assert len(none.key_U) == 0 and none.start_U1.tolist() == [0]


def test_runs_starts_and_gathers():
    assert starts(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]
    numbers = ranges(torch.tensor([10, 5, 0]), torch.tensor([2, 0, 3]), 5)
    assert numbers.tolist() == [10, 11, 0, 1, 2]
    flat = torch.arange(12.0)
    assert gather(flat, 3, 3, torch.tensor([3, 0]), torch.float64).tolist() == [
        [9, 10, 11],
        [0, 1, 2],
    ]
    assert gather(flat, 1, 3, torch.tensor([2]), torch.float32).tolist() == [[2, 3, 4]]


# ---- the choice


def test_auto_takes_the_compiled_kernels_where_they_are_and_a_wrong_choice_is_explained():
    assert backend("auto", CPU).name == "numba" and isinstance(backend("torch", CPU), TorchBackend)
    assert backend("auto", torch.device("meta")).name == "torch"
    with pytest.raises(ConfigError, match=r"engine\.backend=nunba: unknown; did you mean numba"):
        backend("nunba", CPU)
    with pytest.raises(
        ConfigError,
        match=r"engine\.backend=numba: the backend computes on the CPU, and the rows are on cuda",
    ):
        backend("numba", torch.device("cuda"))


def test_without_its_package_a_forced_backend_is_an_error_and_the_reference_runs(monkeypatch):
    monkeypatch.setattr("recapp.kernels.backend.find_spec", lambda name: None)
    assert backend("auto", CPU).name == "torch"
    with pytest.raises(ConfigError, match="numba is not installed"):
        backend("numba", CPU)
    assert backend("auto", torch.device("cuda")).name == "torch"
    with pytest.raises(ConfigError, match=r"engine\.backend=triton: triton is not installed"):
        backend("triton", torch.device("cuda"))


# ---- missed steps

ALL_ROWS = [sgd(0.3, l2_all_rows=0.1), adam(0.1, 0.8, 0.95, l2_all_rows=0.1)]
MORE_RULES = [*ALL_ROWS, momentum_sgd(0.1, l2_all_rows=0), adagrad(0.3, l2_all_rows=0.1)]


def with_missed_steps(rule, width, rows=24, dtype=torch.float32):
    """Return rows that have taken 5 to 11 steps, some neighbours equally many, the weights and
    state of these rows, and the rates of steps 6 to 11.
    """
    generator = torch.Generator().manual_seed(7)
    steps_R = torch.randint(5, 12, (rows,), generator=generator, dtype=torch.int32)
    steps_R[6:20] = 6
    held = [torch.rand(rows, width, generator=generator).to(dtype) for _ in range(3)]
    rates = [rule.rate_of(0.01 * t, t) for t in range(6, 12)]
    numbers = [r if isinstance(r, tuple) else (r,) for r in rates]
    rates_TK = torch.tensor(numbers, dtype=torch.float64)
    return steps_R, held[: 1 + len(rule.state)], rates_TK, rates


FORMS = [(1, torch.float64), (16, torch.float32), (200, torch.float32)]


@pytest.mark.parametrize(
    ("rule", "form", "some"),
    [
        (ALL_ROWS[1], (3, torch.float32), True),
        (ALL_ROWS[0], (3, torch.float64), False),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (ALL_ROWS[1], (3, torch.float32), False),
                (ALL_ROWS[0], (3, torch.float64), True),
                *cover(2, [MORE_RULES, FORMS, [True, False]]),
            )
        ),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_missed_steps_are_updates_with_gradients_of_zero_to_the_bit(kernels, rule, form, some):
    width, dtype = form
    steps_R, held, rates_TK, rates = with_missed_steps(rule, width, dtype=dtype)
    row_N = torch.tensor([3, 19, 3, 0, 23, 19], dtype=torch.int32) if some else None
    expected = [each.clone() for each in held]
    zeros = torch.zeros(width, dtype=dtype)
    caught_up = torch.zeros(len(steps_R), dtype=torch.bool)
    caught_up[row_N.long() if some else slice(None)] = True
    for t, rate in enumerate(rates, 5):
        row_U = (caught_up & (steps_R <= t)).nonzero().view(-1)
        n = len(row_U)
        links = Links(torch.zeros(n).int(), torch.arange(n + 1).int(), None, None, n)
        kernels.update(
            *(zeros, links, row_U, None, expected[0], expected[1:], dtype), *(rate, rule)
        )
    before = steps_R.clone()
    kernels.catch_up(row_N, steps_R, held[0], held[1:], dtype, rates_TK, 5, rule)
    for found, wanted in zip(held, expected, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(steps_R, torch.where(caught_up, 11, before))


@pytest.mark.full
@pytest.mark.parametrize("some", [True, False])
def test_several_threads_take_the_missed_steps_of_one(cpu_kernels, some):
    rule = ALL_ROWS[1]
    row_N = torch.randint(0, 5000, (6000,)).int() if some else None
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            steps_R, held, rates_TK, _ = with_missed_steps(rule, 16, rows=5000)
            cpu_kernels.catch_up(
                row_N, steps_R, held[0], held[1:], torch.float32, rates_TK, 5, rule
            )
            found.append((steps_R, *held))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
