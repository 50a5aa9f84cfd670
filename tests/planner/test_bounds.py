"""The bound: never above the best plan there is, whatever the tables, links, kinds of calls and
constraints; and close where it can be.
"""

import itertools
import random
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recapp.optim.rules import adam, rowwise_adagrad, sgd
from recapp.planner.cost import cost_of, fixed_of
from recapp.planner.embedding_planner import plan_tables
from recapp.planner.hardware import Hardware, Link, Work
from recapp.planner.planner_settings import ParameterConstraints
from recapp.planner.problem import PlanningProblem, Topology
from recapp.planner.search_space import SearchSpace, lower_bound
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.statistics import default_statistics


def machine(rng):
    """Any machine: one link may be slow with nothing to carry and the other with much, calls may be
    free or cost more than all else.
    """

    def work(name):
        known = (rng.choice([0, 5, 500]), rng.choice([1, 20]))
        return (
            Work(*known)
            if name in ("route", "link", "serve", "group")
            else Work(*known, rng.choice([1.0, 50.0]))
        )

    def link():
        return Link({2: rng.choice([1, 50, 1000])}, {2: rng.choice([0.1, 1.0, 40.0])})

    kernels = {
        name: work(name)
        for name in ("route", "link", "serve", "group", "answer", "combine", "spread", "update")
    }
    return Hardware(
        "any",
        "drawn",
        "cpu",
        2,
        None,
        kernels,
        *({"host": link(), "network": link()} for _ in range(2)),
        1e11,
        0.5,
        0,
    )


def problem(rng, count, world, hosts):
    tables = [
        EmbeddingBagConfig(
            name=f"t{k}",
            num_embeddings=int(10 ** rng.uniform(0.3, 6)),
            embedding_dim=rng.choice([8, 32, 64, 100]),
            feature_names=[f"f{k}"],
        )
        for k in range(count)
    ]
    known = {t.name: default_statistics(t, rng.choice([1.0, 1.0, 20.0])) for t in tables}
    topology = Topology(world, hosts, hardware=machine(rng))
    return PlanningProblem(
        tables,
        topology,
        rng.choice([4, 256, 4096]),
        rng.choice([sgd(), adam(), rowwise_adagrad(), None]),
        known,
    )


def tried(outcome, space):
    """The price of the best assignment there is, each of them made."""
    least = float("inf")

    def add(bundle, works):
        nonlocal least
        if bundle == len(outcome.bundles):
            least = min(least, cost_of(works, outcome.problem).step_seconds)
            return
        for option, cost in enumerate(space.costs[bundle]):
            options = outcome.bundles[bundle].options[option]
            for candidates in itertools.product(*(range(len(b.candidates)) for b in cost.blocks)):
                add(bundle + 1, works + [o.on_ranks(candidates) for o in options])

    add(0, [])
    return least


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(1, 4, 2), (2, 2, 1), (2, 2, 2), (1, 4, 1), (1, 6, 3)]),
)
def test_no_plan_is_faster_than_the_bound(seed, shape):
    rng = random.Random(seed)
    asked = problem(rng, *shape)
    outcome = plan_tables(
        asked, {"t0": ParameterConstraints(ranks=[0, 1])} if rng.random() < 0.3 else {}
    )
    space = SearchSpace(outcome.bundles, fixed_of(asked))
    combinations = prod(
        sum(prod(len(b.candidates) for b in cost.blocks) for cost in costs) for costs in space.costs
    )
    if combinations > 1500:
        return
    best = tried(outcome, space)
    for bound in lower_bound(space, shape[1]):
        assert bound.seconds <= best * (1 + 1e-12)
    assert best * (1 - 1e-12) <= outcome.cost.step_seconds <= 1.02 * best


@pytest.mark.parametrize("seed", range(3))
def test_types_that_are_left_out_raise_the_bound_and_stay_below_their_own_plans(seed):
    asked = problem(random.Random(seed), 6, 4, 2)
    every = plan_tables(asked)
    space = SearchSpace(every.bundles, fixed_of(asked))
    allowed_N = np.array([cost.sharding_type == "row_wise" for cost in space.all_costs])
    uniform = plan_tables(asked, {"*": ParameterConstraints(sharding_types=["row_wise"])})
    found = lower_bound(space, 4, allowed_N)[0].seconds
    assert lower_bound(space, 4)[0].seconds <= found <= uniform.cost.step_seconds * (1 + 1e-12)


def price(call, item, link):
    kernels = {name: Work(call, item) for name in ("route", "link", "serve", "group")}
    kernels |= {name: Work(call, item, 1e5) for name in ("answer", "combine", "spread", "update")}
    return Hardware(
        "toy",
        "by hand",
        "cpu",
        8,
        None,
        kernels,
        {"host": link, "network": link},
        {"host": link, "network": link},
        1e11,
        0.5,
        0,
    )


def whole(count, rows, dim, ranks=None):
    tables = [
        EmbeddingBagConfig(
            name=f"t{k}", num_embeddings=rows, embedding_dim=dim(k), feature_names=[f"f{k}"]
        )
        for k in range(count)
    ]
    return tables, {"*": ParameterConstraints(sharding_types=["table_wise"], ranks=ranks)}


@pytest.mark.parametrize(
    ("what", "tables", "ranks", "hardware"),
    [
        (
            "a table that cannot be cut lies somewhere whole",
            1,
            None,
            price(0, 10, Link({2: 10}, {2: 10.0})),
        ),
        (
            "tables bound to two ranks of eight are not shared by eight",
            40,
            [2, 5],
            price(0, 10, Link({2: 10}, {2: 10.0})),
        ),
        ("every width has calls of its own", 40, None, price(1000, 1, Link({2: 10}, {2: 100.0}))),
        ("messages have latencies", 40, None, price(0, 1, Link({2: 5000}, {2: 100.0}))),
    ],
)
def test_what_no_plan_can_avoid_is_in_the_bound(what, tables, ranks, hardware):
    configs, constraints = whole(tables, 10_000, lambda k: 32 if k % 2 else 64, ranks)
    asked = PlanningProblem(configs, Topology(8, hardware=hardware), 1024, sgd())
    outcome = plan_tables(asked, constraints)
    space = SearchSpace(outcome.bundles, fixed_of(asked))
    assert lower_bound(space, 8)[0].seconds == pytest.approx(outcome.cost.step_seconds, rel=0.02), (
        what
    )


def test_a_thousand_tables_on_sixteen_hosts_are_planned_close_to_the_bound():
    rng = random.Random(0)
    tables = [
        EmbeddingBagConfig(
            name=f"t{k}",
            num_embeddings=int(10 ** rng.uniform(1, 6)),
            embedding_dim=rng.choice([16, 32, 64, 128]),
            feature_names=[f"t{k}"],
        )
        for k in range(200)
    ]
    from recapp.planner.problem import machine as shipped

    asked = PlanningProblem(tables, shipped("dgx_h100", 64), 512, rowwise_adagrad())
    outcome = plan_tables(asked)
    assert outcome.cost.step_seconds < 1.03 * outcome.lower_bound_seconds
