"""Random models: any number of collections of bags, concatenations and sequences, tables shared or
not, a rule for each, any rectangles, rows in either order: as unsharded, and again after a
checkpoint on other ranks.
"""

import random
from dataclasses import replace

import pytest
import torch
from engine.test_dynamic_tables import rows_by_key
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.dense_rules import CASES, DenseRule, rule_of_case
from parity.cases import sharding
from torch import nn

from recapp.engine.sharded_collection import shard_model, sharded_tables
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.stored.checkpoint import write_checkpoint
from recapp.stored.stored_model import load_blocks, read_manifest
from recapp.tables.collections import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    collections_in,
    embedding_tables,
)
from recapp.tables.config import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    TableLookup,
    lookups_of,
)
from recapp.tables.positions import ROW_ORDERS

FEATURES = {"a": 60, "b": 7, "c": 23, "d": 23, "e": 1}  # rows of every table that reads them
RULES = tuple(map(rule_of_case, CASES))
BAGS = (PoolingType.SUM, PoolingType.MEAN)


class Mixture(nn.Module):
    """One to four collections that a seed decides on; where `grows`, about half of their tables are
    dynamic.
    """

    def __init__(self, seed, start=0, grows=False):
        super().__init__()
        self.rng = random.Random(seed)
        self.grows = grows
        self.seed = seed
        self.start = start
        self.parts = nn.ModuleList()
        for number in range(self.rng.randint(1, 4)):
            make = self.rng.choice([self._bags, self._sequences])
            self.parts.append(make(number))

    def _tables(self, number):
        """Tables of this collection: name, size, and features of one size."""
        for k in range(self.rng.randint(1, 3)):
            feature = self.rng.choice(list(FEATURES))
            same = [f for f, rows in FEATURES.items() if rows == FEATURES[feature]]
            name = f"t{number}{k}"
            yield {
                "name": name,
                **self._size(name, FEATURES[feature]),
                "embedding_dim": self.rng.choice([1, 3, 4, 8]),
                "feature_names": self.rng.sample(same, self.rng.randint(1, len(same))),
                "data_type": "fp64",
            }

    def _size(self, name, rows):
        dynamic = self.grows and random.Random(f"{self.seed}/{name}").random() < 0.5
        return {"num_embeddings": "dynamic" if dynamic else rows, "init_range": rows**-0.5}

    def _bags(self, number):
        tables = [
            EmbeddingBagConfig(**table, pooling=self.rng.choice(BAGS))
            for table in self._tables(number)
        ]
        concats = [
            TableLookup(t, t.feature_names[0], f"{t.name} wide", PoolingType.CONCAT, 2, True)
            for t in tables
            if self.rng.random() < 0.4
        ]
        lookups = (*lookups_of(tables), *concats)
        return EmbeddingBagCollection(tables, None, seed=self.start, lookups=lookups, sparse=True)

    def _sequences(self, number):
        made = [EmbeddingConfig(**table) for table in self._tables(number)]
        tied = {}
        for part in self.parts:
            for t in part.tables():
                if self.rng.random() < 0.3 and not tied:
                    rows = FEATURES[t.feature_names[0]]
                    size = {**self._size(t.name, rows), "embedding_dim": t.embedding_dim}
                    features = {"feature_names": t.feature_names, "data_type": "fp64"}
                    made.append(EmbeddingConfig(name=t.name, **size, **features))
                    tied[t.name] = part.weight(t.name)
        collection = EmbeddingCollection(made, seed=self.start, sparse=True)
        for name, weight in tied.items():
            collection.embeddings[name].weight = weight
        return collection

    def forward(self, features):
        """Every output as numbers of the samples."""
        found = []
        for part in self.parts:
            output = part(features)
            if not isinstance(output, dict):
                found.append(output.values())
                continue
            for jagged in output.values():
                bag_L = torch.repeat_interleave(jagged.lengths())
                sums_BD = jagged.values().new_zeros(len(jagged.lengths()), jagged.values().shape[1])
                found.append(sums_BD.index_add(0, bag_L, jagged.values().tanh()))
        return torch.cat(found, 1)


def batch_of(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES), rows), generator=generator)
    sizes = zip(FEATURES.values(), lengths, strict=True)
    ids = torch.cat([torch.randint(0, n, (int(k.sum()),), generator=generator) for n, k in sizes])
    return KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths.flatten())


def loss_of(values):
    """Columns weigh differently and none is the negative of another: where the gradients of two
    lookups cancel, LAMB makes steps of full length of what rounding leaves.
    """
    return (values.tanh() * torch.arange(values.shape[1], dtype=torch.float64).cos()).sum()


def rules_of(tables, seed):
    rng = random.Random(seed)
    return {t.name: rng.choice(RULES) for t in tables}


def sharded(comm, seed, start):
    model = Mixture(seed, start, True)
    tables = embedding_tables(model)
    rng = random.Random(f"{seed}/{comm.world}")
    kinds = ["random", "mixed", "column_wise"]
    cut = {
        t.name: replace(
            sharding(rng.choice(kinds), t, comm.world, rng, "unique"),
            row_order="natural" if t.dynamic else rng.choice(ROW_ORDERS),
        )
        for t in tables
    }
    plan = ShardingPlan(cut, comm.world)
    return shard_model(model, plan, comm, rules_of(tables, seed), "torch")


def train(comm, seed, path):
    oracle = Mixture(seed)
    tables = embedding_tables(oracle)
    chosen = rules_of(tables, seed)
    weights = {
        t.name: held.weight(t.name) for _, held in collections_in(oracle) for t in held.tables()
    }
    optimizers = {name: DenseRule([weights[name]], rule) for name, rule in chosen.items()}
    model = sharded(comm, seed, 0)
    (shared,) = sharded_tables(model)
    for step in range(3):
        batches = [batch_of(5 + r, 10 * step + r) for r in range(comm.world)]
        expected = [oracle(b) for b in batches]
        rows = sum(map(len, expected))
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        (sum(map(loss_of, expected)) / rows).backward()
        for optimizer in optimizers.values():
            optimizer.step()
        values = model(batches[comm.rank])
        torch.testing.assert_close(values, expected[comm.rank], rtol=1e-8, atol=1e-9)
        (loss_of(values) * comm.world / rows).backward()
    whole = rows_by_key(comm, shared)
    for (table, tensor), data in whole.items():
        if tensor == "weight":
            keys = whole.get((table, "keys"), torch.arange(len(data))[:, None])[:, 0]
            wanted = weights[table].detach()[keys]
            torch.testing.assert_close(data, wanted, rtol=1e-8, atol=1e-9)
    info = {"plan": shared.plan.to_dict(), "dynamic": shared.rows_of_stretches(), "updates": [3]}
    write_checkpoint(path, list(shared.blocks()), comm=comm, meta={"step": 3}, manifest=info)
    return whole


def load(comm, seed, path):
    (shared,) = sharded_tables(sharded(comm, seed, 1))
    load_blocks(path, shared.blocks_to_load(read_manifest(path).dynamic, 3))
    shared.loaded()
    return rows_by_key(comm, shared)


def check(ranks, path, seed):
    world, other = [(2, 4), (4, 1), (1, 2), (4, 2)][seed % 4]
    whole = ranks.run(train, world, seed, path)[0]
    found = ranks.run(load, other, seed, path)[0]
    assert found.keys() == whole.keys() and len(whole) > 1
    assert all(torch.equal(data, found[key]) for key, data in whole.items())


@pytest.mark.parametrize("seed", range(4))
def test_a_mixture_trains_as_unsharded_and_loads_on_other_ranks(ranks, tmp_path, seed):
    check(ranks, str(tmp_path / "a.ckpt"), seed)


@pytest.mark.full
def test_any_mixture_trains_as_unsharded_and_loads_on_other_ranks(ranks, tmp_path):
    seeds = st.integers(4, 2**31)

    @settings(max_examples=26, deadline=None, database=None, derandomize=True)
    @given(seeds)
    def trains(seed):
        check(ranks, str(tmp_path / f"{seed}.ckpt"), seed)

    trains()
