"""Rows of a batch become positions, by torch's operations and by the compiled pass alike."""

import pytest
import torch

from recapp.engine.state import MixedLookups
from recapp.kernels.backend import backend
from recapp.sharding.layout import make_layout
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.ids import LookupRows
from recapp.tables.positions import mixed_order


@pytest.fixture(params=["torch", "numba"])
def kernel(request):
    return backend(request.param, torch.device("cpu")).positions_of_rows


def layout_of(sizes):
    """A table for each (rows, order); "dynamic" ones beside them."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{k}", num_embeddings=rows, embedding_dim=1, feature_names=[f"f{k}"]
        )
        for k, (rows, _) in enumerate(sizes)
    ]
    shardings = {
        t.name: TableSharding((Shard(0, range(t.plan_rows), range(1)),), row_order=order)
        for t, (_, order) in zip(tables, sizes, strict=True)
    }
    return tables, make_layout(tables, ShardingPlan(shardings, 1))


BEYOND_32_BITS = [(2**33 + 9, "mixed"), (1_000_003, "natural"), (2**40, "mixed"), (7, "mixed")]
SMALL = [(1_000_003, "mixed"), (50, "natural"), (2**31 - 1, "mixed"), (999_999, "mixed")]
BESIDE_KEYS = [(1_000_003, "mixed"), ("dynamic", "natural"), (2**31, "mixed")]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        *((sizes, dtype) for sizes in (SMALL, SMALL[:1]) for dtype in (torch.int32, torch.int64)),
        (BEYOND_32_BITS, torch.int64),
        (BESIDE_KEYS, torch.int64),
    ],
)
def test_each_lookup_gets_the_positions_of_its_table(kernel, sizes, dtype):
    tables, layout = layout_of(sizes)
    generator = torch.Generator().manual_seed(3)
    counts = [5, 0, 900, 3][: len(tables)] if len(tables) > 1 else [700]
    parts = []
    for (rows, _), n in zip(sizes, counts, strict=True):
        low, high = (-(2**63), 2**63 - 1) if rows == "dynamic" else (0, rows)
        parts.append(torch.randint(low, high, (n,), generator=generator))
    rows = LookupRows(torch.cat(parts).to(dtype), torch.zeros(len(tables), 0), None, counts)
    before_L = rows.rows_L.clone()
    found_L = MixedLookups(layout, kernel).positions_of(rows)
    assert found_L.dtype == dtype and torch.equal(rows.rows_L, before_L)
    for table, (size, order), part, found in zip(
        tables, sizes, parts, found_L.split(counts), strict=True
    ):
        wanted = part if order == "natural" else mixed_order(table.name, size).positions_of(part)
        assert found.tolist() == wanted.tolist()


def test_a_batch_of_no_mixed_table_is_left_as_it_is(kernel):
    _, layout = layout_of([(9, "natural")])
    rows = LookupRows(torch.arange(9), torch.full((1, 1), 9), None, [9])
    assert MixedLookups(layout, kernel).positions_of(rows) is rows.rows_L
