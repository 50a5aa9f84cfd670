"""A table is priced by the lookups that read it, not by the features that it declares."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recapp.optim.rules import rowwise_adagrad
from recapp.planner.choose_modes import decide_modes, exchanged_bytes
from recapp.planner.embedding_planner import EmbeddingShardingPlanner, plan_tables
from recapp.planner.plan_rules import table_facts
from recapp.planner.planner_settings import ParameterConstraints
from recapp.planner.pricing import buffer_bytes, plan_cost
from recapp.planner.problem import PlanningProblem, Topology
from recapp.reporting.plan_report import explained
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig, PoolingType, TableLookup, lookups_of
from recapp.tables.positions import DynamicRows
from recapp.tables.statistics import default_statistics, measured_statistics

ONE = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"])
SUM_AND_MEAN = (
    TableLookup(ONE, "f", "f sum", PoolingType.SUM),
    TableLookup(ONE, "f", "f mean", PoolingType.MEAN),
)
TWO = replace(ONE, feature_names=["f", "g"])
SETTINGS = {"topology": Topology(2), "batch_per_rank": 64, "rule": rowwise_adagrad()}
RANKS = CandidateRanks([0, 1], [[0, 1]])


def plan_of(table, kind, mode="unique"):
    return ShardingPlan({table.name: tile(table, kind, RANKS, mode, column_width=4)}, 2)


def test_without_lookups_a_problem_has_those_that_its_tables_declare():
    problem = PlanningProblem([TWO], **SETTINGS)
    assert problem.lookups == lookups_of([TWO]) and problem.lookups_per_table == {"t": 2}
    assert replace(problem, batch_per_rank=1).lookups == problem.lookups
    assert PlanningProblem([], Topology(1)).lookups == ()


@pytest.mark.parametrize("mode", ["unique", "pooled"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_two_lookups_of_one_feature_cost_what_two_features_cost(kind, mode):
    found, expected, once = (
        PlanningProblem([table], lookups=lookups, **SETTINGS)
        for table, lookups in ((ONE, SUM_AND_MEAN), (TWO, ()), (ONE, ()))
    )
    cost, two, one = (
        plan_cost(plan_of(p.tables[0], kind, mode), p) for p in (found, expected, once)
    )
    np.testing.assert_array_equal(cost.seconds_PW, two.seconds_PW)
    np.testing.assert_array_equal(cost.bytes_WW, two.bytes_WW)
    np.testing.assert_array_equal(
        buffer_bytes(plan_of(ONE, kind, mode), found),
        buffer_bytes(plan_of(TWO, kind, mode), expected),
    )
    assert cost.step_seconds > one.step_seconds


def test_measured_ids_leave_the_vectors_to_the_lookups():
    """Statistics say how many ids there are; how many vectors of 4 * 8 bytes a sample is given
    follows from the lookups."""
    known = {"t": default_statistics(TWO)}
    two, one = (
        PlanningProblem([ONE], statistics=known, lookups=lookups, **SETTINGS)
        for lookups in (SUM_AND_MEAN, ())
    )
    plan = plan_of(ONE, "table_wise")
    difference = plan_cost(plan, two).seconds_PW - plan_cost(plan, one).seconds_PW
    combine = two.hardware.kernels["combine"]
    expected = np.zeros_like(difference)
    expected[1] = 64 * 4 * 8 / (combine.gb_per_s * 1e9)
    np.testing.assert_allclose(difference, expected, rtol=1e-6, atol=1e-15)
    # a bag's offset in the output is an integer of 4 bytes
    assert buffer_bytes(plan, two) - buffer_bytes(plan, one) == pytest.approx(4 * 64)


def test_facts_of_a_table_count_its_lookups():
    (found,) = table_facts([ONE], Topology(2), batch_per_rank=25, lookups=SUM_AND_MEAN)
    (declared,) = table_facts([ONE], Topology(2), batch_per_rank=25)
    assert (found.lookups_per_row, declared.lookups_per_row) == (1.0, 0.5)


def test_constraints_on_pooling_count_the_lookups():
    problem = PlanningProblem([ONE], lookups=SUM_AND_MEAN, **SETTINGS)
    long = {"t": ParameterConstraints(pooling_factors=[3.0])}
    assert plan_tables(problem, long).problem.statistics_of(ONE).ids_per_sample == 6.0
    assert plan_tables(problem).problem.statistics_of(ONE).ids_per_sample == 2.0


def test_a_planner_takes_the_lookups_of_the_model(monkeypatch):
    model = torch.nn.Module()
    model.tables = EmbeddingBagCollection(
        tables=[ONE], device=torch.device("meta"), lookups=SUM_AND_MEAN
    )
    asked = []
    monkeypatch.setattr(
        "recapp.planner.embedding_planner.plan_tables",
        lambda problem, constraints: (asked.append(problem), plan_tables(problem))[1],
    )
    EmbeddingShardingPlanner(Topology(2)).plan(model)
    assert asked[0].lookups == SUM_AND_MEAN


def test_ids_are_measured_and_modes_decided_by_the_lookups():
    """Three bags of 2, 0 and 1 ids, each read twice; all rows lie on one rank."""
    batch = KeyedJaggedTensor(["f"], [1, 1, 7], None, [2, 0, 1])
    measured = measured_statistics([ONE], [batch], SUM_AND_MEAN)["t"]
    assert (measured.ids_per_sample, measured.bags_per_sample) == (2.0, 4 / 3)
    vector = 2 * 4 * 8
    plan = plan_of(ONE, "table_wise", "auto")
    assert exchanged_bytes([ONE], plan, batch, SUM_AND_MEAN)["t"] == {
        "unique": 2 * (vector + 4),
        "pooled": 4 * (vector + 4) + 6 * 4,
    }
    assert exchanged_bytes([ONE], plan, batch)["t"]["pooled"] == 2 * (vector + 4) + 3 * 4
    assert decide_modes([ONE], plan, [batch], SUM_AND_MEAN).tables["t"].mode == "unique"


def test_a_dynamic_table_has_the_bytes_of_its_expected_rows_whatever_ids_were_measured():
    grows = replace(ONE, num_embeddings="dynamic", dynamic=DynamicRows(max_rows=640))
    measured = replace(default_statistics(grows), rows=64_000)
    problem = PlanningProblem([grows], statistics={"t": measured}, **SETTINGS)
    report = explained(plan_of(grows, "row_wise"), problem, alternatives=False)
    assert [row.bytes for row in report.rows] == [sum(rank.bytes for rank in report.ranks)]
