"""Several lookups of one table, and models of several collections, on ranks: as unsharded."""

import pytest
import torch
from engine_cases import KINDS, RULES, batch_of, make_plan, make_tables, whole_tensors
from parity.cases import Case, Oracle, loss_of
from tiers import one_of

from recapp.engine.sharded_collection import shard_bags
from recapp.tables.config import PoolingType, TableLookup


def several(tables):
    """Lookups in an order of their own; tables 0 and 1 serve sums and means of one feature."""
    first, second, third = tables
    return (
        TableLookup(third, "c", "c", PoolingType.MEAN),
        TableLookup(first, "a", "a sum", PoolingType.SUM),
        TableLookup(second, "b", "b", PoolingType.SUM),
        TableLookup(second, "shared", "second shared", PoolingType.MEAN),
        TableLookup(first, "a", "a mean", PoolingType.MEAN),
        TableLookup(first, "shared", "shared", PoolingType.SUM),
        TableLookup(second, "b", "b mean", PoolingType.MEAN),
    )


def trained(comm, kind, mode, rule):
    tables = make_tables(data_type="fp64")
    lookups = several(tables)
    head = torch.linspace(-1, 1, sum(x.dim for x in lookups), dtype=torch.float64)
    plan = make_plan(kind, tables, comm.world, mode=mode)
    collection = shard_bags(tables, plan, comm, RULES[rule], seed=1, lookups=lookups)
    oracle = Oracle(Case(tables, None, [], head, RULES[rule], lookups), seed=1)
    for step in range(3):
        batches = [batch_of(tables, 6, 10 * step + r) for r in range(comm.world)]
        found = collection(batches[comm.rank])
        loss_of(found.values(), head).mean().backward()
        assert found.keys() == [x.output for x in lookups]
        expected = oracle.step(batches)[comm.rank]
        torch.testing.assert_close(found.values().detach(), expected, rtol=1e-9, atol=1e-9)
    for (table, tensor), data in whole_tensors(comm, collection).items():
        torch.testing.assert_close(data, oracle.tensor(table, tensor), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("world", one_of(2, [2, 1]))
@pytest.mark.parametrize("mode", ["unique", "pooled"])
@pytest.mark.parametrize("kind", KINDS)
def test_several_lookups_of_a_table_equal_the_unsharded_ones(ranks, kind, mode, world):
    rule = "rowwise_adagrad" if kind in ("column_wise", "grid_shard", "random") else "adam"
    ranks.run(trained, world, kind, mode, rule)
