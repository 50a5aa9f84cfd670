"""Rectangles that tile a table, and every way in which they can fail to."""

import json
import random

import pytest
from parity.cases import KINDS, random_tiling, sharding

from recapp.errors import PlanError
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.positions import ROW_ORDERS

TABLE = EmbeddingBagConfig(name="t", num_embeddings=6, embedding_dim=4, feature_names=["f"])


def shard(rank, r0, r1, c0, c1):
    return Shard(rank, range(r0, r1), range(c0, c1))


def test_cells_are_the_tiling_cut_along_every_edge_by_column_then_row():
    """The drawing of the module's docstring: the lower strip has no column edge, yet its cell is
    cut where the upper ones are.
    """
    sharding = TableSharding((shard(0, 0, 3, 0, 2), shard(1, 0, 3, 2, 4), shard(1, 3, 6, 0, 4)))
    assert sharding.cells(TABLE, 2) == [
        shard(0, 0, 3, 0, 2),
        shard(1, 3, 6, 0, 2),
        shard(1, 0, 3, 2, 4),
        shard(1, 3, 6, 2, 4),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_cells_of_any_tiling_hold_every_element_once_on_the_rank_that_held_it(seed):
    rng = random.Random(seed)
    sharding = random_tiling(TABLE, 3, rng)
    owner = {(r, c): s.rank for s in sharding.shards for r in s.rows for c in s.cols}
    cells = sharding.cells(TABLE, 3)
    assert sum(len(s.rows) * len(s.cols) for s in cells) == 24
    assert {(r, c): s.rank for s in cells for r in s.rows for c in s.cols} == owner
    rows_of_strip = {}
    for s in cells:
        rows_of_strip.setdefault(s.cols, []).append(s.rows)
    assert len({tuple(rows) for rows in rows_of_strip.values()}) == 1


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (
            [shard(0, 0, 3, 0, 4)],
            (
                "the cell that starts at row 3, column 0 is held 0 times; a plan must tile a table "
                "exactly once"
            ),
        ),
        ([shard(0, 0, 6, 0, 2), shard(1, 0, 5, 2, 4)], "row 5, column 2 is held 0 times"),
        ([shard(0, 0, 6, 0, 3), shard(1, 0, 6, 2, 4)], "row 0, column 2 is held 2 times"),
        ([shard(0, 0, 6, 0, 4), shard(1, 0, 6, 0, 4)], "row 0, column 0 is held 2 times"),
        ([shard(0, 0, 7, 0, 4)], "a shard reaches outside its 6 rows x 4 columns"),
        ([shard(0, 0, 6, 0, 5)], "a shard reaches outside its 6 rows x 4 columns"),
        ([shard(0, -1, 6, 0, 4)], "a shard reaches outside its 6 rows x 4 columns"),
        (
            [shard(2, 0, 6, 0, 4)],
            (
                r"a shard lies on rank 2, but there are 2 ranks \(0..1\): set trainer.devices=3 "
                r"or change "
                r"the plan"
            ),
        ),
        ([shard(-1, 0, 6, 0, 4)], "a shard lies on rank -1"),
        ([], "row 0, column 0 is held 0 times"),
    ],
)
def test_shards_that_do_not_tile_are_refused_with_the_cell(shards, message):
    with pytest.raises(PlanError, match=f"table t: .*{message}"):
        TableSharding(tuple(shards)).cells(TABLE, 2)


def test_a_replicated_table_must_be_whole_on_every_rank():
    whole = [shard(k, 0, 6, 0, 4) for k in range(2)]
    assert TableSharding(tuple(whole), "replicated").cells(TABLE, 2) == whole
    with pytest.raises(PlanError, match="row 0, column 0 is held 0 times on rank 1"):
        TableSharding((whole[0],), "replicated").cells(TABLE, 2)
    with pytest.raises(PlanError, match="row 0, column 0 is held 2 times on rank 0"):
        TableSharding((whole[0], *whole), "replicated").cells(TABLE, 2)


def test_an_empty_shard_holds_nothing():
    sharding = TableSharding((shard(0, 0, 6, 0, 4), shard(7, 3, 3, 0, 4)))
    assert sharding.ranks == [0] and len(sharding.cells(TABLE, 1)) == 1


def test_an_unknown_mode_is_refused():
    with pytest.raises(PlanError, match="mode=pool: did you mean pooled"):
        TableSharding((), "pool")


def test_an_unknown_order_of_rows_is_refused():
    with pytest.raises(PlanError, match="row_order=mixd: did you mean mixed"):
        TableSharding((), row_order="mixd")


def test_a_plan_of_rows_by_number_says_nothing_of_their_order():
    held = {order: TableSharding((shard(0, 0, 6, 0, 4),), row_order=order) for order in ROW_ORDERS}
    plain = {order: ShardingPlan({"t": s}, 1).to_dict() for order, s in held.items()}
    assert "row_order" not in plain["natural"]["tables"]["t"]
    assert plain["mixed"]["tables"]["t"]["row_order"] == "mixed"
    assert ShardingPlan.from_dict(plain["mixed"]).tables["t"] == held["mixed"]
    assert "custom, mixed rows" in str(ShardingPlan({"t": held["mixed"]}, 1))


def test_a_plan_names_exactly_the_models_tables():
    whole = TableSharding((shard(0, 0, 6, 0, 4),))
    ShardingPlan({"t": whole}, 1).check([TABLE])
    with pytest.raises(
        PlanError, match="the plan shards table tt, which the model does not have; did you mean t"
    ):
        ShardingPlan({"t": whole, "tt": whole}, 1).check([TABLE])
    with pytest.raises(PlanError, match="the plan has no entry for table t"):
        ShardingPlan({}, 1).check([TABLE])


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_survives_plain_types(kind):
    plan = ShardingPlan({"t": sharding(kind, TABLE, 4, random.Random(1), "pooled")}, 4, kind)
    assert ShardingPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_part_of_a_plan_is_a_plan_of_those_tables():
    plan = ShardingPlan({"a": TableSharding(()), "b": TableSharding((), "pooled")}, 2, "p")
    assert plan.part(["b"]) == ShardingPlan({"b": plan.tables["b"]}, 2, "p")
