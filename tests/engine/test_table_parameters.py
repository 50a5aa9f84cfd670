"""Replicas that are parameters: a gradient for any optimiser, updates as torch's on one process."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from engine.engine_cases import Head, batch_of, make_plan, make_tables, whole_tensors
from tiers import one_of
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from recapp.compat.torchrec.optimizers import (
    CombinedOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    in_backward_optimizer_filter,
)
from recapp.engine.sharded_collection import sharded_collections, without_tables
from recapp.engine.sharded_state import gathered_state_dict
from recapp.errors import ConfigError, PlanError
from recapp.optim.rules import sgd
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.sharding.plan_file import plan_to_yaml
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig

META = torch.device("meta")
OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, 0.05),
    "momentum": lambda params: torch.optim.SGD(params, 0.3, momentum=0.9, weight_decay=0.01),
    "rowwise": lambda params: RowWiseAdagrad(params, 0.3),
}


def with_parameters(tables, world, names=("t0", "t2"), **changes):
    """Some tables are parameters, the others row-wise."""
    fused = make_plan("row_wise", tables, world).tables
    copies = make_plan("data_parallel", tables, world).tables
    changes = {"mode": "replicated", "as_parameter": True} | changes
    own = {name: replace(copies[name], **changes) for name in names}
    return ShardingPlan({**fused, **own}, world)


def parallel(comm, tables, plan=None, seed=3):
    head = Head(EmbeddingBagCollection(tables=tables, device=META, seed=seed))
    plan = plan or with_parameters(tables, comm.world)
    sharders = [EmbeddingBagCollectionSharder(sgd(0.2))]
    return DistributedModelParallel(head, comm.group, plan=plan, sharders=sharders)


def updates(comm, kind):
    tables = make_tables(data_type="fp64")
    model = parallel(comm, tables)
    named = dict(in_backward_optimizer_filter(model.module.named_parameters()))
    own = KeyedOptimizerWrapper(
        {n: p for n, p in named.items() if "collection" in n}, OPTIMIZERS[kind]
    )
    layers = KeyedOptimizerWrapper(
        {n: p for n, p in named.items() if "collection" not in n},
        lambda params: torch.optim.SGD(params, 0.1),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, own, layers])
    oracle = Head(EmbeddingBagCollection(tables=tables, seed=3))
    weights = {t.name: oracle.collection.weight(t.name) for t in tables}
    plain = [
        OPTIMIZERS[kind]([weights["t0"], weights["t2"]]),
        torch.optim.SGD([weights["t1"]], 0.2),
        torch.optim.SGD(oracle.layers.parameters(), 0.1),
    ]
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for of_oracle in plain:
            of_oracle.zero_grad()
        for half in range(2):  # gradients of two backwards add up, the fused table has two updates
            batches = [batch_of(tables, 6, 100 * step + 10 * half + r) for r in range(comm.world)]
            model(batches[comm.rank]).sum().backward()
            (sum(oracle(b).sum() for b in batches) / comm.world).backward()
            plain[1].step()
            plain[1].zero_grad()
        for name, p in own.params.items():
            wanted = weights[name.split(".")[-2]].grad
            torch.testing.assert_close(p.grad, wanted, rtol=1e-9, atol=1e-12)
            assert all(torch.equal(g, p.grad) for g in comm.all_gather(p.grad)), "ranks differ"
        optimizer.step()
        plain[0].step()
        plain[2].step()
    for (table, tensor), data in whole_tensors(comm, sharded_collections(model)[0]).items():
        assert tensor == "weight", "a gradient is no state that is kept"
        torch.testing.assert_close(data, weights[table].detach(), rtol=1e-9, atol=1e-9)
    return sorted(own.params)


@pytest.mark.parametrize(("world", "kind"), one_of(2, list(product((1, 2, 4), OPTIMIZERS))))
def test_any_optimiser_updates_them_as_torch_does_on_one_process(ranks, world, kind):
    names = [f"collection.embedding_bags.{table}.weight" for table in ("t0", "t2")]
    assert ranks.run(updates, world, kind) == [names] * world


def clipped(comm):
    tables = make_tables(data_type="fp64")
    model = parallel(comm, tables)
    batches = [batch_of(tables, 6, r) for r in range(comm.world)]
    model(batches[comm.rank]).sum().backward()
    oracle = Head(EmbeddingBagCollection(tables=tables, seed=3))
    (sum(oracle(b).sum() for b in batches) / comm.world).backward()
    own = [p for n, p in oracle.named_parameters() if ".t1." not in n]
    norms = [nn.utils.clip_grad_norm_(params, 0.1) for params in (model.parameters(), own)]
    torch.testing.assert_close(*norms)


@pytest.mark.parametrize("world", [1, 2])
def test_their_gradients_are_clipped_with_those_of_layers(ranks, world):
    ranks.run(clipped, world)


def states(comm):
    tables = make_tables()
    model = parallel(comm, tables)
    state = model.state_dict()
    names = [f"collection.embedding_bags.{t.name}.weight" for t in tables]
    assert [isinstance(state[name], torch.Tensor) for name in names] == [True, False, True]
    whole = gathered_state_dict(model)
    other = parallel(comm, tables, seed=8)
    other.load_state_dict(state)
    fused = parallel(comm, tables, make_plan("random", tables, comm.world), seed=9)
    whole_on_all = comm.broadcast(whole)
    fused.load_state_dict(whole_on_all)
    from_strips = parallel(comm, tables, make_plan("data_parallel", tables, comm.world), seed=5)
    from_strips.load_state_dict(whole_on_all)
    model.load_state_dict(from_strips.state_dict(), assign=True)
    plain = Head(EmbeddingBagCollection(tables=tables, seed=1))
    plain.load_state_dict(whole_on_all)
    batch = batch_of(tables, 6, 7)
    with torch.no_grad():
        expected = plain(batch)
        for loaded in (model, other, fused, from_strips):
            torch.testing.assert_close(loaded(batch), expected)
    with without_tables(sharded_collections(model)):
        dense = model.state_dict()
        assert not any("embedding_bags" in name for name in dense)
        assert str(model.load_state_dict(dense)) == "<All keys matched successfully>"
    del state[names[0]]
    with pytest.raises(RuntimeError, match=f"Missing key.*{names[0]}"):
        other.load_state_dict(state)
    state[names[0]] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"table t0 \(.*\): a tensor of shape \(3, 3\) is"):
        other.load_state_dict(state)
    model(batch).sum().backward()
    assert model.module.collection.embedding_bags["t0"].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("world", [1, 2])
def test_state_dicts_have_them_whole_and_load_from_any_form(ranks, world):
    ranks.run(states, world)


class Tied(nn.Module):
    """Bags and sequences of one table."""

    def __init__(self, device):
        super().__init__()
        table = EmbeddingBagConfig(9, 4, "t", feature_names=["f"], data_type="fp64")
        self.bags = EmbeddingBagCollection([table], device=device, seed=2)
        self.sequences = EmbeddingCollection([table], device=device, seed=2)
        self.sequences.embeddings["t"].weight = self.bags.embedding_bags["t"].weight

    def forward(self, features):
        vectors = self.sequences(features)["f"].values()
        return self.bags(features).values().sum() + vectors.tanh().sum()


def shared_by_two(comm):
    table = EmbeddingBagConfig(9, 4, "t", feature_names=["f"])
    plan = with_parameters([table], comm.world, ["t"])
    model = DistributedModelParallel(Tied(META), comm.group, plan=plan)
    oracle = Tied("cpu")
    batches = [batch_of([table], 5, r) for r in range(comm.world)]
    model(batches[comm.rank]).backward()
    (sum(oracle(b) for b in batches) / comm.world).backward()
    ((name, p),) = model.module.named_parameters()
    assert name == "bags.embedding_bags.t.weight"
    torch.testing.assert_close(p.grad, oracle.bags.weight("t").grad)
    assert not model.sparse_groups()


@pytest.mark.parametrize("world", [1, 2])
def test_collections_that_share_a_table_share_the_parameter(ranks, world):
    ranks.run(shared_by_two, world)


def test_what_is_frozen_has_no_gradient_and_stays():
    tables = make_tables()
    plan = with_parameters(tables, 1, [t.name for t in tables])
    model = DistributedModelParallel(
        Head(EmbeddingBagCollection(tables=tables, device=META)), plan=plan
    )
    p = model.module.collection.embedding_bags["t0"].weight
    before = p.detach().clone()
    p.requires_grad_(False)
    model(batch_of(tables, 6, 1)).sum().backward()
    assert p.grad is None and torch.equal(p, before)
    p.requires_grad_()
    model(batch_of(tables, 6, 1)).sum().backward()
    once = p.grad.clone()
    p.grad = torch.ones_like(p)  # a gradient of the user's own
    model(batch_of(tables, 6, 1)).sum().backward()
    torch.testing.assert_close(p.grad, once + 1)
    assert model.half().module.collection.embedding_bags["t0"].weight.dtype == torch.float32


def with_a_lookup_that_waits(comm):
    tables = make_tables(data_type="fp64")
    plan = with_parameters(tables, comm.world, [t.name for t in tables])
    model = parallel(comm, tables, plan)
    oracle = Head(EmbeddingBagCollection(tables=tables, seed=3))
    batches = [batch_of(tables, 6, r) for r in range(comm.world)]
    held = model(batch_of(tables, 4, 9)) if comm.rank == 0 else model(batch_of(tables, 4, 8))
    for _ in range(2):
        model(batches[comm.rank]).sum().backward()
    gradient = model.module.collection.embedding_bags["t0"].weight.grad.clone()
    (sum(oracle(b).sum() for b in batches) / comm.world).backward()
    torch.testing.assert_close(gradient, 2 * oracle.collection.weight("t0").grad)
    with torch.no_grad():
        model(batches[comm.rank])  # ends the step
    later = model.module.collection.embedding_bags["t0"].weight.grad
    assert torch.equal(later, gradient) and held.requires_grad


@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_is_there_after_backward_whatever_else_was_looked_up(ranks, world):
    ranks.run(with_a_lookup_that_waits, world)


def test_an_optimiser_in_backward_does_not_reach_them():
    tables = make_tables()
    head = Head(EmbeddingBagCollection(tables=tables, device=META))
    model = DistributedModelParallel(head, plan=with_parameters(tables, 1))
    own = model.module.collection.embedding_bags.parameters()
    apply_optimizer_in_backward(torch.optim.SGD, own, {"lr": 0.1})
    with pytest.raises(ConfigError, match="a table that is a parameter has an optimizer by apply_"):
        model(batch_of(tables, 6, 1)).sum().backward()


def test_without_asking_no_table_is_a_parameter():
    tables = make_tables()
    plan = make_plan("data_parallel", tables, 1)
    model = DistributedModelParallel(
        Head(EmbeddingBagCollection(tables=tables, device=META)), plan=plan
    )
    assert not any("collection" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "unique"}, "mode=unique: a parameter is whole on every rank"),
        ({"row_order": "mixed"}, "row_order=mixed: a parameter has its rows by number"),
    ],
)
def test_plans_under_which_a_table_is_no_parameter_are_refused(changes, said):
    tables = make_tables()
    plan = with_parameters(tables, 1, ["t0"], **changes)
    head = Head(EmbeddingBagCollection(tables=tables, device=META))
    with pytest.raises(ConfigError, match=f"table t0 is to be a parameter .*, but {said}"):
        DistributedModelParallel(head, plan=plan)


def test_narrow_rows_are_no_parameter():
    tables = make_tables(data_type="fp16")
    head = Head(EmbeddingBagCollection(tables=tables, device=META))
    with pytest.raises(
        ConfigError, match=r"table t0 .*, but data_type=fp16 is narrower than the compute type"
    ):
        DistributedModelParallel(head, plan=with_parameters(tables, 1, ["t0"]))


def test_a_checkpoint_keeps_that_a_table_is_a_parameter_and_a_plan_file_does_not():
    plan = with_parameters(make_tables(), 2)
    again = ShardingPlan.from_dict(plan.to_dict())
    assert again == plan and again.tables["t0"].as_parameter
    with pytest.raises(PlanError, match=r"table t0 is a parameter .*only DistributedModelParallel"):
        plan_to_yaml(plan)
