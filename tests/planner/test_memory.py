"""Bytes of a plan: what each rank holds is what its stores hold, and what does not fit is refused
before it is made.
"""

import random
from dataclasses import replace

import pytest
import torch
from parity.cases import KINDS, RULES, sharding

from recapp.console import size
from recapp.engine.row_store import FloatStore, StoredGroup
from recapp.errors import PlanError
from recapp.optim.rules import adam, rowwise_adagrad, sgd
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import PlanRule
from recapp.planner.problem import Topology
from recapp.planner.rank_memory import bytes_per_rank, check_memory
from recapp.sharding.layout import make_layout
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.collections import compute_dtype
from recapp.tables.config import EmbeddingBagConfig

CPU = torch.device("cpu")


def table(name, rows, dim, dtype="fp32"):
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name], data_type=dtype
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", [("fp32", "fp32", "fp16"), ("bf16", "fp64", "fp32")])
def test_counted_bytes_are_those_of_the_stores(kind, types):
    rng = random.Random(kind)
    tables = [
        table(f"t{k}", rows, dim, dtype)
        for k, (rows, dim, dtype) in enumerate(zip((20, 3, 50), (7, 4, 10), types, strict=True))
    ]
    plan = ShardingPlan({t.name: sharding(kind, t, 3, rng, "unique") for t in tables}, 3)
    layout = make_layout(tables, plan)
    for rule in RULES.values():
        held = []
        for rank in range(3):
            stores = [
                FloatStore(StoredGroup(layout, g, rank, compute_dtype(tables), CPU, None), rule)
                for g in range(len(layout.groups))
            ]
            held.append(sum(sum(s.nbytes) for s in stores))
        assert [h.total for h in bytes_per_rank(tables, plan, rule)] == held
    assert [sum(h.state.values()) for h in bytes_per_rank(tables, plan, None)] == [0, 0, 0]


TABLES = [table("big", 1_000, 100), table("small", 10, 100)]


def check(rule, free, reserve=0, kind="table_wise"):
    topology = Topology(2, memory_bytes=free, reserve_bytes=reserve)
    check_memory(
        TABLES, plan_by_rules(TABLES, topology, [PlanRule(kind)], name=kind), rule, topology
    )


def test_what_fits_to_the_byte_fits():
    check(sgd(), [400_000, 4_000])
    check(rowwise_adagrad(), [404_000, 4_040])
    check(adam(), [1_200_100, 12_100], reserve=100)


def test_what_does_not_fit_is_refused_with_the_missing_bytes_the_rank_and_the_largest_tables():
    with pytest.raises(PlanError, match="plan table_wise does not fit") as error:
        check(rowwise_adagrad(), [403_999, 4_040])
    assert str(error.value).startswith(
        "plan table_wise does not fit: rank 0 lacks 1 bytes (1 B): it would hold 404.0 kB of "
        "tables and optimiser state beside 0 B reserved, and 404.0 kB are free; largest there: big "
        "(404.0 kB). What helps: more ranks (trainer.devices), +plan=row_wise"
    )
    with pytest.raises(
        PlanError,
        match=r"rank 1 lacks 3,900 bytes .*beside 4.9 kB reserved, and 5.0 kB are free; .* small",
    ):
        check(sgd(), [500_000, 5_000], reserve=4_900)


SMALLER = "hashed tables of fewer rows (id_rule hash) or a smaller tables.data_type"


@pytest.mark.parametrize(
    ("kind", "world", "helps"),
    [
        ("table_wise", 2, f"more ranks (trainer.devices), +plan=row_wise, {SMALLER}"),
        ("data_parallel", 2, f"+plan=row_wise, {SMALLER}"),
        ("data_parallel", 1, f"more ranks (trainer.devices), +plan=row_wise, {SMALLER}"),
        ("row_wise", 2, f"more ranks (trainer.devices), {SMALLER}"),
        ("row_wise", 1, f"more ranks (trainer.devices), {SMALLER}"),
    ],
)
def test_what_helps_is_not_what_is_in_force_already(kind, world, helps):
    topology = Topology(world, memory_bytes=[0] * world)
    plan = plan_by_rules(TABLES, topology, [PlanRule(kind)], name=kind)
    with pytest.raises(PlanError) as error:
        check_memory(TABLES, plan, sgd(), topology)
    assert str(error.value).partition("What helps: ")[2] == helps


def test_hashed_tables_may_have_fewer_rows_and_half_precision_is_the_smallest():
    tables = [replace(table("big", 1_000, 100, "bf16"), id_rule="hash")]
    topology = Topology(2, memory_bytes=[0, 0])
    with pytest.raises(
        PlanError,
        match=r"What helps: more ranks \(trainer.devices\) or fewer rows \(tables.max_rows\)$",
    ):
        check_memory(
            tables,
            plan_by_rules(tables, topology, [PlanRule("row_wise")], name="row_wise"),
            sgd(),
            topology,
        )


def test_the_rank_that_lacks_most_is_named_and_the_lowest_of_equals():
    with pytest.raises(
        PlanError,
        match=r"rank 0 lacks 404,000 bytes.*largest there: big \(400.0 kB\), small \(4.0 kB\)",
    ):
        check(sgd(), [0, 0], kind="data_parallel")
    with pytest.raises(PlanError, match="rank 1 lacks 202,000 bytes"):
        check(sgd(), [10, 0], kind="row_wise")


def test_unknown_memory_refuses_nothing():
    check(adam(), None)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (308_480_000, "308.5 MB"),
        (2e9, "2.0 GB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_bytes_are_printed_in_powers_of_ten(n, text):
    assert size(n) == text


def test_what_helps_where_tables_grow_is_of_such_tables():
    grows = EmbeddingBagConfig(
        name="t", num_embeddings="dynamic", embedding_dim=8, feature_names=["t"]
    )
    plan = ShardingPlan({"t": sharding("row_wise", grows, 2, random.Random(1), "unique")}, 2)
    with pytest.raises(PlanError, match=r"fewer rows \(tables\.dynamic\.max_rows") as refused:
        check_memory([grows], plan, sgd(), Topology(2, memory_bytes=[1000, 1000]))
    assert "hashed" not in str(refused.value)


def test_a_sketch_is_counted():
    size = {"name": "t", "embedding_dim": 8, "feature_names": ["t"], "num_embeddings": "dynamic"}
    said = {"expected_rows": 1000, "seen": 2, "sketch_width": 1 << 16}
    exact = EmbeddingBagConfig(**size, dynamic=said)
    sketch = EmbeddingBagConfig(**size, dynamic={**said, "counter": "sketch"})
    more = sketch.bytes_to_find_a_row - exact.bytes_to_find_a_row
    assert 1000 * more == pytest.approx(4 * 4 * (1 << 16), rel=1e-3)
