"""Tables stored narrower than they are computed in: read as the compute type, updated in it,
rounded back once per update.
"""

from dataclasses import replace

import pytest
import torch
from engine.engine_cases import RULES, batch_of, make_plan, make_tables, sharded, whole_tensors
from parity.cases import Case, Oracle, loss_of

from recapp.engine.sharded_collection import shard_bags
from recapp.tables.collections import EmbeddingBagCollection

HEAD = torch.linspace(-1, 1, 16 * 2 + 5 * 2 + 12)
MIXED = {"t0": "fp16", "t1": "fp32", "t2": "bf16"}


class RoundingOracle(Oracle):
    """The unsharded collection in the compute type: it starts with the rows of narrow tables and
    rounds its own like theirs.
    """

    def __init__(self, tables, narrow, rule, seed):
        super().__init__(Case(tables, None, [], HEAD.to(tables[0].data_type.dtype), rule), seed)
        self.start = EmbeddingBagCollection(narrow, seed=seed)
        self.round_to(self.start)

    @torch.no_grad()
    def round_to(self, like=None):
        for t in self.start.tables():
            weight = self.model.weight(t.name)
            weight.copy_((like or self.model).weight(t.name).to(t.data_type.dtype))

    def step(self, batches):
        outputs = super().step(batches)
        self.round_to()
        return outputs


def with_types(types, dtype=None):
    return [replace(t, data_type=dtype or types[t.name]) for t in make_tables()]


def narrow(comm, types, kind, rule, mode, compute, tolerance):
    tables = with_types(types)
    collection = shard_bags(
        tables, make_plan(kind, tables, comm.world, mode=mode), comm, RULES[rule], 1
    )
    oracle = RoundingOracle(with_types(types, compute), tables, RULES[rule], 1)
    for step in range(3):
        batches = [batch_of(tables, 6, 10 * step + r, weighted=True) for r in range(comm.world)]
        values = collection(batches[comm.rank]).values()
        assert values.dtype == collection.dtype == tables_type(compute)
        torch.testing.assert_close(values.detach(), oracle.step(batches)[comm.rank], **tolerance)
        loss_of(values, HEAD.to(values.dtype)).mean().backward()
    rounded = 0
    for (table, tensor), data in whole_tensors(comm, collection).items():
        wanted = (
            {t.name: t.data_type.dtype for t in tables}[table]
            if tensor == "weight"
            else tables_type(compute)
        )
        assert data.dtype == wanted
        torch.testing.assert_close(data, oracle.tensor(table, tensor).to(wanted), **tolerance)
        rounded += int(data.dtype.itemsize == 2)
    return rounded


def tables_type(name):
    return {"fp32": torch.float32, "fp64": torch.float64}[name]


# what the order of fp32 sums can move, times the one step of fp16 or bf16 that a row beside a
# rounding edge then moves
LOOSE = {"rtol": 1e-2, "atol": 1e-3}


@pytest.mark.parametrize(
    ("kind", "rule", "mode"),
    [
        ("table_wise", "sgd", "unique"),
        ("row_wise", "rowwise_adagrad", "unique"),
        ("column_wise", "adagrad", "unique"),
        ("data_parallel", "adam", "unique"),
        ("random", "rowwise_adagrad", "pooled"),
    ],
)
def test_half_precision_tables_train_like_an_unsharded_one_that_rounds_the_same_way(
    ranks, kind, rule, mode
):
    assert ranks.run(narrow, 2, MIXED, kind, rule, mode, "fp32", LOOSE) == [2, 2]


@pytest.mark.parametrize("mode", ["unique", "pooled"])
def test_computing_in_double_precision_leaves_no_doubt_about_the_rounding(ranks, mode):
    exact = {"rtol": 0, "atol": 1e-9}
    for stored in ("fp16", "bf16", "fp32"):
        types = {"t0": stored, "t1": "fp64", "t2": stored}
        assert (
            ranks.run(narrow, 2, types, "random", "adagrad", mode, "fp64", exact)
            == [2 * (stored != "fp32")] * 2
        )


def same_as_unsharded(comm):
    """A forward through the plain collection of the same types."""
    tables = with_types(MIXED)
    batch = batch_of(tables, 6, comm.rank)
    return float(
        (
            EmbeddingBagCollection(tables, seed=1)(batch).values()
            - sharded(comm, tables, "random")(batch).values()
        )
        .abs()
        .max()
    )


def test_the_unsharded_collection_reads_narrow_tables_alike(ranks):
    assert max(ranks.run(same_as_unsharded, 2)) < 1e-6


def cast(comm):
    """What `model.half()` makes of a sharded model."""
    tables = make_tables()
    collection = sharded(comm, tables, "column_wise", "adagrad")
    before = collection(batch_of(tables, 6, 0)).values().detach()
    collection.half()
    after = collection(batch_of(tables, 6, 0)).values().detach()
    return torch.equal(before, after), {str(s.weights.dtype) for s in collection.shared.stores}


def test_casting_a_model_leaves_its_tables_as_the_plan_made_them(ranks):
    assert ranks.run(cast, 2) == [(True, {"torch.float32"})] * 2
