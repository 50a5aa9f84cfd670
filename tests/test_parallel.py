"""Sharding as a function applied to a finished model, and DDP around the rest."""

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine.engine_cases import Head, batch_of, make_plan, make_tables, same_bits, whole_tensors
from parity.cases import RowwiseAdagrad
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from recapp.data_parallel import group_of_trainers, wrap_dense
from recapp.engine.sharded_collection import (
    ShardedEmbeddingBagCollection,
    embedding_tables,
    shard_model,
    sharded_collections,
    sharded_tables,
)
from recapp.errors import ConfigError, PlanError
from recapp.optim.optimizer import HybridOptimizer
from recapp.optim.rules import rowwise_adagrad, sgd
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.tables.collections import EmbeddingBagCollection
from recapp.transport.communicator import Comm

META = torch.device("meta")


def click_loss(logits):
    return nn.functional.binary_cross_entropy_with_logits(
        logits, (torch.arange(len(logits)) % 2).to(logits.dtype)
    )


def script(comm, kind):
    """The class's docstring as a script: 4 ranks of the default group, against one process on the
    concatenated batch.
    """
    tables = make_tables(data_type="fp64")
    plan = None if kind is None else make_plan(kind, tables, 4)
    model = DistributedModelParallel(
        Head(EmbeddingBagCollection(tables=tables, device=META, seed=3)), plan=plan
    )
    optimizer = HybridOptimizer(torch.optim.Adam(model.parameters(), 0.01), model.sparse_groups())
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    oracle = Head(EmbeddingBagCollection(tables=tables, seed=3))
    dense = torch.optim.Adam(oracle.layers.parameters(), 0.01)
    sparse = RowwiseAdagrad(oracle.collection.parameters(), 0.05)
    for step in range(4):
        dense.param_groups[0]["lr"] = 0.01 / (1 + step)
        sparse.param_groups[0]["lr"] = 0.05 / (1 + step)
        optimizer.zero_grad()
        click_loss(model(batch_of(tables, 6, 10 * step + comm.rank))).backward()
        grads = comm.all_gather([p.grad for p in model.parameters()])
        assert all(
            torch.equal(a, b) for other in grads for a, b in zip(other, grads[0], strict=True)
        )
        optimizer.step()
        schedule.step()
        for o in (dense, sparse):
            o.zero_grad()
        (
            sum(click_loss(oracle(batch_of(tables, 6, 10 * step + r))) for r in range(4)) / 4
        ).backward()
        dense.step()
        sparse.step()
    (collection,) = sharded_collections(model)
    for (table, tensor), data in whole_tensors(model.comm, collection).items():
        if tensor == "weight":
            torch.testing.assert_close(
                data, oracle.collection.weight(table).detach(), rtol=1e-9, atol=1e-9
            )
    ours = dict(model.module.layers.named_parameters())
    for name, p in oracle.layers.named_parameters():
        torch.testing.assert_close(ours[name], p, rtol=1e-9, atol=1e-9)
    (group,) = model.sparse_groups()
    assert group["lr"] == pytest.approx(0.05 / 5) and group["name"] == "sparse/rowwise_adagrad"
    return repr(model)


@pytest.mark.parametrize("kind", [None, "row_wise", "column_wise"])
def test_a_plain_script_trains_as_one_process_with_a_schedule_that_reaches_the_tables(ranks, kind):
    ranks.run(script, 4, kind)


def test_repr_shows_which_tables_lie_where(ranks):
    for rank, text in enumerate(ranks.run(script, 4, "mixed")):
        plan = make_plan("mixed", make_tables(), 4)
        assert f"plan=mixed, rank {rank} of 4, cpu" in text
        for name, s in plan.tables.items():
            shape = {"t0": "131 x 16", "t1": "40 x 5", "t2": "7 x 12"}[name]
            assert f"{name}: {shape}, {s.sharding_type}, {s.mode}, " in text


def alone(comm):
    model = Head(EmbeddingBagCollection(tables=make_tables(), device=META))
    made = DistributedModelParallel(model, sharders=[EmbeddingBagCollectionSharder(sgd(0.5))])
    return made.comm.world, made.plan.world_size, sharded_tables(made)[0].update.rules[0].name


def test_the_sharder_says_the_rule_and_the_plan_is_made_for_the_default_group(ranks):
    assert ranks.run(alone, 4) == [(4, 4, "sgd")] * 4


def groups_of_trainers(comm):
    made = [group_of_trainers(timedelta(seconds=seconds)) for seconds in (50, 50, 60)]
    return made[0] is made[1], made[0] is made[2], dist.get_world_size(made[0])


def test_trainers_of_several_ranks_share_a_group_beside_the_default_one(ranks):
    assert ranks.run(groups_of_trainers, 4) == [(True, False, 4)] * 4


SCRIPT = """
import os, torch, torch.distributed as dist
from recapp.parallel import DistributedModelParallel
from recapp.optim.optimizer import HybridOptimizer
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.collections import EmbeddingBagCollection

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=200_000, embedding_dim=8, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        self.top = torch.nn.Linear(8, 1)

    def forward(self, features):
        return self.top(self.bags(features).values()).squeeze(1)

dist.init_process_group("gloo")
model = DistributedModelParallel(Model())
optimizer = HybridOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.sparse_groups())
ids = KeyedJaggedTensor(["f"], torch.arange(64) * 3000, None, torch.ones(64, dtype=torch.int64))
for step in range(30):
    optimizer.zero_grad()
    clicks = (torch.arange(64) % 2).float()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids), clicks)
    loss.backward()
    optimizer.step()
strips = "t: 200,000 x 8, row_wise" in repr(model)
rank = f"rank {dist.get_rank()} of {dist.get_world_size()}"
os.write(1, f"{rank}: loss {loss.item():.3f} {strips}\\n".encode())  # whole lines: both write
dist.destroy_process_group()
"""


@pytest.mark.full
def test_an_ordinary_torchrun_script_trains(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(tmp_path / "script.py"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    told = re.findall(r"rank (\d) of 2: loss (\S+) True", done.stdout)
    assert sorted(rank for rank, _ in told) == ["0", "1"], done.stderr
    assert all(float(loss) < 0.3 for _, loss in told)


@pytest.mark.full
def test_without_any_process_group_it_is_one_rank_and_no_ddp():
    tables = make_tables()
    model = DistributedModelParallel(Head(EmbeddingBagCollection(tables=tables, device=META)))
    assert isinstance(model.module, Head) and model.comm.world == 1
    click_loss(model(batch_of(tables, 6, 0))).backward()
    assert sharded_tables(model)[0].updates == 1
    assert "t0: 131 x 16, table_wise, unique, rank 0" in repr(model)


def after_ddp(comm, wrap):
    """What a rank's shards hold after DDP wrapped the model; each rank filled them with its own
    number.
    """
    tables = make_tables(rows=(8, 4, 2))
    model = Head(EmbeddingBagCollection(tables=tables, device=META))
    shard_model(model, make_plan("row_wise", tables, comm.world), comm, sgd())
    collection = model.collection
    for store in collection.shared.stores:
        store.weights.fill_(comm.rank + 1)
    wrapped = wrap(model, comm)
    assert isinstance(wrapped, DistributedDataParallel)
    found = {float(x) for store in collection.shared.stores for x in store.weights.unique()}
    click_loss(wrapped(batch_of(tables, 6, comm.rank, one_hot=True))).backward()
    assert collection.shared.updates == 1
    return found


def recapps(model, comm):
    return wrap_dense(model, comm, process_group=comm.group)


def plain(model, comm):
    return DistributedDataParallel(model, process_group=comm.group)


def test_ddp_leaves_the_shards_of_every_rank_alone(ranks):
    assert ranks.run(after_ddp, 2, recapps) == [{1.0}, {2.0}]
    assert ranks.run(after_ddp, 2, plain) == [{1.0}, {2.0}]


def taken_over(comm):
    """A collection on a real device keeps its rows, trained ones for example."""
    tables = make_tables()
    plain = EmbeddingBagCollection(tables=tables)
    with torch.no_grad():
        for t in tables:
            plain.weight(t.name).normal_(generator=torch.Generator().manual_seed(8))
    model = Head(plain)
    shard_model(model, make_plan("random", tables, comm.world), comm, sgd())
    whole = whole_tensors(comm, model.collection)
    return all(same_bits(whole[t.name, "weight"], plain.weight(t.name).detach()) for t in tables)


def test_rows_of_a_real_collection_are_taken_over(ranks):
    assert ranks.run(taken_over, 2) == [True, True]


class Two(nn.Module):
    """Two collections, one of them in two places."""

    def __init__(self):
        super().__init__()
        self.first = EmbeddingBagCollection(make_tables()[:2], device=META, seed=4)
        self.inner = nn.Sequential(EmbeddingBagCollection(make_tables()[2:], device=META, seed=5))
        self.again = self.first


def whole_plan():
    return make_plan("table_wise", make_tables(), 1)


def test_a_collection_that_stands_in_two_places_becomes_one_sharded_collection():
    model = Two()
    shard_model(model, whole_plan(), Comm(), sgd())
    assert isinstance(model.again, ShardedEmbeddingBagCollection) and model.again is model.first
    assert [[t.name for t in c.tables()] for c in sharded_collections(model)] == [
        ["t0", "t1"],
        ["t2"],
    ]
    again = EmbeddingBagCollection(make_tables()[2:], seed=5)
    assert same_bits(next(model.inner[0].blocks()).data, again.weight("t2").detach())
    shard_model(model, whole_plan(), Comm(), sgd())  # what is sharded stays
    assert len(sharded_collections(model)) == 2


def test_a_plan_must_name_the_tables_of_the_whole_model():
    plan = whole_plan()
    other = make_plan("table_wise", make_tables(), 1).tables
    lacking = type(plan)({k: v for k, v in other.items() if k != "t2"}, 1)
    with pytest.raises(PlanError, match="the plan has no entry for table t2"):
        shard_model(Two(), lacking, Comm(), sgd())
    foreign = type(plan)({**other, "t9": other["t0"]}, 1)
    with pytest.raises(
        PlanError,
        match="the plan shards table t9, which the model does not have; known: t0, t1, t2",
    ):
        shard_model(Two(), foreign, Comm(), sgd())


def test_a_model_that_is_a_collection_becomes_its_twin():
    collection = EmbeddingBagCollection(make_tables(), seed=4)
    twin = shard_model(collection, whole_plan(), Comm(), sgd())
    batch = batch_of(make_tables(), 5, 0)
    assert torch.equal(twin(batch).values(), collection(batch).values())


def test_equal_table_names_are_refused():
    twins = nn.ModuleList([EmbeddingBagCollection(make_tables(), device=META) for _ in range(2)])
    with pytest.raises(ConfigError, match="two tables are called t0"):
        embedding_tables(twins)


def test_nothing_sharded_is_a_parameter_or_buffer_that_ddp_would_reduce_or_broadcast():
    model = Two()
    shard_model(model, whole_plan(), Comm(), rowwise_adagrad())
    assert list(model.parameters()) == [] and list(model.buffers()) == []
    assert wrap_dense(model, Comm()) is model
