"""Tables that do not require gradients: their rows stay, and the others train as on one process."""

from itertools import product

import pytest
import torch
from engine.engine_cases import Head, batch_of, make_plan, make_tables, same_bits, whole_tensors
from torch import nn

from recapp.compat.train_pipeline import TrainPipelineSparseDist
from recapp.engine.model_parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.engine.sharded_collection import sharded_collections, sharded_tables
from recapp.errors import ConfigError
from recapp.optim.clipping import clip_norm
from recapp.optim.optimizer import HybridOptimizer
from recapp.optim.rules import adagrad, adam, rowwise_adagrad, sgd
from recapp.planner.rank_memory import bytes_per_rank
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig
from recapp.tables.embedding import EmbeddingCollection
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.transport.communicator import Comm

META = torch.device("meta")
RULES = {
    "adagrad": (adagrad(0.3, 1e-10), lambda params: torch.optim.Adagrad(params, 0.3, eps=1e-10)),
    "l2": (
        adam(0.1, l2_all_rows=0.01),
        lambda params: torch.optim.Adam(params, 0.1, weight_decay=0.01),
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
    tables = make_tables(dims=(8, 8, 4), data_type="fp64")  # two of them share a store
    names = ["t1", "t2"]
    model = parallel(
        comm,
        model_of(tables, names if when == "before" else ()),
        RULES[name][0],
        make_plan(kind, tables, comm.world),
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
    tables = make_tables(dims=(8, 8, 4), data_type="fp64")
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
    start = EmbeddingBagCollection(tables=make_tables(dims=(8, 8, 4), data_type="fp64"), seed=3)
    for tensors in found:
        for table in ("t1", "t2"):
            assert same_bits(tensors[table, "weight"], start.weight(table).detach())
        torch.testing.assert_close(tensors["t0", "weight"], wanted["t0"], rtol=1e-9, atol=1e-9)
        assert same_bits(tensors["t0", "weight"], found[0]["t0", "weight"])
    assert {table for table, tensor in found[0] if tensor != "weight"} == {"t0"}, "no state"
    assert {table for table, tensor in found[1] if tensor != "weight"} == {"t0", "t1", "t2"}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("world", [1, 2])
def test_their_rows_stay_and_the_others_train_as_on_one_process(ranks, world, name):
    ranks.run(compared, world, name)
