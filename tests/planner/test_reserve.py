"""The memory that tables leave free: fixed on a CPU, of the problem on a GPU."""

from dataclasses import replace

import pytest
from torch import nn

from recapp.errors import PlanError
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import Machines, PlanRule
from recapp.planner.pricing import RUNTIME_BYTES, reserve_of, with_reserve
from recapp.planner.problem import (
    RESERVE_BYTES,
    Dense,
    PlanningProblem,
    Topology,
    dense_of,
    topology_of,
)
from recapp.planner.rank_memory import check_memory
from recapp.reporting.plan_report import explained
from recapp.tables.config import EmbeddingBagConfig

TABLES = [
    EmbeddingBagConfig(name=f"t{k}", num_embeddings=1000, embedding_dim=16, feature_names=[f"f{k}"])
    for k in range(3)
]
DENSE = Dense(flops=1e6, bytes=4000.0, vector_bytes=192.0, activation_bytes=70.0)


def problem(device="cuda", ranks=2, **changes):
    return PlanningProblem(
        TABLES,
        Topology(ranks, compute_device=device),
        **{"batch_per_rank": 100, "dense": DENSE} | changes,
    )


def test_on_a_cpu_it_is_fixed():
    assert reserve_of(problem("cpu", batch_per_rank=10**6)) == {"fixed": 128 << 20}


def test_on_a_gpu_it_counts_what_a_step_needs():
    found = reserve_of(problem())
    messages = found.pop("messages")
    assert messages > 0
    assert found == {
        "outputs": 2 * 100 * 3 * 16 * 4,
        "batches": 2 * 100 * 3 * 8,  # that of the step, and one ahead
        "activations": 100 * 70,
        "dense part": 5 * 4000,
        "runtime": RUNTIME_BYTES,
    }


def test_it_grows_with_the_batch_and_a_validation_batch_may_be_the_largest():
    small, large = reserve_of(problem()), reserve_of(problem(batch_per_rank=1000))
    for name in ("messages", "outputs", "batches", "activations"):
        assert large[name] > 5 * small[name]
    validated = reserve_of(problem(val_batch_per_rank=1000))
    assert validated["outputs"] == large["outputs"]
    assert reserve_of(problem(ranks=1))["messages"] == 0, "one rank has no messages"


def test_activations_are_inputs_outputs_and_gradients_of_layers():
    found = dense_of(nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 1)))
    assert found.activation_bytes == 4 * (13 + 2 * 64 + 64 + 2 * 1)


def test_a_plan_says_what_is_left_free_and_is_refused_where_nothing_is_left_to_tables():
    made = with_reserve(problem())
    assert made.topology.reserve_bytes == sum(made.reserve.values()) > RUNTIME_BYTES
    plan = plan_by_rules(TABLES, made.topology, [PlanRule("row_wise")], name="rows")
    assert explained(plan, made, alternatives=False).reserve == made.reserve
    by_hand = replace(problem("cpu"), topology=Topology(2, reserve_bytes=5))
    assert explained(plan, by_hand, alternatives=False).reserve == {"set": 5}
    small = replace(made.topology, memory_bytes=[30_000_000] * 2)
    with pytest.raises(PlanError) as refused:
        check_memory(TABLES, plan, None, small)
    text = str(refused.value)
    assert f"topology.reserve_bytes={small.reserve_bytes} (1.5 GB)" in text
    assert "topology.memory_bytes=30000000 (30.0 MB)" in text and "dataset.batch_size" in text


def test_null_in_the_settings_of_a_machine_is_the_fixed_amount():
    assert topology_of(Machines(), 2).reserve_bytes == RESERVE_BYTES
    assert topology_of(Machines(reserve_bytes=0), 2).reserve_bytes == 0
