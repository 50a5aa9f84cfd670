"""Plans in TorchRec's words: the shards are where they were said to be, and mistakes are said."""

from types import SimpleNamespace

import pytest
import torch

from recapp.compat.torchrec.planning import (
    ParameterSharding,
    ShardingPlan,
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from recapp.errors import PlanError
from recapp.sharding.sharding_plan import Shard
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig

TABLE = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=6, feature_names=["f"])
BAGS = EmbeddingBagCollection(tables=[TABLE], device=torch.device("meta"))


def shards(cut, world=4, local=2):
    plan = construct_module_sharding_plan(BAGS, {"t": cut}, local_size=local, world_size=world)
    assert plan.world_size == world
    return plan["t"].sharding_type, [
        (s.rank, s.rows.start, s.rows.stop, s.cols.start, s.cols.stop) for s in plan["t"].shards
    ]


@pytest.mark.parametrize(
    ("cut", "name", "expected"),
    [
        (table_wise(rank=3), "table_wise", [(3, 0, 8, 0, 6)]),
        (data_parallel(), "data_parallel", [(r, 0, 8, 0, 6) for r in range(4)]),
        (row_wise(), "row_wise", [(r, 2 * r, 2 * r + 2, 0, 6) for r in range(4)]),
        (column_wise(ranks=[2, 0]), "column_wise", [(2, 0, 8, 0, 3), (0, 0, 8, 3, 6)]),
        (
            column_wise(size_per_rank=[1, 5]),
            "column_wise",
            [(0, 0, 8, 0, 1), (1, 0, 8, 1, 6)],
        ),
        (table_row_wise(host_index=1), "table_row_wise", [(2, 0, 4, 0, 6), (3, 4, 8, 0, 6)]),
        (
            grid_shard(host_indexes=[1, 0]),
            "grid_shard",
            [(2, 0, 4, 0, 3), (3, 4, 8, 0, 3), (0, 0, 4, 3, 6), (1, 4, 8, 3, 6)],
        ),
    ],
)
def test_shards_lie_where_the_words_say(cut, name, expected):
    found, lying = shards(cut)
    assert found == name and sorted(lying) == sorted(expected)


def test_a_copy_on_every_rank_is_a_parameter_where_that_is_asked_for():
    def made(cut):
        plan = construct_module_sharding_plan(BAGS, {"t": cut}, local_size=2, world_size=2)
        return plan["t"].as_parameter

    assert made(data_parallel(compute_kernel="dense")) and not made(data_parallel())
    copies = [Shard(rank, range(8), range(6)) for rank in range(2)]
    spec = SimpleNamespace(shards=copies)
    assert ParameterSharding("data_parallel", "dense", [0, 1], spec).as_parameter
    with pytest.raises(PlanError, match="data_parallel: compute_kernel=fused: must be dense"):
        data_parallel(compute_kernel="fused")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shards(table_wise(rank=4)), "a shard lies on rank 4, but there are 4 ranks"),
        (lambda: shards(table_row_wise(host_index=2)), "host 2 does not exist"),
        (lambda: shards(column_wise(size_per_rank=[1, 2])), r"strips of \[1, 2\] columns are not"),
        (column_wise, "give either ranks or size_per_rank"),
        (lambda: construct_module_sharding_plan(BAGS, {}), "has no entry for table t"),
        (
            lambda: construct_module_sharding_plan(BAGS, {"t": row_wise(), "u": row_wise()}),
            "names table u; the collection has t",
        ),
    ],
)
def test_mistakes_are_said(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_a_plan_of_several_collections_keeps_their_paths():
    one = construct_module_sharding_plan(BAGS, apply_to_all(BAGS, row_wise()), world_size=2)
    other = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name="u", num_embeddings=3, embedding_dim=2, feature_names=["f"])
        ],
        device=torch.device("meta"),
    )
    two = construct_module_sharding_plan(other, {"u": table_wise(rank=1)}, world_size=2)
    plan = ShardingPlan(plan={"first": one, "inner.second": two})
    assert plan.world_size == 2 and list(plan.tables) == ["t", "u"]
    assert plan.plan == {"first": dict(one), "inner.second": dict(two)}
    assert str(plan).splitlines() == [
        "plan custom for 2 ranks",
        "table  sharding type  mode    ranks  shards",
        "t      row_wise       unique  0, 1   2",
        "u      table_wise     unique  1      1",
    ]
    with pytest.raises(PlanError, match="two tables are called t"):
        ShardingPlan({"a": one, "b": one})
    alone = construct_module_sharding_plan(other, {"u": table_wise(rank=0)}, world_size=1)
    with pytest.raises(PlanError, match=r"for \[1, 2\] ranks"):
        ShardingPlan({"a": one, "b": alone})
