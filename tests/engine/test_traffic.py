"""Collectives and bytes of a step, counted: what a plan costs does not grow with the number of its
types, widths or tables.
"""

import pytest
import torch
from engine.engine_cases import KINDS, batch_of, make_plan, make_tables

from recapp.engine.sharded_collection import shard_bags
from recapp.optim.rules import rowwise_adagrad, sgd
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import PlanRule
from recapp.planner.problem import Topology
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig
from recapp.transport.step_messages import HEADER

SAMPLE = [
    EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"{name}_ids"]
    )
    for name, rows, dim in (
        ("large_table", 1000, 128),
        ("wide_table", 100, 256),
        ("small_table", 10, 32),
    )
]
SAMPLE_RULES = [
    PlanRule("row_wise", rows_above=100, dim_below=256),
    PlanRule("column_wise", dim_at_least=256),
    PlanRule("table_wise"),
]


def step_of(comm, tables, plan, rule, batch):
    """Collectives of a forward and of a whole step, and the bytes that this rank sent."""
    collection = shard_bags(tables, plan, comm, rule)
    calls = comm.calls
    sent = comm.bytes_sent
    values = collection(batch).values()
    forward = comm.calls - calls
    values.sum().backward()
    return forward, comm.calls - calls, comm.bytes_sent - sent


def sample_step(comm, rule, mode):
    plan = plan_by_rules(SAMPLE, Topology(comm.world), SAMPLE_RULES, name="mixed", mode=mode)
    assert [s.sharding_type for s in plan.tables.values()] == [
        "row_wise",
        "column_wise",
        "table_wise",
    ]
    generator = torch.Generator().manual_seed(comm.rank)
    ids = torch.cat(
        [torch.randint(0, t.num_embeddings, (80,), generator=generator) for t in SAMPLE]
    )
    batch = KeyedJaggedTensor([f"{t.name}_ids" for t in SAMPLE], ids, None, torch.full((24,), 10))
    return step_of(comm, SAMPLE, plan, rule, batch)[:2]


@pytest.mark.parametrize("mode", ["unique", "pooled"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_sample_tables_cost_four_collectives_with_sgd_and_five_with_rowwise_adagrad(
    ranks, world, mode
):
    alone = world == 1  # one rank learns from the output's gradient itself
    assert ranks.run(sample_step, world, sgd(), mode) == [(3, 4 - alone)] * world
    assert ranks.run(sample_step, world, rowwise_adagrad(), mode) == [(3, 5 - alone)] * world


def any_step(comm, kind, rule):
    tables = make_tables()
    return step_of(
        comm, tables, make_plan(kind, tables, comm.world), rule, batch_of(tables, 4, comm.rank)
    )[:2]


def test_every_plan_costs_three_collectives_forward_and_one_back(ranks):
    for kind in KINDS:
        assert ranks.run(any_step, 2, kind, sgd()) == [(3, 4)] * 2


def evaluation(comm):
    tables = make_tables()
    collection = shard_bags(tables, make_plan("mixed", tables, comm.world), comm, sgd())
    with torch.no_grad():
        collection(batch_of(tables, 4, comm.rank))
    return comm.calls


def test_evaluation_costs_three(ranks):
    assert ranks.run(evaluation, 2) == [3, 3]


TWO = [
    EmbeddingBagConfig(name="t0", num_embeddings=50, embedding_dim=16, feature_names=["a", "b"]),
    EmbeddingBagConfig(name="t1", num_embeddings=50, embedding_dim=4, feature_names=["c"]),
]
# by feature, then rank
IDS = {"a": [[1, 1, 2], [3, 3, 3]], "b": [[2, 9, 9], [4, 5, 3]], "c": [[7, 7, 7], [8, 7, 9]]}


def counted(comm, kind, rule):
    rules = {
        "table_wise": [PlanRule("table_wise")],
        "data_parallel": [PlanRule("data_parallel")],
        "column_wise": [PlanRule("column_wise", tables=["t0"]), PlanRule("table_wise")],
    }[kind]
    plan = plan_by_rules(TWO, Topology(2), rules, name=kind, column_width=8)
    ids = [n for f in "abc" for n in IDS[f][comm.rank]]
    return plan, step_of(
        comm, TWO, plan, rule, KeyedJaggedTensor(["a", "b", "c"], ids, None, [1] * 9)
    )[2]


# distinct rows that each rank asks for
T0 = [{1, 2, 9}, {3, 4, 5}]
T1 = [{7}, {7, 8, 9}]
# bytes of an int32 row and of an fp32 number
ID = 4
NUMBER = 4


def counts_bytes(groups):
    return 8 * (HEADER + 3 * groups)


def test_table_wise_sends_each_distinct_row_once_there_and_twice_its_vector(ranks):
    (plan, sent0), (_, sent1) = ranks.run(counted, 2, "table_wise", sgd())
    assert (plan.tables["t0"].ranks, plan.tables["t1"].ranks) == ([0], [1])
    # of the other rank: rank 0 wants t1, rank 1 wants t0
    asks_t1 = len(T1[0])
    asks_t0 = len(T0[1])
    assert sent0 == counts_bytes(2) + ID * asks_t1 + NUMBER * 16 * asks_t0 + NUMBER * 4 * asks_t1
    assert sent1 == counts_bytes(2) + ID * asks_t0 + NUMBER * 4 * asks_t1 + NUMBER * 16 * asks_t0


def test_replicas_send_touched_rows_and_their_gradients_and_no_vectors_forward(ranks):
    (_, sent0), (_, sent1) = ranks.run(counted, 2, "data_parallel", rowwise_adagrad())
    for sent, t0, t1 in ((sent0, T0[0], T1[0]), (sent1, T0[1], T1[1])):
        assert sent == counts_bytes(2) + ID * (len(t0) + len(t1)) + NUMBER * (
            16 * len(t0) + 4 * len(t1)
        )


def test_strips_tell_each_other_eight_bytes_per_touched_row(ranks):
    without, with_state = (
        ranks.run(counted, 2, "column_wise", rule) for rule in (sgd(), rowwise_adagrad())
    )
    touched = len(T0[0] | T0[1])
    assert [b - a for (_, a), (_, b) in zip(without, with_state, strict=True)] == [8 * touched] * 2


def four_strips(comm, rule):
    plan = plan_by_rules(
        TWO[:1], Topology(2), [PlanRule("column_wise")], name="column_wise", column_width=4
    )
    batch = KeyedJaggedTensor(["a", "b"], IDS["a"][comm.rank] + IDS["b"][comm.rank], None, [1] * 6)
    return step_of(comm, TWO[:1], plan, rule, batch)[2]


def test_a_rank_that_holds_several_strips_hears_each_strip_once(ranks):
    extra = [
        b - a
        for a, b in zip(
            ranks.run(four_strips, 2, sgd()),
            ranks.run(four_strips, 2, rowwise_adagrad()),
            strict=True,
        )
    ]
    assert extra == [2 * 8 * len(T0[0] | T0[1])] * 2
