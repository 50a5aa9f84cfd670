"""Small models, batches and plans for the engine's tests, and whole tensors put together from
shards.
"""

import random

import torch
from parity.cases import KINDS, RULES, in_order, rows_held, sharding
from torch import nn

from recapp.engine.sharded_collection import shard_bags
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig

__all__ = [
    "KINDS",
    "RULES",
    "batch_of",
    "make_plan",
    "make_tables",
    "same_bits",
    "sharded",
    "whole_tensors",
]


def make_tables(rows=(131, 40, 7), dims=(16, 5, 12), **changes):
    """t0 is read by a and shared, t1 by b and shared, t2 by c."""
    features = [["a", "shared"], ["b", "shared"], ["c"]]
    return [
        EmbeddingBagConfig(
            **(
                {"name": f"t{k}", "num_embeddings": r, "embedding_dim": d, "feature_names": f}
                | changes
            )
        )
        for k, (r, d, f) in enumerate(zip(rows, dims, features, strict=True))
    ]


def make_plan(kind, tables, world, *, seed=0, mode="unique", column_width=5, row_order="natural"):
    """Every table cut as `kind` says: a named type, mixed (a random type per table) or random (any
    rectangles).
    """
    rng = random.Random(f"{kind}/{seed}")
    hosts = [list(range(world // 2)), list(range(world // 2, world))] if world > 1 else [[0]]
    ranks = list(range(world))

    def cut(table):
        if kind in ("mixed", "random"):
            return sharding(kind, table, world, rng, mode)
        rng.shuffle(ranks)
        return tile(table, kind, CandidateRanks(ranks, hosts), mode, column_width=column_width)

    return in_order(ShardingPlan({t.name: cut(t) for t in tables}, world, kind), row_order)


def batch_of(tables, rows, seed, *, most=3, weighted=False, one_hot=False):
    """Ids that fit every table that reads their feature."""
    generator = torch.Generator().manual_seed(seed)
    features = list(dict.fromkeys(f for t in tables for f in t.feature_names))
    fitting = {f: min(t.num_embeddings for t in tables if f in t.feature_names) for f in features}
    lengths = torch.randint(0, most + 1, (len(features), rows), generator=generator)
    lengths = torch.ones_like(lengths) if one_hot else lengths
    ids = torch.cat(
        [
            torch.randint(0, fitting[f], (int(n.sum()),), generator=generator)
            for f, n in zip(features, lengths, strict=True)
        ]
    )
    weights = (
        torch.rand(len(ids), generator=generator, dtype=tables_dtype(tables)) + 0.5
        if weighted
        else None
    )
    return KeyedJaggedTensor(features, ids, weights, lengths.flatten())


def tables_dtype(tables):
    return torch.float64 if any(t.data_type == "fp64" for t in tables) else torch.float32


def sharded(comm, tables, kind="table_wise", rule="sgd", *, seed=1, backend="auto", **plan):
    return shard_bags(
        tables, make_plan(kind, tables, comm.world, **plan), comm, RULES[rule], seed, backend
    )


def whole_tensors(comm, collection):
    """Every logical tensor in the order of rows, on every rank, from the blocks of their owners;
    copies elsewhere must have the same bits.
    """
    here = [
        (b.table, b.tensor, b.shape, rows_held(b), b.cols, b.data.clone(), b.owner)
        for b in collection.blocks()
    ]
    blocks = [b for held in comm.all_gather(here) for b in held]
    whole = {}
    written = {}
    for table, tensor, shape, rows, cols, data, _ in (b for b in blocks if b[-1]):
        key = (table, tensor)
        part = (rows, slice(cols.start, cols.stop))
        whole.setdefault(key, torch.zeros(shape, dtype=data.dtype))[part] = data
        written.setdefault(key, torch.zeros(shape, dtype=torch.int64))[part] += 1
    assert all(bool((n == 1).all()) for n in written.values()), (
        "every element of a tensor has one owner"
    )
    for table, tensor, _, rows, cols, data, _ in blocks:
        held = whole[table, tensor][rows, cols.start : cols.stop]
        assert torch.equal(held, data), f"copies of {table} differ"
    return whole


def same_bits(a, b):
    """Equal bit for bit, NaN and the sign of zero included."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    )


class Head(nn.Module):
    """A small dense part on top of a collection's output; the same start values everywhere."""

    def __init__(self, collection):
        super().__init__()
        torch.manual_seed(5)
        width = sum(t.embedding_dim * len(t.feature_names) for t in collection.tables())
        self.collection = collection
        self.layers = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1)).to(
            collection.dtype
        )

    def forward(self, features):
        return self.layers(self.collection(features).values()).squeeze(1)
