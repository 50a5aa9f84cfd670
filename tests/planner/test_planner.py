"""Plans that are chosen: they fit, they are the best there is where all can be tried, and equal
inputs give equal plans.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recapp.errors import PlanError
from recapp.optim.rules import adam, rowwise_adagrad, sgd
from recapp.planner.cost import cost_of
from recapp.planner.embedding_planner import EmbeddingShardingPlanner, plan_tables
from recapp.planner.hardware import Hardware, Link, Work
from recapp.planner.planner_settings import ParameterConstraints
from recapp.planner.pricing import plan_cost
from recapp.planner.problem import PlanningProblem, Topology
from recapp.planner.search import SMALLEST_GAIN
from recapp.planner.search_space import Placement
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks, ShardingType
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.statistics import TableStatistics, default_statistics

KERNELS = {name: Work(20, 10, 5.0) for name in ("answer", "combine", "spread", "update")}
KERNELS |= {name: Work(20, 10) for name in ("route", "link", "serve", "group")}
LINK = Link({2: 50, 64: 100}, {2: 3.0, 64: 3.0})
NETWORK = Link({2: 100, 16: 200}, {2: 0.5, 16: 0.5})
LINKS = {"host": LINK, "network": NETWORK}
MACHINE = Hardware("toy", "by hand", "cpu", 4, None, KERNELS, LINKS, LINKS, 1e11, 0.5, 0)


def table(name, rows, dim, features=1, **more):
    read = [f"{name}_{i}" for i in range(features)]
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=read, **more
    )


def problem(tables, world, hosts=1, batch=512, rule=None, memory=None, **more):
    topology = Topology(
        world, hosts, hardware=MACHINE, memory_bytes=None if memory is None else [memory] * world
    )
    return PlanningProblem(tables, topology, batch, rule or rowwise_adagrad(), **more)


SAMPLE = [
    table("large_table", 1_000_000, 128),
    table("wide_table", 100_000, 256),
    table("small_table", 10_000, 32),
]


def random_tables(rng, count):
    return [
        table(f"t{k}", int(10 ** rng.uniform(0.5, 6)), rng.choice([8, 32, 64, 200]))
        for k in range(count)
    ]


def tried(outcome):
    """The least price of every assignment that there is, one by one."""
    placements = []
    for bundle in outcome.bundles:
        of_bundle = []
        for o, chosen in enumerate(bundle.options):
            every = (range(len(b.candidates)) for b in chosen[0].blocks)
            of_bundle += [Placement(o, candidates) for candidates in itertools.product(*every)]
        placements.append(of_bundle)
    least = float("inf")
    for assignment in itertools.product(*placements):
        works = [
            p.on_ranks(c.candidates)
            for u, c in zip(outcome.bundles, assignment, strict=True)
            for p in u.options[c.option]
        ]
        least = min(least, cost_of(works, outcome.problem).step_seconds)
    return least


def test_more_tables_than_python_calls_deep_are_planned_for_one_rank():
    outcome = plan_tables(problem([table(f"t{k}", 100, 4) for k in range(1100)], 1))
    assert len(outcome.plan.tables) == 1100


@pytest.mark.parametrize("seed", range(4))
def test_small_problems_get_the_best_plan_there_is(seed):
    rng = random.Random(seed)
    outcome = plan_tables(problem(random_tables(rng, 2), 2, batch=rng.choice([16, 2048])))
    assert outcome.cost.step_seconds == pytest.approx(tried(outcome), rel=1e-12)


@settings(max_examples=6)
@given(seed=st.integers(0, 10**6), world=st.sampled_from([2, 4, 8]), count=st.integers(1, 12))
@example(seed=181, world=2, count=10)
def test_every_plan_tiles_its_tables_and_is_no_worse_than_the_best_uniform_one(seed, world, count):
    rng = random.Random(seed)
    tables = random_tables(rng, count)
    asked = problem(tables, world, 2 if world == 8 else 1)
    outcome = plan_tables(asked)
    outcome.plan.check(tables)
    assert outcome.lower_bound_seconds <= outcome.cost.step_seconds * (1 + 1e-12)
    assert plan_cost(outcome.plan, asked).step_seconds == pytest.approx(
        outcome.cost.step_seconds, rel=1e-9
    )
    ranks = CandidateRanks(list(range(world)), asked.topology.host_ranks())
    for kind in ShardingType:
        uniform = ShardingPlan({t.name: tile(t, kind.value, ranks) for t in tables}, world)
        # less is no gain
        least = plan_cost(uniform, asked).step_seconds
        assert outcome.cost.step_seconds <= least + SMALLEST_GAIN


def test_equal_inputs_give_equal_plans():
    tables = random_tables(random.Random(3), 30)
    assert plan_tables(problem(tables, 8, 2)).plan == plan_tables(problem(tables, 8, 2)).plan


def test_one_rank_holds_every_table_whole():
    plan = plan_tables(problem(SAMPLE, 1)).plan
    assert {s.sharding_type for s in plan.tables.values()} == {"table_wise"}


def test_no_rank_gets_more_than_it_has_room_for():
    room = 1_000_000_000
    plan = plan_tables(problem(SAMPLE, 2, memory=room, rule=adam())).plan
    held = plan_cost(plan, problem(SAMPLE, 2, rule=adam())).bytes_W
    assert held.max() <= room < held.sum()


def test_what_fits_nowhere_is_refused_with_the_missing_bytes_the_rank_the_tables_and_what_helps():
    with pytest.raises(
        PlanError,
        match=(
            r"does not fit: rank \d lacks [\d,]+ bytes .*large_table.*What helps: "
            r".*trainer.devices"
        ),
    ):
        plan_tables(problem(SAMPLE, 2, memory=10**8, rule=adam()))


# ---- constraints


def planned(constraints, tables=SAMPLE, world=4, hosts=2):
    return plan_tables(problem(tables, world, hosts), constraints).plan.tables


def test_types_ranks_hosts_modes_and_strips_are_as_constrained():
    plan = planned(
        {
            "large*": ParameterConstraints(sharding_types=["row_wise"], ranks=[1, 3]),
            "wide_table": ParameterConstraints(
                sharding_types=["column_wise"], min_partition=128, modes=["pooled"]
            ),
            "small_table": ParameterConstraints(hosts=[1]),
        }
    )
    assert plan["large_table"].sharding_type == "row_wise" and plan["large_table"].ranks == [1, 3]
    assert {len(s.cols) for s in plan["wide_table"].shards} == {128} and plan[
        "wide_table"
    ].mode == "pooled"
    assert set(plan["small_table"].ranks) <= {2, 3}


def test_tables_kept_together_share_ranks_and_tables_kept_apart_share_none():
    tables = [table(f"t{k}", 5000, 16) for k in range(4)]
    whole = ParameterConstraints(sharding_types=["table_wise"])
    plan = planned(
        {
            "t0": ParameterConstraints(together="a").over(whole),
            "t1": ParameterConstraints(together="a").over(whole),
            "t2": ParameterConstraints(apart="b").over(whole),
            "t3": ParameterConstraints(apart="b").over(whole),
        },
        tables,
    )
    assert plan["t0"].ranks == plan["t1"].ranks and plan["t2"].ranks != plan["t3"].ranks


def test_a_name_wins_over_a_glob():
    plan = planned(
        {
            "*": ParameterConstraints(sharding_types=["row_wise"]),
            "small_table": ParameterConstraints(sharding_types=["data_parallel"]),
        }
    )
    assert [s.sharding_type for s in plan.values()] == ["row_wise", "row_wise", "data_parallel"]


@pytest.mark.parametrize(
    ("constraints", "says"),
    [
        (
            {"larg": ParameterConstraints()},
            "constraints.larg: no such table; did you mean large_table",
        ),
        (
            {"large_table": ParameterConstraints(sharding_types=["row_wize"])},
            "unknown sharding type row_wize; did you mean row_wise",
        ),
        (
            {"large_table": ParameterConstraints(ranks=[9])},
            r"rank 9 does not exist: there are 4 \(ranks 0..3\)",
        ),
        ({"large_table": ParameterConstraints(hosts=[2])}, "host 2 does not exist"),
        ({"large_table": ParameterConstraints(ranks=[0], hosts=[1])}, "are not on hosts"),
        (
            {"large_table": ParameterConstraints(min_partition=0)},
            "min_partition=0: a strip has at least 1 column",
        ),
        (
            {"*_table": ParameterConstraints(together="a", apart="b")},
            r"together \(a\) and apart \(b\) at the same time",
        ),
        (
            {
                "large_table": ParameterConstraints(together="a", sharding_types=["row_wise"]),
                "wide_table": ParameterConstraints(together="a", sharding_types=["data_parallel"]),
            },
            "no sharding type in common",
        ),
        (
            {
                "large_table": ParameterConstraints(together="a", ranks=[0]),
                "wide_table": ParameterConstraints(together="a", ranks=[1]),
            },
            "no rank in common",
        ),
        (
            {"large_table": ParameterConstraints(sharding_types=["data_parallel"], ranks=[0, 1])},
            "nothing is left to choose from",
        ),
        ({"large_table": ParameterConstraints(modes=["pool"])}, "unknown mode pool"),
    ],
)
def test_a_constraint_that_cannot_hold_is_refused_by_name(constraints, says):
    with pytest.raises(PlanError, match=says):
        planned(constraints)


# ---- what is known of ids


def crowded(rows):
    """All requests fall into the first quarter of the rows."""
    return TableStatistics(rows, 1.0, 1.0, ((1.0, 1.0), (1e4, 1e4)), (1.0, 0.0, 0.0, 0.0))


@pytest.mark.parametrize("kind", ["row_wise", "table_row_wise", "grid_shard"])
def test_rows_whose_requests_crowd_are_mixed_and_others_are_not(kind):
    tables = [table("t", 40_000, 64), table("even", 40_000, 64)]
    even = TableStatistics(40_000, 1.0, 1.0, ((1.0, 1.0), (1e4, 1e4)), (0.25,) * 4)
    outcome = plan_tables(
        problem(tables, 4, batch=4096, statistics={"t": crowded(40_000), "even": even}),
        {"*": ParameterConstraints(sharding_types=[kind])},
    )
    made = outcome.plan.tables
    assert {name: s.row_order for name, s in made.items()} == {"t": "mixed", "even": "natural"}
    natural = replace(
        outcome.plan, tables={name: replace(s, row_order="natural") for name, s in made.items()}
    )
    assert outcome.cost.step_seconds < plan_cost(natural, outcome.problem).step_seconds
    assert plan_cost(outcome.plan, outcome.problem).step_seconds == pytest.approx(
        outcome.cost.step_seconds
    )


def test_constraints_say_how_rows_may_lie():
    tables = [table("t", 40_000, 64), table("even", 40_000, 64)]
    asked = {
        "t": ParameterConstraints(sharding_types=["row_wise"], row_orders=["natural"]),
        "even": ParameterConstraints(sharding_types=["row_wise"], row_orders=["mixed"]),
    }
    found = problem(tables, 4, batch=4096, statistics={"t": crowded(40_000)})
    made = plan_tables(found, asked).plan.tables
    assert {name: s.row_order for name, s in made.items()} == {"t": "natural", "even": "mixed"}
    with pytest.raises(
        PlanError, match=r"^constraints\.t\.row_orders: unknown order mixd; did you"
    ):
        plan_tables(found, {"t": ParameterConstraints(row_orders=["mixd"])})


def test_long_bags_that_repeat_no_row_are_pooled_and_one_hot_features_are_not():
    tables = [table("long", 10_000_000, 64), table("one", 10_000_000, 64)]
    spread = TableStatistics(10_000_000, 50.0, 1.0, ((1.0, 1.0), (1e7, 1e7)))
    outcome = plan_tables(
        problem(tables, 2, statistics={"long": spread}),
        {"*": ParameterConstraints(sharding_types=["table_wise"])},
    )
    assert [s.mode for s in outcome.plan.tables.values()] == ["pooled", "unique"]


def test_pooling_factors_stand_in_for_statistics():
    asked = {"*": ParameterConstraints(pooling_factors=[20.0])}
    assert (
        plan_tables(problem(SAMPLE, 2), asked).cost.step_seconds
        > plan_tables(problem(SAMPLE, 2)).cost.step_seconds
    )
    assert default_statistics(SAMPLE[0], 20.0).ids_per_sample == 20.0


# ---- as TorchRec's users write it


class Model(torch.nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def test_the_planner_takes_a_model_and_its_plan_shows_type_placement_offsets_and_sizes():
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cpu"),
        constraints={
            "wide_table": ParameterConstraints(
                sharding_types=[ShardingType.COLUMN_WISE.value], min_partition=128
            )
        },
    )
    plan = planner.plan(Model(SAMPLE))
    shown = {
        name: (s.sharding_type, [(p.placement, p.shard_offsets, p.shard_sizes) for p in s.shards])
        for name, s in plan.items()
    }
    assert shown["wide_table"] == (
        "column_wise",
        [("rank:0", [0, 0], [100_000, 128]), ("rank:1", [0, 128], [100_000, 128])],
    )


def collectively(comm, constraints):
    planner = EmbeddingShardingPlanner(constraints=constraints, rule=sgd())
    try:
        return planner.collective_plan(Model(SAMPLE), pg=comm.group)
    except PlanError as error:
        return str(error)


def test_rank_0_plans_and_all_receive_it_or_its_error(ranks):
    first, second = ranks.run(collectively, 2, {})
    assert first == second and first.world_size == 2
    assert len({*ranks.run(collectively, 2, {"lrge": ParameterConstraints()})}) == 1
