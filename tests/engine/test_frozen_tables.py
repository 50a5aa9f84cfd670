"""Tables that do not require gradients: their rows stay, and the others train as on one process."""

import gc
import weakref
from copy import deepcopy
from itertools import product

import pytest
import torch
from engine.engine_cases import Head, batch_of, make_plan, make_tables, same_bits, whole_tensors
from tiers import one_of

from recapp.compat.torchrec.batches import TrainPipelineSparseDist
from recapp.engine.sharded_collection import shard_bags, shard_model, sharded_collections
from recapp.errors import ConfigError
from recapp.optim.named_rules import with_frozen
from recapp.optim.optimizer import clip_norm
from recapp.optim.rules import adagrad, adam, rowwise_adagrad, sgd
from recapp.optim.table_rule import with_frozen_of
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.planner.embedding_planner import EmbeddingShardingPlanner
from recapp.planner.rank_memory import bytes_per_rank
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig
from recapp.transport.communicator import Comm

pytestmark = pytest.mark.usefixtures("reference_kernels")
META = torch.device("meta")
DIMS = (3, 3, 1)  # and strips of 2 and 1: those of tests/parity, each a kernel to compile
RULES = {
    "adagrad": (adagrad(0.3, 1e-10), lambda params: torch.optim.Adagrad(params, 0.3, eps=1e-10)),
    "l2": (
        adam(0.1, 0.8, 0.95, l2_all_rows=0.02),
        lambda params: torch.optim.Adam(params, 0.1, (0.8, 0.95), weight_decay=0.02),
    ),
}


def model_of(tables, frozen=(), device=META):
    head = Head(EmbeddingBagCollection(tables=tables, device=device, seed=3))
    for name in frozen:
        head.collection.embedding_bags[name].weight.requires_grad_(False)
    return head


def parallel(comm, head, rule, plan):
    sharders = [EmbeddingBagCollectionSharder(rule)]
    return DistributedModelParallel(head, comm.group, plan=plan, sharders=sharders)


def step(model, comm, tables, number):
    model(batch_of(tables, 6, 10 * number + comm.rank)).square().mean().backward()


def trained(comm, kind, when, name):
    """t1 and t2 are frozen: in the unsharded model, or in the sharded one."""
    tables = make_tables(dims=DIMS, data_type="fp64")  # two of them share a store
    names = ["t1", "t2"]
    model = parallel(
        comm,
        model_of(tables, names if when == "before" else ()),
        RULES[name][0],
        make_plan(kind, tables, comm.world, column_width=2),
    )
    (collection,) = sharded_collections(model)
    for table in names if when == "after" else ():
        collection.embedding_bags[table].weight.requires_grad_(False)
    assert [collection.embedding_bags[t.name].weight.requires_grad for t in tables] == [
        True,
        False,
        False,
    ]
    for number in range(3):
        step(model, comm, tables, number)
    return whole_tensors(comm, collection)


def oracle(world, name):
    tables = make_tables(dims=DIMS, data_type="fp64")
    head = model_of(tables, ["t1", "t2"], "cpu")
    optimizer = RULES[name][1]([head.collection.weight("t0")])
    for number in range(3):
        optimizer.zero_grad()
        losses = [head(batch_of(tables, 6, 10 * number + r)).square().mean() for r in range(world)]
        (sum(losses) / world).backward()
        optimizer.step()
    return {t.name: head.collection.weight(t.name).detach() for t in tables}


def compared(comm, name):
    found = [
        trained(comm, kind, when, name)
        for kind, when in product(("row_wise", "column_wise", "data_parallel"), ("before", "after"))
    ]
    wanted = oracle(comm.world, name)
    start = EmbeddingBagCollection(tables=make_tables(dims=DIMS, data_type="fp64"), seed=3)
    for tensors in found:
        for table in ("t1", "t2"):
            assert same_bits(tensors[table, "weight"], start.weight(table).detach())
        torch.testing.assert_close(tensors["t0", "weight"], wanted["t0"], rtol=1e-9, atol=1e-9)
        assert same_bits(tensors["t0", "weight"], found[0]["t0", "weight"])
    assert {table for table, tensor in found[0] if tensor != "weight"} == {"t0"}, "no state"
    assert {table for table, tensor in found[1] if tensor != "weight"} == {"t0", "t1", "t2"}


@pytest.mark.parametrize("name", one_of(2, RULES))
@pytest.mark.parametrize("world", [1, 2])
def test_their_rows_stay_and_the_others_train_as_on_one_process(ranks, world, name):
    ranks.run(compared, world, name)


def moved(comm, model, collection, tables, number):
    """The tables whose rows move in a step."""
    before = whole_tensors(comm, collection)
    step(model, comm, tables, number)
    after = whole_tensors(comm, collection)
    return [
        t.name for t in tables if not same_bits(before[t.name, "weight"], after[t.name, "weight"])
    ]


def thawed(comm):
    tables = make_tables(dims=DIMS)
    plan = make_plan("row_wise", tables, comm.world)
    model = parallel(comm, model_of(tables, ["t2"]), adam(0.1, l2_all_rows=0.01), plan)
    (collection,) = sharded_collections(model)
    found = [moved(comm, model, collection, tables, 0)]
    for freezes in (model, model.module):  # the layers too, through which gradients still go
        freezes.requires_grad_(False)
        found.append(moved(comm, model, collection, tables, 1))
        with pytest.raises(ConfigError, match="table t2 was frozen when it was sharded and has no"):
            freezes.requires_grad_(True)
        collection.embedding_bags["t1"].weight.requires_grad = True
        found.append(moved(comm, model, collection, tables, 2))
    collection.embedding_bags["t1"].weight.requires_grad = False
    collection.embedding_bags["t0"].weight.requires_grad = True
    found.append(moved(comm, model, collection, tables, 2))
    with pytest.raises(ConfigError, match="table t0 is sharded, so no torch optimizer can have"):
        torch.optim.SGD([collection.embedding_bags["t0"].weight], 0.1)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_table_frozen_after_sharding_trains_again_and_one_frozen_before_says_why_not(
    ranks, world
):
    assert ranks.run(thawed, world) == [[["t0", "t1"], [], ["t1"], [], ["t1"], ["t0"]]] * world


def clipped_alike(comm):
    """The norm counts the gradients of trained tables alone, as it does on one process."""
    tables = make_tables(dims=DIMS, data_type="fp64")
    norms = []
    for when in ("before", "after"):
        model = parallel(
            comm,
            model_of(tables, ["t1"] if when == "before" else ()),
            sgd(0.2),
            make_plan("column_wise", tables, comm.world, column_width=2),
        )
        (collection,) = sharded_collections(model)
        if when == "after":
            collection.embedding_bags["t1"].weight.requires_grad_(False)
        optimizer = model.fused_optimizer
        for gradients in optimizer.table_gradients:
            gradients.defer(optimizer)
        step(model, comm, tables, 0)
        norms.append(clip_norm(list(model.parameters()), optimizer.table_gradients, 1.0, 2.0))
    head = model_of(tables, ["t1"], "cpu")
    losses = [head(batch_of(tables, 6, r)).square().mean() for r in range(comm.world)]
    (sum(losses) / comm.world).backward()
    wanted = torch.nn.utils.clip_grad_norm_([p for p in head.parameters() if p.requires_grad], 1.0)
    assert norms == [pytest.approx(float(wanted), rel=1e-9)] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_clipping_counts_gradients_of_trained_tables_alone(ranks, world):
    ranks.run(clipped_alike, world)


@pytest.mark.parametrize("when", ["before", "after"])
def test_rows_of_a_frozen_dynamic_table_stay_and_none_comes_or_goes(when):
    """Each stretch of its keys has room for one row, and later batches bring others."""
    table = EmbeddingBagConfig(
        name="t0", num_embeddings="dynamic", embedding_dim=4, dynamic={"max_rows": 64}
    )
    collection = EmbeddingBagCollection(tables=[table], device=META)
    model = DistributedModelParallel(
        collection.requires_grad_(when == "after"),
        sharders=[EmbeddingBagCollectionSharder(rowwise_adagrad(0.5))],
    )

    def look_up(first):
        ids = torch.arange(first, first + 6)
        return model(KeyedJaggedTensor(["t0"], ids, lengths=torch.ones(6).long())).values()

    if when == "after":
        look_up(0).sum().backward()
        model.requires_grad_(False)

    def rows():
        blocks = sharded_collections(model)[0].blocks()
        return sum(len(block.rows) for block in blocks if block.tensor == "weight")

    before = look_up(0).detach().clone()
    held = rows()
    for first in range(0, 90, 5):
        look_up(first).sum().backward()
    assert same_bits(look_up(0).detach(), before)
    assert rows() == held and bool(held) is (when == "after")


class Losses(Head):
    """The head, with losses as a train pipeline wants them."""

    def forward(self, features):
        out = super().forward(features)
        return out.square().mean(), out


def test_a_pipeline_leaves_tables_that_are_frozen_between_two_batches():
    tables = make_tables()
    collection = EmbeddingBagCollection(tables=tables, device=META)
    collection.embedding_bags["t1"].weight.requires_grad = False
    sharders = [EmbeddingBagCollectionSharder(sgd(0.3))]
    model = DistributedModelParallel(Losses(collection), sharders=sharders)
    (sharded,) = sharded_collections(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    batches = iter([batch_of(tables, 6, number) for number in range(6)])
    found = []
    for number in range(4):
        if number == 2:
            sharded.requires_grad_(False)
        before = whole_tensors(Comm(), sharded)
        pipeline.progress(batches)
        after = whole_tensors(Comm(), sharded)
        found.append(
            [
                name
                for name, _ in after
                if not same_bits(after[name, "weight"], before[name, "weight"])
            ]
        )
    assert [sorted(names) for names in found] == [["t0", "t2"], ["t0", "t2"], [], []]
    assert [g["tables"] for g in model.sparse_groups()] == [["t0", "t2"]]


def test_frozen_tables_have_no_state_in_the_prices_of_plans_and_no_param_group():
    tables = make_tables()
    model = model_of(tables, ["t0"])
    plan = EmbeddingShardingPlanner(rule=adagrad()).plan(model)
    rules = with_frozen_of(adagrad(), model)
    (held,) = bytes_per_rank(tables, plan, rules)
    assert held.state == held.weights | {"t0": 0} and held.weights["t0"] > 0
    everything = model.requires_grad_(False).layers.requires_grad_(True)
    assert len(everything) and with_frozen_of(sgd(), model).keys() == {"*", "t0", "t1", "t2"}
    sharded = parallel(Comm(), model, adagrad(), plan)
    assert sharded.sparse_groups() == []
    assert moved(Comm(), sharded, sharded_collections(sharded)[0], tables, 0) == []


def test_collections_of_sequences_and_of_other_types_freeze_alike():
    seen = EmbeddingConfig(name="s", num_embeddings=9, embedding_dim=4, feature_names=["c"])

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = EmbeddingBagCollection(tables=make_tables(data_type="fp64"), device=META)
            self.seen = EmbeddingCollection(tables=[seen], device=META).requires_grad_(False)

    model = DistributedModelParallel(Both(), sharders=[EmbeddingBagCollectionSharder(sgd(0.3))])
    ids = batch_of(make_tables(), 6, 0)
    before = model.module.seen(ids)["c"].values().detach().clone()
    pooled = model.module.bags(ids).values().detach().clone()
    (model.module.seen(ids)["c"].values().sum() + model.module.bags(ids).values().sum()).backward()
    assert same_bits(model.module.seen(ids)["c"].values().detach(), before)
    assert not same_bits(model.module.bags(ids).values().detach(), pooled)


def bytes_back(comm, kind, frozen):
    """The bytes that this rank sends in backward."""
    tables = make_tables()
    rules = with_frozen(sgd(0.1), frozen)
    collection = shard_bags(tables, make_plan(kind, tables, comm.world), comm, rules)
    values = collection(batch_of(tables, 6, comm.rank)).values()
    before = comm.bytes_sent
    values.sum().backward()
    return comm.bytes_sent - before


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_no_gradients_of_frozen_tables_are_sent(ranks, kind):
    found = [ranks.run(bytes_back, 2, kind, names)[0] for names in ([], ["t0"], ["t0", "t1", "t2"])]
    assert found[0] > found[1] > found[2] == 0


def sharded():
    tables = make_tables(dims=DIMS)
    return shard_model(model_of(tables), make_plan("row_wise", tables, 1), Comm(), sgd(0.2))


def test_a_sharded_model_is_gone_with_its_last_reference():
    gc.disable()
    try:
        model = sharded()
        tables = weakref.ref(model.collection.shared)
        del model
        assert tables() is None
    finally:
        gc.enable()


def test_a_copied_model_freezes_tables_of_its_own():
    model = sharded()
    copied = deepcopy(model)
    copied.requires_grad_(False)
    assert copied.collection.shared.frozen == {"t0", "t1", "t2"}
    assert model.collection.shared.frozen == set()
    weight = copied.collection.embedding_bags["t0"].weight
    assert not weight.requires_grad and weight.shared is copied.collection.shared
