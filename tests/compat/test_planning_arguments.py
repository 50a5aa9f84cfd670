"""TorchRec's arguments of planner, topology and constraints mean what recapp's records then say."""

import pytest
import torch
from torch import nn

from recapp.compat.torchrec.planning import (
    EmbeddingShardingPlanner,
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    ParameterConstraints,
    Topology,
)
from recapp.console import note_once
from recapp.errors import ConfigError, PlanError
from recapp.planner import embedding_planner, problem
from recapp.planner.problem import Dense
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig


def model(rows=1000, dense=10):
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=16, feature_names=[n])
        for n in ("a", "b")
    ]
    return nn.ModuleDict(
        {
            "bags": EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            "dense": nn.Linear(dense, 1, bias=False),
        }
    )


def test_a_topology_has_hosts_of_so_many_ranks_and_a_cap_of_its_device():
    made = Topology(8, "cuda", hbm_cap=100, ddr_cap=7, local_world_size=4)
    assert made == problem.Topology(
        8, compute_device="cuda", memory_bytes=[100] * 8, local_world_size=4
    )
    assert Topology(2, "cpu", hbm_cap=100, ddr_cap=7).memory_bytes == [7, 7]
    assert Topology(2, "cpu").memory_bytes is None


def test_a_kernel_is_a_choice_of_sharding_types():
    assert ParameterConstraints(compute_kernels=["dense"]).sharding_types == ["data_parallel"]
    fused = ParameterConstraints(compute_kernels=["fused"]).sharding_types
    assert "row_wise" in fused and "data_parallel" not in fused
    both = ParameterConstraints(["row_wise", "data_parallel"], ["fused", "dense"])
    assert both.sharding_types == ["row_wise", "data_parallel"]
    assert ParameterConstraints(min_partition=32, ranks=[1]).ranks == [1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(2, "cpu", hbm_mem_bw=1.0), "hbm_mem_bw would have no"),
        (
            lambda: ParameterConstraints(compute_kernels=["fused_uvm"]),
            "compute_kernels has fused_u",
        ),
        (lambda: ParameterConstraints(["row_wise"], ["dense"]), "no sharding type of"),
        (lambda: ParameterConstraints(enforce_hbm=True), "enforce_hbm would have no effect here"),
        (lambda: EmbeddingShardingPlanner(proposer=object()), "proposer would have no effect"),
        (lambda: EmbeddingShardingPlanner(timeout_seconds=3), "timeout_seconds would have no eff"),
        (lambda: FixedPercentageStorageReservation(15), "percentage=15: must be 0 to 1"),
    ],
)
def test_what_would_have_no_effect_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_constraints_hold_in_the_plan_and_modules_have_their_paths(capsys):
    planner = EmbeddingShardingPlanner(
        Topology(2, "cpu"),
        constraints={
            "a": ParameterConstraints(["row_wise"]),
            "b": ParameterConstraints(compute_kernels=["dense"]),
        },
        debug=True,
    )
    assert isinstance(planner, embedding_planner.EmbeddingShardingPlanner)
    plan = planner.plan(model())
    assert capsys.readouterr().err == f"{plan}\n"
    assert list(plan.plan) == ["bags"] and list(plan.plan["bags"]) == ["a", "b"]
    a, b = plan.plan["bags"].values()
    assert (a.sharding_type, a.compute_kernel, a.ranks) == ("row_wise", "fused", [0, 1])
    assert (b.sharding_type, b.compute_kernel) == ("data_parallel", "dense")
    assert b.as_parameter and not a.as_parameter
    allowed = ParameterConstraints(["data_parallel"], ["dense", "fused"])
    assert not allowed.as_parameter, "replicated, and updated in backward"
    first = a.sharding_spec.shards[0]
    assert (first.shard_offsets, first.shard_sizes) == ([0, 0], [500, 16])
    assert first.placement == "rank:0"


def test_what_is_reserved_is_not_given_to_tables():
    need = 2 * 1000 * (16 * 4 + 4)  # weights and row-wise Adagrad
    fits = Topology(1, "cpu", ddr_cap=need + 2000)
    EmbeddingShardingPlanner(fits).plan(model())
    small = HeuristicalStorageReservation(0.0, dense_tensor_estimate=1000)
    EmbeddingShardingPlanner(fits, storage_reservation=small).plan(model())
    for reservation in (
        FixedPercentageStorageReservation(0.1),
        HeuristicalStorageReservation(0.0),  # six times 100 numbers of 4 bytes
        HeuristicalStorageReservation(0.0, dense_tensor_estimate=3000),
    ):
        planner = EmbeddingShardingPlanner(fits, storage_reservation=reservation)
        with pytest.raises(PlanError, match="does not fit: rank 0 lacks"):
            planner.plan(model(dense=100))
        assert planner.topology is fits


def test_a_reservation_of_unknown_memory_says_that_it_does_nothing(capsys):
    note_once.cache_clear()
    reservation = FixedPercentageStorageReservation(0.5)
    EmbeddingShardingPlanner(Topology(1, "cpu"), storage_reservation=reservation).plan(model())
    assert (
        "nothing is reserved, because the topology has no memory limit" in capsys.readouterr().err
    )


def test_a_reservation_is_a_number_of_bytes_of_a_topology():
    whole = Topology(1, "cpu", ddr_cap=10_000)
    reservation = HeuristicalStorageReservation(percentage=0.1, parameter_multiplier=2)
    made = reservation.reserved(whole, Dense(bytes=100))
    assert made.reserve_bytes == 1000 + 2 * 100 and whole.reserve_bytes == 0
    absolute = FixedAbsoluteStorageReservation.from_gb(5 / 1024**3)
    assert absolute.reserved(whole, Dense(bytes=100)).reserve_bytes == 5
    assert FixedAbsoluteStorageReservation(7).reserved(whole, Dense(bytes=9)).reserve_bytes == 7
    with pytest.raises(ConfigError, match="hbm_reserved_bytes=-1: must be at least 0"):
        FixedAbsoluteStorageReservation(-1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "from recapp.distributed.planner.enumerators import EmbeddingEnumerator",
            "planner.enumerators.EmbeddingEnumerator: recapp's planner is one search",
        ),
        (
            "from recapp.distributed.planner.shard_estimators import EmbeddingPerfEstimator",
            "what a plan costs is measured and shown by",
        ),
    ],
)
def test_parts_of_its_planner_are_refused_with_what_to_do_instead(line, said):
    with pytest.raises(ImportError, match=said):
        exec(line)
