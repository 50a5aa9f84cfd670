"""A table's mode follows from counted bytes: what a batch would move if it asked for distinct rows,
or for pooled bags.
"""

import pytest
import torch

from recapp.errors import PlanError
from recapp.planner.choose_modes import decide_modes, exchanged_bytes
from recapp.sharding.layout import make_layout
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig


def table(name="t", rows=1000, dim=8, features=("f",)):
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features
    )


def plan_of(tables, kind="row_wise", mode="auto", world=2, column_width=4):
    ranks = CandidateRanks(list(range(world)), [list(range(world))])
    return ShardingPlan(
        {t.name: tile(t, kind, ranks, mode, column_width=column_width) for t in tables}, world
    )


def test_distinct_rows_and_bags_of_each_owner_are_counted():
    tables = [table()]
    # rows 0..499 are rank 0's
    batch = KeyedJaggedTensor(["f"], [1, 2, 2, 999, 5, 5, 600], None, [3, 0, 3, 1])
    vector = 2 * 4 * 8
    assert exchanged_bytes(tables, plan_of(tables), batch) == {
        "t": {
            "unique": 5 * (vector + 4),  # 1 2 999 5 600
            "pooled": 4 * (vector + 4) + 7 * 4,
        }
    }  # bag 0 on rank 0, bag 2 on both, bag 3 on 1
    by_columns = exchanged_bytes(tables, plan_of(tables, "column_wise"), batch)["t"]
    assert by_columns == {
        "unique": 2 * 5 * (vector // 2 + 4),
        "pooled": 2 * (3 * (vector // 2 + 4) + 7 * 4),
    }


def test_one_hot_features_never_pool_and_long_bags_of_rare_ids_do():
    kinds = [("one", 10**6), ("many", 10**6), ("few", 7), ("copies", 50)]
    tables = [
        table(name, rows, 16, (feature,))
        for (name, rows), feature in zip(kinds, "abcd", strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(0, t.num_embeddings, (n,), generator=generator)
        for t, n in zip(tables, (64, 64 * 20, 64 * 20, 64), strict=True)
    ]
    batch = KeyedJaggedTensor(list("abcd"), torch.cat(ids), None, [1] * 64 + [20] * 128 + [1] * 64)
    plan = plan_of(tables[:3])
    plan = ShardingPlan({**plan.tables, **plan_of(tables[3:], "data_parallel").tables}, 2)
    decided = decide_modes(tables, plan, [batch])
    assert {n: s.mode for n, s in decided.tables.items()} == {
        "one": "unique",
        "many": "pooled",
        "few": "unique",
        "copies": "replicated",
    }
    assert decided == decide_modes(tables, plan, [batch]) and decided.undecided == []


def test_a_mode_that_was_asked_for_stays():
    tables = [table("long", 10**6, 16)]
    batch = KeyedJaggedTensor(["f"], torch.randint(0, 10**6, (640,)), None, [20] * 32)
    assert (
        decide_modes(tables, plan_of(tables, mode="unique"), [batch]).tables["long"].mode
        == "unique"
    )
    assert decide_modes(tables, plan_of(tables), [batch]).tables["long"].mode == "pooled"


def test_a_plan_with_an_open_mode_is_not_laid_out():
    with pytest.raises(PlanError, match="the mode of t is still open"):
        make_layout([table()], plan_of([table()]))
    shards = (Shard(0, range(1000), range(8)),)
    with pytest.raises(PlanError, match="mode=pooling: did you mean"):
        TableSharding(shards, "pooling")
