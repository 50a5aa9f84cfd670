"""Tables in 8 and 4 bits behind the sharded collection: under every plan what one process computes
from the quantised rows, and nothing that trains.
"""

from itertools import product

import pytest
import torch
from engine.engine_cases import KINDS, RULES, batch_of, make_plan, make_tables

from recapp.engine.held_memory import held_bytes
from recapp.engine.quantised_store import QuantisedStore, quantised
from recapp.engine.sharded_embedding_bag import shard_bags
from recapp.errors import ConfigError
from recapp.kernels.quantised import bytes_of_record, dequantise, quantise
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.transport.communicator import Comm

SEED = 4
DIMS = (16, 5, 12)  # an odd width, so that 4 bits leave half a byte


def tables_of(pooling):
    return make_tables(dims=DIMS, pooling=pooling)


def trained(comm, tables, kind, mode, backend):
    plan = make_plan(kind, tables, comm.world, mode=mode, column_width=3)
    return shard_bags(tables, plan, comm, RULES["adam"], SEED, backend)


def oracle_of(tables, plan, world, bits):
    """The unsharded collection, each rectangle of its tables rounded to a few bits and back."""
    oracle = EmbeddingBagCollection(tables, is_weighted=None, seed=SEED)
    for t in tables:
        weight_RD = oracle.weight(t.name).detach()
        for shard in plan.tables[t.name].cells(t, world):
            if shard.rows:
                rows = slice(shard.rows.start, shard.rows.stop)
                cols = slice(shard.cols.start, shard.cols.stop)
                packed = quantise(weight_RD[rows, cols], bits)
                weight_RD[rows, cols] = dequantise(packed, torch.arange(len(shard.rows)))
    return oracle


def looked_up(comm, kind, mode, pooling, weighted, bits):
    """Outputs of this rank with either backend, and the oracle's."""
    tables = tables_of(pooling)
    batch = batch_of(tables, 7, comm.rank, weighted=weighted)
    found = []
    for backend in ("torch", "numba"):
        collection = trained(comm, tables, kind, mode, backend)
        served = quantised(collection, bits)
        calls = comm.calls
        with torch.no_grad():
            found.append(served(batch).values())
        assert comm.calls == calls + (3 if comm.world > 1 else 0)
    oracle = oracle_of(tables, collection.plan, comm.world, bits)
    with torch.no_grad():
        return *found, oracle(batch).values()


CASES = list(
    product(KINDS, [1, 2, 4], ["unique", "pooled"], ["sum", "mean"], [False, True], [8, 4])
)
CHOSEN = {
    (kind, (1, 2, 4)[(i + n) % 3], *rest)
    for i, kind in enumerate(KINDS)
    for n, rest in enumerate(
        [
            ("unique", "sum", False, 8),
            ("unique", "mean", True, 4),
            ("pooled", "mean", False, 8),
            ("pooled", "sum", True, 4),
            ("unique", "sum", False, 4),
        ]
    )
    if (i + 2 * n) % 5 == 0  # one for each kind
}


@pytest.mark.parametrize(
    ("kind", "world", "mode", "pooling", "weighted", "bits"),
    [c if c in CHOSEN else pytest.param(*c, marks=pytest.mark.full) for c in CASES],
)
def test_sharded_quantised_tables_are_the_unsharded_rounded_ones(
    ranks, kind, world, mode, pooling, weighted, bits
):
    for reference, compiled, oracle in ranks.run(
        looked_up, world, kind, mode, pooling, weighted, bits
    ):
        torch.testing.assert_close(reference, oracle, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(compiled, oracle, rtol=1e-5, atol=1e-6)
        # The oracle divides a mean's sum, the engine scales its rows; products with weights may be
        # fused; in the pooled mode the owners' sums are added.
        if mode == "unique" and pooling == "sum" and not weighted:
            assert torch.equal(reference, oracle) and torch.equal(compiled, oracle)


def test_the_comparison_notices_rows_that_were_not_rounded():
    tables = tables_of("sum")
    collection = trained(Comm(), tables, "table_wise", "unique", "torch")
    batch = batch_of(tables, 7, 0)
    with torch.no_grad():
        exact = collection(batch).values()
        rounded = oracle_of(tables, collection.plan, 1, 4)(batch).values()
    assert not torch.allclose(exact, rounded, rtol=1e-5, atol=1e-6)


def stored(comm, kind, bits):
    """Every stored tensor, whole, from the blocks of their owners, and how often each number was
    written.
    """
    served = quantised(trained(comm, tables_of("sum"), kind, "unique", "torch"), bits)
    here = [
        (b.table, b.tensor, b.shape, b.rows, b.cols, b.data.clone())
        for b in served.blocks()
        if b.owner
    ]
    whole = {}
    for table, tensor, shape, rows, cols, data in (
        b for held in comm.all_gather(here) for b in held
    ):
        _, times = whole.setdefault(
            (table, tensor), (torch.zeros(shape, dtype=data.dtype), torch.zeros(shape))
        )
        part = (slice(rows.start, rows.stop), slice(cols.start, cols.stop))
        assert data.shape == (len(rows), len(cols))
        whole[table, tensor][0][part] = data
        times[part] += 1
    assert all(bool((times == 1).all()) for _, times in whole.values())
    return {key: data for key, (data, _) in whole.items()}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_blocks_tile_what_is_stored_and_are_what_quantise_makes(ranks, kind, bits):
    oracle = EmbeddingBagCollection(tables_of("sum"), seed=SEED)
    for whole in ranks.run(stored, 2, kind, bits):
        for t in tables_of("sum"):
            rows = quantise(oracle.weight(t.name).detach(), bits)
            assert torch.equal(whole[t.name, f"records{bits}"], rows.records_RK)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["column_wise", "grid_shard"])
def test_column_strips_have_records_of_their_own_side_by_side(ranks, kind, bits):
    """Strips of three columns, each a word of values, a scale and a bias."""
    for whole in ranks.run(stored, 2, kind, bits):
        for t, dim in zip(tables_of("sum"), DIMS, strict=True):
            size = sum(bytes_of_record(min(3, dim - first), bits) for first in range(0, dim, 3))
            assert whole[t.name, f"records{bits}"].shape == (t.num_embeddings, size)


def made(bits=8):
    return quantised(trained(Comm(), tables_of("sum"), "table_wise", "unique", "torch"), bits)


def test_quantised_tables_are_read_only():
    served = made()
    values = served(batch_of(tables_of("sum"), 5, 0)).values()
    with pytest.raises(ConfigError, match=r"tables t0, t1, t2\.\.\.: they are read-only"):
        values.sum().backward()
    store = served.shared.store(0)
    assert isinstance(store, QuantisedStore)
    with pytest.raises(ConfigError, match="8 bits and are read-only: train the float tables"):
        store.update(torch.zeros(1), None, torch.zeros(1), None, 0.1)
    with pytest.raises(ConfigError, match="quantise a collection whose rows are floats"):
        quantised(served, 4)


def test_a_store_refuses_other_rows_than_the_layouts():
    group = made().shared.store(0).group
    with pytest.raises(ValueError, match="1 rows x 3 where the layout has"):
        QuantisedStore(group, quantise(torch.zeros(1, 3), 8))


def test_a_row_that_cannot_be_quantised_is_named_with_its_table():
    collection = trained(Comm(), tables_of("sum"), "table_wise", "unique", "torch")
    (block,) = [b for b in collection.blocks() if (b.table, b.tensor) == ("t1", "weight")]
    block.data[3, 1] = torch.nan
    with pytest.raises(
        ValueError, match="table t1, counted from row 0: row 3 holds a value that is not finite"
    ):
        quantised(collection, 8)


def test_other_bits_are_refused():
    with pytest.raises(ValueError, match="bits=3: rows are kept in 4 or 8 bits"):
        made(bits=3)


def test_a_quantised_collection_takes_its_bytes_and_no_place_in_a_state_dict():
    served = made(bits=4)
    records = sum(t.num_embeddings * bytes_of_record(t.embedding_dim, 4) for t in tables_of("sum"))
    held = held_bytes([served.shared], torch.device("cpu"))
    assert held["weights"] == records and held["state"] == 0
    assert served.state_dict() == {}
    assert "4 bits, read-only" in repr(served)


def test_updates_that_wait_are_in_the_quantised_rows():
    """A step with a second lookup that is not differentiated has gradients set aside."""
    tables = tables_of("sum")
    collection = trained(Comm(), tables, "table_wise", "unique", "torch")
    batch = batch_of(tables, 7, 1)
    held = collection(batch).values()
    collection(batch).values().sum().backward()
    served = quantised(collection, 8)
    with torch.no_grad():
        close = torch.isclose(served(batch).values(), collection(batch).values(), atol=0.2)
    assert close.all() and collection.shared.updates == 1 and held.requires_grad
