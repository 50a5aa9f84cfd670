"""Prices, by hand: one table under every sharding type on a machine whose every item costs 1 ns and
every byte 1 ns.

The table has 100 rows of 4 columns; a rank's batch has 10 samples of one id, 8 of them distinct; 12
rows are touched by two ranks together, 20 by four. A vector has 16 bytes, an id 4. A message takes
10 µs within a host and 20 µs and 2 ns a byte between hosts.
"""

import math
from dataclasses import replace

import pytest
import torch

from recapp.models.published_dlrm import DLRM
from recapp.optim.rules import adam, lamb, rowwise_adagrad, sgd
from recapp.planner.cost import HEADER_BYTES, PHASES, cost_of
from recapp.planner.hardware import Hardware, Link, Work
from recapp.planner.pricing import plan_cost, work_of
from recapp.planner.problem import Dense, PlanningProblem, Topology, dense_of
from recapp.planner.rank_memory import bytes_per_rank
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.statistics import TableStatistics

KERNELS = {name: Work(0, 1) for name in ("route", "link", "serve", "group")}
KERNELS |= {name: Work(0, 1, 1.0) for name in ("answer", "combine", "spread", "update")}
LINKS = {"host": Link({2: 10}, {2: 1.0}), "network": Link({2: 20}, {2: 0.5})}
MACHINE = Hardware("toy", "by hand", "cpu", 2, None, KERNELS, LINKS, LINKS, 1e9, 0.5, 0)
TABLE = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["f"])
KNOWN = TableStatistics(100, 1.0, 1.0, ((1.0, 1.0), (10.0, 8.0), (20.0, 12.0), (40.0, 20.0)))
# route + link; combine; spread
HOME = {"input": 10 + 10, "lookup": 10 + (10 + 10) * 16, "gradients": 10 + (10 + 8) * 16}
TWO_STRIPS = {"input": 2 * 20, "lookup": 2 * (10 + 20 * 8), "gradients": 2 * (10 + 18 * 8)}
COUNTS = 10_000 + HEADER_BYTES
FAR_COUNTS = 20_000 + 2 * 2 * HEADER_BYTES


def price(kind, world=2, hosts=1, mode="unique", rule=None, **more):
    """Nanoseconds of each phase of the slowest rank."""
    problem = PlanningProblem(
        [TABLE], Topology(world, hosts, hardware=MACHINE), 10, rule or sgd(), {"t": KNOWN}, **more
    )
    ranks = list(range(world)) if kind != "table_row_wise" else [2, 3, 0, 1]
    candidates = CandidateRanks(
        ranks, sorted(problem.topology.host_ranks(), key=lambda h: ranks.index(h[0]))
    )
    sharding = tile(TABLE, kind, candidates, mode, column_width=2)
    cost = plan_cost(ShardingPlan({"t": sharding}, world), problem)
    return {
        phase: seconds.max() * 1e9 for phase, seconds in zip(PHASES, cost.seconds_PW, strict=True)
    }, cost


EXPECTED = {
    "table_wise": {  # the owner serves 16 rows
        "input": HOME["input"] + 16 + COUNTS + 10_000 + 8 * 4,
        "lookup": HOME["lookup"] + 16 + 2 * (8 + 8) * 16,
        "output": 10_000 + 8 * 16,
        "dense": 0,
        "gradients": HOME["gradients"] + 16 + 10_000 + 8 * 16,
        "update": 12 + 16 * 16 + 2 * 12 * 16,
    },
    "row_wise": {  # each owner serves half of that
        "input": HOME["input"] + 8 + COUNTS + 10_000 + 4 * 4,
        "lookup": HOME["lookup"] + 8 + 2 * (4 + 4) * 16,
        "output": 10_000 + 4 * 16,
        "dense": 0,
        "gradients": HOME["gradients"] + 8 + 10_000 + 4 * 16,
        "update": 6 + 8 * 16 + 2 * 6 * 16,
    },
    "column_wise": {  # each strip is asked for all ids, its vectors have 8 bytes
        "input": TWO_STRIPS["input"] + 16 + COUNTS + 10_000 + 8 * 4,
        "lookup": TWO_STRIPS["lookup"] + 16 + 2 * (8 + 8) * 8,
        "output": 10_000 + 8 * 8,
        "dense": 0,
        "gradients": TWO_STRIPS["gradients"] + 16 + 10_000 + 8 * 8,
        "update": 12 + 16 * 8 + 2 * 12 * 8,
    },
    "data_parallel": {  # nobody answers; ids and gradients go to everybody
        "input": HOME["input"] + 16 + COUNTS + 10_000 + 8 * 4,
        "lookup": HOME["lookup"],
        "output": 10_000,
        "dense": 0,
        "gradients": HOME["gradients"] + 16 + 10_000 + 8 * 16,
        "update": 12 + 16 * 16 + 2 * 12 * 16,
    },
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_type_costs_what_it_costs_by_hand(kind):
    assert price(kind)[0] == pytest.approx(EXPECTED[kind], rel=1e-9)


def test_strips_of_rows_on_one_of_two_hosts_by_hand():
    """Ranks 2 and 3 own 50 rows each; host 0 asks for 2 x 8 x 4 bytes of ids through the network,
    each byte of which costs 2 ns.
    """
    assert price("table_row_wise", 4, 2)[0] == pytest.approx(
        {
            "input": HOME["input"] + 16 + FAR_COUNTS + 20_000 + 2 * 2 * 4 * 4,
            "lookup": HOME["lookup"] + 16 + 4 * (4 + 4) * 16,
            "output": 20_000 + 2 * 2 * 4 * 16,
            "dense": 0,
            "gradients": HOME["gradients"] + 16 + 20_000 + 2 * 2 * 4 * 16,
            "update": 10 + 16 * 16 + 2 * 10 * 16,
        },
        rel=1e-9,
    )


def test_a_grid_over_two_hosts_by_hand():
    """A strip on each host, its rows over two ranks: a rank owns 50 rows of 2 columns and two ranks
    of the other host ask it.
    """
    assert price("grid_shard", 4, 2)[0] == pytest.approx(
        {
            "input": TWO_STRIPS["input"] + 16 + FAR_COUNTS + 20_000 + 2 * 2 * 4 * 4,
            "lookup": TWO_STRIPS["lookup"] + 16 + 4 * (4 + 4) * 8,
            "output": 20_000 + 2 * 2 * 4 * 8,
            "dense": 0,
            "gradients": TWO_STRIPS["gradients"] + 16 + 20_000 + 2 * 2 * 4 * 8,
            "update": 10 + 16 * 8 + 2 * 10 * 8,
        },
        rel=1e-9,
    )


def test_pooled_bags_send_ids_and_lengths_there_and_a_vector_a_bag_back():
    found = price("table_wise", mode="pooled")[0]
    assert found == pytest.approx(
        {
            "input": HOME["input"] + 20 + COUNTS + 10_000 + 10 * 4 + 10 * 4,
            "lookup": HOME["lookup"] + 20 + 2 * (10 + 10) * 16,
            "output": 10_000 + 10 * 16,
            "dense": 0,
            "gradients": 10 + (10 + 10) * 16 + 20 + 10_000 + 10 * 16,
            "update": 12 + 20 * 16 + 2 * 12 * 16,
        },
        rel=1e-9,
    )


def test_an_open_mode_is_priced_as_the_one_that_sends_less():
    problem = PlanningProblem([TABLE], Topology(2, hardware=MACHINE), 10, sgd(), {"t": KNOWN})
    ranks = CandidateRanks([0, 1], [[0, 1]])
    whole = {
        mode: work_of(TABLE, tile(TABLE, "table_wise", ranks, mode), problem)
        for mode in ("auto", "unique", "pooled")
    }
    assert (
        whole["unique"].asked_3M.sum() < whole["pooled"].asked_3M.sum()
        and whole["auto"].kinds == whole["unique"].kinds
    )


def test_one_rank_asks_nobody():
    found, cost = price("table_wise", world=1)
    assert (found["output"], found["gradients"]) == (0, 0) and cost.sent_bytes == 0
    assert found["update"] == pytest.approx(8 + 10 * 16 + 2 * 8 * 16)


def test_who_sends_what_to_whom():
    """Rank 0 owns: rank 1 names 8 rows and returns 8 gradients, rank 0 answers with 8 vectors."""
    _, cost = price("table_wise")
    assert cost.bytes_WW.round(9).tolist() == [
        [0, 8 * 16 + HEADER_BYTES],
        [8 * 4 + 8 * 16 + HEADER_BYTES, 0],
    ]
    assert cost.sent_bytes == pytest.approx(cost.bytes_WW.sum()) and cost.bytes_W.tolist() == [
        1600,
        0,
    ]
    assert price("data_parallel")[1].bytes_WW[0, 1] == pytest.approx(8 * 4 + 8 * 16 + HEADER_BYTES)


def test_strips_that_share_a_statistic_pay_for_one_more_message_and_state_is_counted():
    with_state, cost = price("column_wise", rule=rowwise_adagrad())
    assert with_state["update"] == pytest.approx(
        12 + 16 * 8 + 2 * 12 * (8 + 4) + 10_000 + 8 * 12 / 2
    )
    assert cost.bytes_W.tolist() == [100 * 2 * 4 + 100 * 4] * 2


@pytest.mark.parametrize("rule", [sgd(), rowwise_adagrad(), lamb(), adam(l2_all_rows=0.1)])
@pytest.mark.parametrize("every", [None, 10])
@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_the_bytes_of_a_price_are_those_that_ranks_count(kind, rule, every):
    problem = PlanningProblem(
        [TABLE], Topology(2, hardware=MACHINE), 10, rule, {"t": KNOWN}, average_every=every
    )
    cut = tile(TABLE, kind, CandidateRanks([0, 1], [[0, 1]]))
    plan = ShardingPlan({"t": cut}, 2)
    held = bytes_per_rank([TABLE], plan, rule, problem.averaged)
    assert plan_cost(plan, problem).bytes_W.tolist() == [rank.total for rank in held]


def test_an_average_is_paid_for_each_row_when_it_is_updated():
    """Each update of the average reads the weights and the average, and writes the average."""
    never = price("table_wise")[0]["update"]
    at_epochs = price("table_wise", average_every=math.inf)[0]["update"]
    often = price("table_wise", average_every=10)[0]["update"]
    assert never == at_epochs and often - never == pytest.approx(3 * 100 * 16 / 10)


def test_steps_of_rows_are_read_and_written_with_the_touched_rows():
    found = [price("table_wise", rule=rule)[0]["update"] for rule in (sgd(), sgd(l2_all_rows=0.1))]
    assert found[1] - found[0] == pytest.approx(2 * 12 * 4)


def test_half_a_payload_halves_what_travels_but_not_the_ids():
    whole, half = (price("table_wise", payload_bytes=n)[0] for n in (4, 2))
    assert (
        whole["output"] - half["output"] == pytest.approx(8 * 8) and whole["input"] == half["input"]
    )


def test_the_dense_part_is_its_products_and_what_of_its_sum_is_not_hidden():
    found = price("table_wise", dense=Dense(2e5, 1000.0, 40.0))[0]["dense"]
    # pooled vectors go by three times
    assert found == pytest.approx(2e6 + 3 * 400 + (10_000 + 1000) * 0.5)
    serving = cost_of(
        [],
        PlanningProblem(
            [TABLE], Topology(1, hardware=MACHINE), 10, None, dense=Dense(2e5, 0.0, 40.0)
        ),
    )
    assert serving.step_seconds * 1e9 == pytest.approx(2e6 / 3 + 400)  # forward alone

    kept = 3 + 2 * 5  # input, output, the output's gradient
    assert dense_of(torch.nn.Linear(3, 5)) == Dense(6.0 * 20, 80.0, 0.0, 4.0 * kept)


def test_a_dlrm_multiplies_all_pairs_of_vectors_beside_its_weights():
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=9, embedding_dim=4, feature_names=[f"t{i}"])
        for i in range(2)
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables, device=torch.device("meta")), 3, [4], [1])
    weights = (3 + 1) * 4 + (4 + 3 + 1) * 1  # three vectors make three pairs
    kept = (3 + 2 * 4) + (4 + 3 + 2 * 1)
    flops = 6.0 * weights + 4.0 * 3 * 3 * 4
    assert dense_of(model) == Dense(flops, 4.0 * weights, 4.0 * 2 * 4, 4.0 * kept)


def test_a_step_takes_what_its_python_takes_in_training_only():
    slow = replace(MACHINE, step_overhead_us=3000.0)
    steps = {
        (machine.step_overhead_us, rule): cost_of(
            [], PlanningProblem([TABLE], Topology(1, hardware=machine), 10, rule)
        ).step_seconds
        for machine in (MACHINE, slow)
        for rule in (sgd(), None)
    }
    (fast_training, fast_serving, slow_training, slow_serving) = steps.values()
    assert slow_training - fast_training == pytest.approx(3e-3) and slow_serving == fast_serving


def test_calls_are_paid_once_for_each_width_and_mode():
    calls = {name: replace(work, call_us=5) for name, work in KERNELS.items()}
    hardware = Hardware("toy", "x", "cpu", 2, None, calls, LINKS, LINKS, 1e9, 0.5, 0)
    ranks = CandidateRanks([0, 1], [[0, 1]])

    def step(dims):
        tables = [
            EmbeddingBagConfig(
                name=f"t{k}", num_embeddings=9, embedding_dim=d, feature_names=[f"f{k}"]
            )
            for k, d in enumerate(dims)
        ]
        problem = PlanningProblem(tables, Topology(2, hardware=hardware), 10, sgd())
        return cost_of(
            [work_of(t, tile(t, "table_wise", ranks), problem) for t in tables], problem
        ).step_seconds

    same = step([4, 4])
    different = step([4, 3])
    assert different - same == pytest.approx(8 * 5e-6, rel=0.01)
