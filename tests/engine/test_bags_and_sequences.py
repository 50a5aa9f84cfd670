"""Bags, concatenations and sequences in one model, under every plan: as the unsharded collections,
and with as many collectives as one collection of bags.
"""

import random

import pytest
import torch
from engine.test_dynamic_tables import rows_by_key
from parity.cases import KINDS, RULES, RowwiseAdagrad, sharding
from tiers import cover, one_of
from torch import nn

from recapp.engine.sharded_collection import shard_model, sharded_tables
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    TableLookup,
    lookups_of,
)

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
FEATURES = {"a": 131, "b": 17, "c": 40, "d": 9}  # rows of the smallest table that reads them


def rows_of(name, rows, dynamic):
    """The size of a table; of those of some names also as dynamic tables with its start values."""
    grows = dynamic and name in ("users", "history", "words")
    return {"num_embeddings": "dynamic" if grows else rows, "init_range": rows**-0.5}


def bag_tables(dynamic=False):
    return [
        EmbeddingBagConfig(
            name=name,
            **rows_of(name, rows, dynamic),
            embedding_dim=dim,
            feature_names=features,
            pooling=pooling,
            data_type="fp64",
        )
        for name, rows, dim, features, pooling in [
            ("users", 131, 6, ["a"], "sum"),
            ("items", 40, 3, ["b", "c"], "mean"),
        ]
    ]


def sequence_tables(tied=False, dynamic=False):
    return [
        EmbeddingConfig(
            name=name,
            **rows_of(name, rows, dynamic),
            embedding_dim=dim,
            feature_names=features,
            data_type="fp64",
        )
        for name, rows, dim, features in [
            ("users" if tied else "history", 131, 6, ["a", "d"]),
            ("words", 17, 3, ["b"]),
            ("more", 9, 3, ["d"]),
        ]
    ]


class Model(nn.Module):
    """Two collections of bags, one of them with a concatenation, and one of sequences, which shares
    the table `users` where `tied`.
    """

    def __init__(self, seed, tied=False, dynamic=False):
        super().__init__()
        first, second = bag_tables(dynamic)
        concat = TableLookup(second, "c", "c side by side", PoolingType.CONCAT, hotness=3)
        lookups = (*lookups_of([second]), concat)
        self.wide = EmbeddingBagCollection([first], None, seed=seed, sparse=True)
        self.deep = EmbeddingBagCollection([second], None, seed=seed, lookups=lookups, sparse=True)
        self.sequences = EmbeddingCollection(
            sequence_tables(tied, dynamic), need_indices=True, seed=seed + 1, sparse=True
        )
        if tied:
            self.sequences.embeddings["users"].weight = self.wide.embedding_bags["users"].weight

    def forward(self, features):
        """Every output as one row of numbers per sample, so that sums over ranks mean the same."""
        parts = [self.wide(features).values(), self.deep(features).values()]
        for jagged in self.sequences(features).values():
            total_BD = torch.zeros(len(jagged.lengths()), jagged.values().shape[1]).double()
            bag_L = torch.repeat_interleave(jagged.lengths())
            nth_L = torch.arange(len(bag_L)) - jagged.offsets()[bag_L]
            scaled_LD = (jagged.values() * (1 + nth_L[:, None])).tanh()
            parts.append(total_BD.index_add(0, bag_L, scaled_LD))
        return torch.cat(parts, 1)


def batch_of(rows, seed, weighted):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES), rows), generator=generator)
    sizes = zip(FEATURES.values(), lengths, strict=True)
    ids = torch.cat([torch.randint(0, n, (int(k.sum()),), generator=generator) for n, k in sizes])
    weights = torch.rand(len(ids), generator=generator).double() if weighted else None
    return KeyedJaggedTensor(list(FEATURES), ids, weights, lengths.flatten())


def loss_of(values):
    head = torch.linspace(-1, 1, values.shape[1], dtype=torch.float64)
    return (values.tanh() * head).sum()


def optimizer_of(rule, weights):
    return {
        "sgd": lambda: torch.optim.SGD(weights, rule.lr),
        "adagrad": lambda: torch.optim.Adagrad(weights, rule.lr, eps=1e-10),
        "adam": lambda: torch.optim.SparseAdam(weights, rule.lr),
        "rowwise_adagrad": lambda: RowwiseAdagrad(weights, rule.lr),
    }[rule.name]()


def plan_of(kind, world, tied, dynamic):
    rng = random.Random(f"{kind}/{world}")
    tables = {t.name: t for t in (*bag_tables(dynamic), *sequence_tables(tied, dynamic))}
    cut = {name: sharding(kind, t, world, rng, "unique") for name, t in tables.items()}
    return ShardingPlan(cut, world, kind)


def train(comm, kind, rule_name, weighted, backend, tied=False, dynamic=False):
    """Train a sharded model beside the unsharded one; return the collectives of a step."""
    rule = RULES[rule_name]
    oracle = Model(3, tied)
    optimizer = optimizer_of(rule, list(oracle.parameters()))
    plan = plan_of(kind, comm.world, tied, dynamic)
    model = shard_model(Model(3, tied, dynamic), plan, comm, rule, backend)
    (shared,) = sharded_tables(model)
    for step in range(3):
        batches = [batch_of(6 + r, 10 * step + r, weighted) for r in range(comm.world)]
        expected = [oracle(b) for b in batches]
        rows = sum(map(len, expected))
        optimizer.zero_grad()
        (sum(map(loss_of, expected)) / rows).backward()
        optimizer.step()
        before = comm.calls
        values = model(batches[comm.rank])
        (loss_of(values) * comm.world / rows).backward()
        calls = comm.calls - before
        torch.testing.assert_close(values, expected[comm.rank], **TOLERANCE)
    named = dict(oracle.named_parameters())
    weight = {
        t: next(w for n, w in named.items() if n.endswith(f".{t}.weight"))
        for t in (t.name for t in shared.tables())
    }
    held = rows_by_key(comm, shared)
    for (table, tensor), data in held.items():
        if tensor != "keys":
            state = optimizer.state[weight[table]]
            whole = weight[table].detach() if tensor == "weight" else state[tensor]
            keys = held.get((table, "keys"), torch.arange(len(data))[:, None])[:, 0]
            torch.testing.assert_close(data, whole[keys], **TOLERANCE)
    assert dynamic == any(tensor == "keys" for _, tensor in held)
    return calls, shared.state.row_statistics is not None


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "world", "backend"), one_of(8, cover(2, [KINDS, [1, 2, 4], ["numba", "torch"]]))
)
def test_dynamic_tables_of_bags_and_sequences_cost_no_collective_more(ranks, kind, world, backend):
    rule = list(RULES)[(KINDS.index(kind) + world) % len(RULES)]
    for calls, agreed in ranks.run(train, world, kind, rule, False, backend, False, True):
        assert calls == (4 if world > 1 else 3) + agreed


@pytest.mark.parametrize(
    ("kind", "world", "weighted"), one_of(4, cover(2, [KINDS, [1, 2, 4], [False, True]]))
)
def test_three_collections_train_as_unsharded_in_the_collectives_of_one(
    ranks, kind, world, weighted
):
    rule = list(RULES)[(KINDS.index(kind) + world) % len(RULES)]
    backend = ["auto", "torch"][(KINDS.index(kind) + world + weighted) % 2]
    for calls, agreed in ranks.run(train, world, kind, rule, weighted, backend):
        assert calls == (4 if world > 1 else 3) + agreed


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "kind", one_of(4, ["table_wise", "column_wise", "data_parallel", "random"])
)
def test_a_table_may_serve_bags_and_sequences_and_is_updated_once(ranks, kind, world):
    rule = {"table_wise": "adam", "column_wise": "rowwise_adagrad"}.get(kind, "adagrad")
    for calls, agreed in ranks.run(train, world, kind, rule, False, "auto", True, world == 2):
        assert calls == (4 if world > 1 else 3) + agreed
