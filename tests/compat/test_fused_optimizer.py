"""The optimiser of sharded tables as an object: live rates, and a state that loads again."""

import pytest
import torch
from engine.engine_cases import Head, batch_of, make_plan, make_tables, whole_tensors

from recapp.compat.torchrec.optimizers import (
    CombinedOptimizer,
    KeyedOptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)
from recapp.engine.sharded_collection import sharded_collections
from recapp.errors import ConfigError
from recapp.optim.rules import adam, rowwise_adagrad, sgd
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.tables.collections import EmbeddingBagCollection

pytestmark = pytest.mark.usefixtures("reference_kernels")
RULES = {"sgd": sgd, "rowwise_adagrad": rowwise_adagrad, "adam": adam}


def model_of(comm, rule, kind="column_wise"):
    tables = make_tables(data_type="fp64")
    torch.manual_seed(1)
    model = Head(EmbeddingBagCollection(tables=tables, device=torch.device("meta"), seed=2))
    plan = make_plan(kind, tables, comm.world)
    sharder = EmbeddingBagCollectionSharder(rule)
    return DistributedModelParallel(model.double(), comm.group, plan=plan, sharders=[sharder])


def step(comm, model, number):
    model(batch_of(make_tables(), 6, 10 * number + comm.rank)).sum().backward()


def tables_of(comm, model):
    return whole_tensors(comm, sharded_collections(model)[0])


def continued(comm, rule):
    """A run that goes on from state dicts against one that was not interrupted."""
    one = model_of(comm, RULES[rule](0.1))
    step(comm, one, 0)
    weights = one.state_dict()
    first = one.fused_optimizer
    first.save_param_groups(True)
    stored = first.state_dict()
    other = model_of(comm, RULES[rule](0.5))
    other.load_state_dict(weights)
    second = other.fused_optimizer
    second.save_param_groups(True)
    second.load_state_dict(stored)
    for model in (one, other):
        step(comm, model, 1)
    expected = tables_of(comm, one)
    found = tables_of(comm, other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    return sorted(stored["state"])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("world", [1, 2])
def test_a_loaded_state_goes_on_to_the_same_bits(ranks, world, rule):
    for names in ranks.run(continued, world, rule):
        assert names == [f"collection.embedding_bags.t{k}.weight" for k in range(3)]


def scheduled(comm):
    model = model_of(comm, sgd(0.5))
    fused = model.fused_optimizer
    text = repr(fused)
    dense = KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.5)
    )
    optimizer = CombinedOptimizer([fused, ("dense", dense)])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.0 if number else 1.0)
    step(comm, model, 0)
    optimizer.step()
    schedule.step()
    before = tables_of(comm, model)
    step(comm, model, 1)
    after = tables_of(comm, model)
    assert all(torch.equal(after[key], before[key]) for key in before)
    return text, [group["lr"] for group in optimizer.param_groups]


def test_a_schedule_of_the_combined_optimiser_reaches_the_tables(ranks):
    for text, rates in ranks.run(scheduled, 2):
        assert text == "FusedOptimizer(3 tables: sparse/sgd, lr 0.5)"
        assert rates == [0.0, 0.0]


def refused(comm):
    model = model_of(comm, rowwise_adagrad(0.1))
    optimizer = model.fused_optimizer
    stored = optimizer.state_dict()
    name = "collection.embedding_bags.t0.weight"
    with pytest.raises(ConfigError, match=f"the state has no entry for {name}, "):
        optimizer.load_state_dict(stored | {"state": {}})
    tensor, updates = stored["state"][name]
    wrong = stored["state"] | {name: {tensor: torch.zeros(1, 1, dtype=torch.float64)}}
    short = stored["state"] | {name: {tensor: stored["state"][name][tensor]}}
    with pytest.raises(ConfigError, match=f"the state has no entry for {name}, {updates}"):
        optimizer.load_state_dict(stored | {"state": short})
    with pytest.raises(ConfigError, match=f"{name}, {tensor}: a tensor of shape"):
        optimizer.load_state_dict(stored | {"state": wrong})
    optimizer.save_param_groups(True)
    with pytest.raises(ConfigError, match="the state has 0 param groups"):
        optimizer.load_state_dict(stored | {"param_groups": []})
    optimizer.zero_grad()
    assert optimizer.step(lambda: 4.0) == 4.0 and optimizer.step() is None


def test_state_that_does_not_fit_is_refused(ranks):
    ranks.run(refused, 1)


def warmed_up(comm):
    """Tables in steps whose rates are 0, 0.25 and 0.5, against a run whose rate is set by hand."""
    model = model_of(comm, adam(9.0))
    by_hand = model_of(comm, adam(9.0))
    optimizer, other = (
        CombinedOptimizer(
            [
                one.fused_optimizer,
                KeyedOptimizerWrapper(
                    dict(one.named_parameters()), lambda p: torch.optim.SGD(p, lr=9.0)
                ),
            ]
        )
        for one in (model, by_hand)
    )
    optimizer = WarmupOptimizer(
        optimizer, [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)], lr=1.0
    )
    for number, rate in enumerate((0.0, 0.25, 0.5)):
        assert {group["lr"] for group in optimizer.param_groups} == {rate}
        for group in other.param_groups:
            group["lr"] = rate
        for one, its in ((model, optimizer), (by_hand, other)):
            its.zero_grad()
            step(comm, one, number)
            its.step()
    found = tables_of(comm, model)
    expected = tables_of(comm, by_hand)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("world", [1, 2])
def test_tables_warm_up_as_the_dense_part_does(ranks, world):
    ranks.run(warmed_up, world)
