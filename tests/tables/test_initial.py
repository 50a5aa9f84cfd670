"""Start values: a function of seed, table, row and column, whoever writes them and in whatever
pieces.
"""

import zlib

import pytest
import torch

from recapp.tables import initial
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.initial import fill_initial


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
