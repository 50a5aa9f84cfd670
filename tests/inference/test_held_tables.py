"""Tables in 8 and 4 bits behind the sharded collection: under every plan what one process computes
from the quantised rows, and nothing that trains.
"""

from dataclasses import replace

import pytest
import torch
from engine.engine_cases import KINDS, batch_of, make_plan, make_tables
from tiers import cover

from recapp.engine.read_only_store import ReadOnlyStore
from recapp.engine.sharded_collection import shard_bags
from recapp.errors import ConfigError
from recapp.inference.held_tables import HeldTable, HeldTables, stored, values
from recapp.kernels.quantised import bytes_of_packed_row
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import DataType
from recapp.trainer.callbacks import held_bytes
from recapp.transport.communicator import Comm

SEED = 4
DIMS = (12, 3, 6)  # an odd width, so that 4 bits leave half a byte
TYPES = {8: DataType.INT8, 4: DataType.INT4}


def tables_of(pooling):
    return make_tables(dims=DIMS, pooling=pooling)


def served(comm, tables, kind, mode, backend, bits):
    """A sharded collection of the start values, each row rounded as a whole."""
    trained = EmbeddingBagCollection(tables, seed=SEED)
    held = {}
    for t in tables:
        rows = stored(trained.weight(t.name).detach(), TYPES[bits])
        held[t.name] = HeldTable(TYPES[bits], t.embedding_dim, rows, 0, t.num_embeddings)
    few = [replace(t, data_type=TYPES[bits]) for t in tables]
    plan = make_plan(kind, few, comm.world, mode=mode, column_width=3)
    made = HeldTables(held).make_store
    return shard_bags(few, plan, comm, None, SEED, backend, trains=False, make_store=made)


def oracle_of(tables, bits):
    """The unsharded collection, its rows rounded to a few bits and back."""
    oracle = EmbeddingBagCollection(tables, is_weighted=None, seed=SEED)
    for t in tables:
        weight_RD = oracle.weight(t.name).detach()
        weight_RD.copy_(values(stored(weight_RD, TYPES[bits])))
    return oracle


def looked_up(comm, kind, mode, pooling, weighted, bits):
    """Outputs of this rank with either backend, and the oracle's."""
    tables = tables_of(pooling)
    batch = batch_of(tables, 7, comm.rank, weighted=weighted)
    found = []
    for backend in ("torch", "numba"):
        collection = served(comm, tables, kind, mode, backend, bits)
        calls = comm.calls
        with torch.no_grad():
            found.append(collection(batch).values())
        assert comm.calls == calls + (3 if comm.world > 1 else 0)
    with torch.no_grad():
        return *found, oracle_of(tables, bits)(batch).values()


CASES = cover(3, [KINDS, [1, 2, 4], ["unique", "pooled"], ["sum", "mean"], [False, True], [8, 4]])


@pytest.mark.full
@pytest.mark.parametrize(("kind", "world", "mode", "pooling", "weighted", "bits"), CASES)
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
    batch = batch_of(tables, 7, 0)
    with torch.no_grad():
        exact = EmbeddingBagCollection(tables, seed=SEED)(batch).values()
        rounded = oracle_of(tables, 4)(batch).values()
    assert not torch.allclose(exact, rounded, rtol=1e-5, atol=1e-6)


def made(bits=8):
    return served(Comm(), tables_of("sum"), "table_wise", "unique", "torch", bits)


def test_quantised_tables_are_read_only():
    collection = made()
    found = collection(batch_of(tables_of("sum"), 5, 0)).values()
    with pytest.raises(ConfigError, match=r"tables t0, t1, t2\.\.\.: they are read-only"):
        found.sum().backward()
    store = collection.shared.state.stores[0]
    assert isinstance(store, ReadOnlyStore)
    with pytest.raises(ConfigError, match="their rows are read-only: train the tables of the"):
        store.update(torch.zeros(1), None, torch.zeros(1), None, 0.1)


def test_a_store_refuses_other_rows_than_the_layouts():
    group = made().shared.state.stores[0].group
    with pytest.raises(ValueError, match="1 rows x 3 where the layout has"):
        ReadOnlyStore(group, stored(torch.zeros(1, 3), DataType.INT8))


def test_a_quantised_collection_takes_its_bytes():
    collection = made(bits=4)
    packed = sum(
        t.num_embeddings * bytes_of_packed_row(t.embedding_dim, 4) for t in tables_of("sum")
    )
    held = held_bytes([collection.shared], torch.device("cpu"))
    assert held.weights == packed and held.state == 0
