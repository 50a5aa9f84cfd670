"""Start values: a function of seed, table, row and column, whoever writes them and in whatever
pieces.
"""

import zlib
from dataclasses import replace

import pytest
import torch
from engine.engine_cases import make_plan, make_tables, whole_tensors

from recapp.engine.sharded_collection import shard_bags
from recapp.errors import ConfigError
from recapp.kernels.backend import backend
from recapp.tables import initial
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.initial import fill_initial
from recapp.tables.positions import mixed_order


def table(rows=1000, dim=24, name="t", **changes):
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=["f"], **changes
    )


def values(t, seed=1, rows=None, cols=None, dtype=None):
    rows = rows or range(t.num_embeddings)
    cols = cols or range(t.embedding_dim)
    out = torch.full((len(rows), len(cols)), float("nan"), dtype=dtype or t.data_type.dtype)
    fill_initial(out, t, seed, rows, cols)
    return out


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("rows", "cols"),
    [(range(1), range(24)), (range(17, 900), range(5, 6)), (range(999, 1000), range(20, 24))],
)
def test_a_rectangle_has_the_bits_of_the_whole_table(dtype, rows, cols):
    t = table(data_type=dtype)
    assert torch.equal(
        values(t, rows=rows, cols=cols), values(t)[rows.start : rows.stop, cols.start : cols.stop]
    )


def test_chunks_do_not_show(monkeypatch):
    whole = values(table())
    monkeypatch.setattr(initial, "CHUNK_ELEMENTS", 100)
    assert torch.equal(values(table()), whole)
    monkeypatch.setattr(initial, "CHUNK_ELEMENTS", 3)  # narrower than a row
    assert torch.equal(values(table()), whole)


@pytest.mark.parametrize(
    "options", [{}, {"data_type": "bf16"}, {"weight_init_min": 0.0, "weight_init_max": 1.0}]
)
def test_the_compiled_kernel_writes_the_same_bits(monkeypatch, options):
    monkeypatch.setattr(initial, "CHUNK_ELEMENTS", 100)  # from which size on it is used
    t = table(**options)
    compiled = backend("numba", torch.device("cpu")).write_start_values
    filled = torch.empty(300, 20, dtype=t.data_type.dtype)
    order = mixed_order("t", 1000)
    fill_initial(filled, t, 1, range(400, 700), range(4, 24), order, 2, compiled)
    expected = torch.empty_like(filled)
    fill_initial(expected, t, 1, range(400, 700), range(4, 24), order, 2)
    assert torch.equal(filled, expected)


def test_any_strides_will_do():
    out = torch.empty(24, 1000).T
    fill_initial(out, table(), 1, range(1000), range(24))
    assert torch.equal(out, values(table()))


def by_hand(name, seed, row, col):
    """Return the definition's value, in Python integers: an odd number below 2^24 in size."""

    def mix(x):
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    key = zlib.crc32(f"{seed}/{name}".encode())
    line = mix(row % 2**32 ^ mix((row // 2**32 + key) % 2**32))
    return (mix((line + col * 0x9E3779B9) % 2**32) >> 8) * 2 + 1 - 2**24


@pytest.mark.parametrize("first", [0, 2**32 - 2, 2**33 + 5])
def test_values_are_the_documented_hash(first):
    """Every backend's start and untouched rows of checkpoints depend on them: they never change."""
    out = values(
        table(2**40, 5, init_range=1.0, data_type="fp64"), seed=7, rows=range(first, first + 4)
    )
    assert (out * 2**24).tolist() == [
        [by_hand("t", 7, first + r, c) for c in range(5)] for r in range(4)
    ]
    assert by_hand("t", 1, 0, 0) == 906795


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_values_are_uniform_symmetric_and_inside_the_range(dtype):
    t = table(20_000, 16, data_type=dtype)
    x = values(t).double()
    bound = 20_000**-0.5
    assert x.abs().max() <= bound and x.abs().max() > 0.9999 * bound
    counts = torch.histc(x.float() / bound, 64, -1, 1)
    expected = x.numel() / 64
    # chi square of 63 degrees: beyond 110 once in 5,000
    assert ((counts - expected) ** 2 / expected).sum() < 110
    assert x.mean().abs() < 4 * bound / (3 * x.numel()) ** 0.5
    assert x.unique().numel() > 0.98 * x.numel()


def test_neighbours_are_independent():
    x = values(table(20_000, 16, init_range=1.0)).double()
    tolerance = 5 * (1 / 3) / x.numel() ** 0.5
    for a, b in (
        (x[1:], x[:-1]),
        (x[:, 1:], x[:, :-1]),
        (x[1:, 1:], x[:-1, :-1]),
        (x[256:], x[:-256]),
    ):
        assert (a * b).mean().abs() < tolerance


def test_tables_seeds_rows_and_columns_have_values_of_their_own():
    start = values(table())
    for other in (
        values(table(name="u")),
        values(table(), seed=2),
        values(table(name="t1")),
        values(table(), seed=-1),
    ):
        assert (other == start).float().mean() < 1e-3
    assert len({tuple(row) for row in start.tolist()}) == 1000
    assert len({tuple(col) for col in start.T.tolist()}) == 24


def test_rows_beyond_32_bits_have_values_of_their_own():
    t = table(2**40, 4, init_range=1.0)
    far = [values(t, rows=range(k * 2**32, k * 2**32 + 50)) for k in range(4)]
    assert all((far[i] == far[j]).float().mean() < 0.01 for i in range(4) for j in range(i))


def test_the_range_is_one_over_the_root_of_the_rows_unless_set():
    assert values(table(100)).abs().max() == pytest.approx(0.1, rel=0.01)
    assert values(table(100, init_range=3.0)).abs().max() == pytest.approx(3.0, rel=0.01)
    assert values(table(100, init_range=0.0)).abs().max() == 0


def test_the_unsharded_collection_starts_with_them_and_the_meta_device_waits():
    t = table()
    assert torch.equal(EmbeddingBagCollection([t], seed=5).weight("t"), values(t, seed=5))
    assert EmbeddingBagCollection([t], device=torch.device("meta")).weight("t").is_meta


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16"])
def test_start_values_fill_the_range_that_is_given(dtype):
    shifted = values(table(data_type=dtype, weight_init_min=0.25, weight_init_max=0.75))
    assert 0.25 <= shifted.min() < 0.251 and 0.749 < shifted.max() <= 0.75
    assert abs(shifted.double().mean() - 0.5) < 0.005
    around_0 = values(table(data_type=dtype, init_range=0.25)).double()
    torch.testing.assert_close(shifted.double() - 0.5, around_0, rtol=0, atol=1e-3)
    one = values(table(data_type=dtype, weight_init_min=0.5, weight_init_max=0.5))
    assert torch.equal(one, torch.full_like(one, 0.5))


def test_a_symmetric_range_has_the_bits_of_init_range():
    symmetric = table(weight_init_min=-0.3, weight_init_max=0.3)
    assert torch.equal(values(symmetric), values(table(init_range=0.3)))


def normal(tensor):
    torch.nn.init.normal_(tensor, std=0.1)
    tensor[0] = 7


def test_a_function_writes_the_same_values_whatever_torch_has_drawn():
    drawn = table(init_fn=normal, data_type="fp16")
    torch.manual_seed(1)
    first = values(drawn)
    state = torch.get_rng_state()
    torch.rand(3)
    part = values(drawn, rows=range(17, 900), cols=range(5, 6))
    assert torch.equal(part, first[17:900, 5:6]) and torch.equal(first[0], first[0] * 0 + 7)
    assert abs(first[1:].double().std() - 0.1) < 0.01
    torch.set_rng_state(state)
    values(drawn)
    assert torch.equal(torch.get_rng_state(), state), "the user's own numbers go on"
    assert not torch.equal(values(drawn, seed=2), first)
    assert not torch.equal(values(table(name="u", init_fn=normal, data_type="fp16")), first)


def test_what_a_function_leaves_keeps_its_uniform_value():
    def zeros_in_row_0(tensor):
        tensor[0] = 0

    expected = values(table())
    expected[0] = 0
    assert torch.equal(values(table(init_fn=zeros_in_row_0)), expected)


def start_values_under_plans(comm):
    tables = [
        replace(t, init_fn=normal) if number % 2 else replace(t, weight_init_min=-0.01)
        for number, t in enumerate(make_tables())
    ]
    plain = EmbeddingBagCollection(tables, seed=3)
    for kind in ("random", "mixed", "row_wise", "column_wise", "data_parallel"):
        for order in ("natural", "mixed"):
            plan = make_plan(kind, tables, comm.world, row_order=order)
            for (name, _), data in whole_tensors(
                comm, shard_bags(tables, plan, comm, None, 3)
            ).items():
                assert torch.equal(data, plain.weight(name)), (kind, name)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_start_values_of_ranges_and_functions_are_the_same_under_every_plan(ranks, world):
    ranks.run(start_values_under_plans, world)


def test_a_function_that_makes_another_tensor_is_refused():
    made = table(init_fn=lambda rows: torch.ones_like(rows))
    with pytest.raises(
        ConfigError, match=r"init_fn returned a new tensor: the function must write"
    ):
        values(made)
    assert values(table(init_fn=lambda rows: rows.data.fill_(2)[0])).unique().tolist() == [2]


def test_an_error_of_a_function_of_start_values_names_its_table():
    with pytest.raises(
        ConfigError, match=r"tables\.t\.init_fn raised TypeError: .*a tensor \["
    ) as it:
        values(table(init_fn=lambda: 0))
    assert "\n" not in str(it.value)
