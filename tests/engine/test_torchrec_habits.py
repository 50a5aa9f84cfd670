"""What scripts written for TorchRec do: what they ask of `DistributedModelParallel` is done,
refused or said."""

import inspect

import pytest
import torch
from engine.engine_cases import Head, batch_of, make_plan, make_tables, whole_tensors
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from recapp.console import note_once
from recapp.engine.sharded_collection import shard_model, sharded_collections, sharded_tables
from recapp.errors import ConfigError
from recapp.optim.optimizer import HybridOptimizer
from recapp.optim.rules import adagrad, adam, rowwise_adagrad, sgd
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.planner.embedding_planner import EmbeddingShardingPlanner
from recapp.tables.collections import EmbeddingBagCollection
from recapp.transport.communicator import Comm

pytestmark = pytest.mark.usefixtures("reference_kernels")
META = torch.device("meta")
NOTE = (
    "tables are updated in backward by rowwise_adagrad at its default learning rate 0.05; an "
    "optimizer over model.parameters() "
    "does not reach them: pass sharders=[EmbeddingBagCollectionSharder(rule)], or give "
    "model.sparse_groups() to HybridOptimizer\n"
)


def head(**settings):
    return Head(EmbeddingBagCollection(tables=make_tables(**settings), device=META, seed=3))


def step(model, seed=0):
    model(batch_of(make_tables(), 6, seed)).sum().backward()


def test_the_arguments_are_torchrecs_in_its_order():
    names = [*inspect.signature(DistributedModelParallel).parameters]
    assert names == [
        "module",
        "env",
        "device",
        "plan",
        "sharders",
        "init_data_parallel",
        "init_parameters",
        "transport",
        "graph",
    ]


class Env:
    def __init__(self, process_group):
        self.process_group = process_group


def on_a_group(comm, wrap):
    """A model on some ranks of the default group, trained by the dense part's optimiser and in
    backward."""
    model = DistributedModelParallel(
        head(), wrap(comm.group), sharders=[EmbeddingBagCollectionSharder(sgd(0.1))]
    )
    for seed in range(2):
        step(model, 10 * seed + comm.rank)
    same = comm.all_gather([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for other in same for a, b in zip(other, same[0], strict=True))
    return model.comm.world, model.plan.world_size, sharded_tables(model)[0].updates


def itself(group):
    return group


@pytest.mark.parametrize(
    ("world", "wrap"),
    [
        (2, itself),
        (2, Env),
        *(pytest.param(world, itself, marks=pytest.mark.full) for world in (1, 4)),
    ],
)
def test_env_says_which_ranks_train_together(ranks, world, wrap):
    assert ranks.run(on_a_group, world, wrap) == [(world, world, 2)] * world


@pytest.mark.parametrize("env", ["nccl", Env(None), 4])
def test_an_env_without_a_process_group_is_refused(env):
    with pytest.raises(
        ConfigError, match=f"env is a {type(env).__name__} without a process group: pass"
    ):
        DistributedModelParallel(head(), env)


def applied(model, kind, **arguments):
    _apply_optimizer_in_backward(kind, model.collection.parameters(), arguments)
    return model


def as_unsharded(comm, kind, arguments):
    """Sharded with the optimiser applied in backward, against torch itself doing so in one
    process."""
    tables = make_tables(data_type="fp64")
    plan = make_plan("mixed", tables, comm.world)
    model = DistributedModelParallel(
        applied(head(data_type="fp64"), kind, **arguments), comm.group, plan=plan
    )
    oracle = applied(
        Head(EmbeddingBagCollection(tables=tables, seed=3, sparse=True)), kind, **arguments
    )
    for number in range(3):
        model(batch_of(tables, 6, 10 * number + comm.rank)).sum().backward()
        (
            sum(oracle(batch_of(tables, 6, 10 * number + r)).sum() for r in range(comm.world))
            / comm.world
        ).backward()
    for (table, tensor), data in whole_tensors(comm, sharded_collections(model)[0]).items():
        if tensor == "weight":
            torch.testing.assert_close(
                data, oracle.collection.weight(table).detach(), rtol=1e-9, atol=1e-9
            )
    return sharded_tables(model)[0].update.rules[0].name


@pytest.mark.parametrize(
    ("kind", "arguments", "rule"),
    [
        (torch.optim.SGD, {"lr": 0.3}, "sgd"),
        (torch.optim.Adagrad, {"lr": 0.3, "eps": 1e-4}, "adagrad"),
        (torch.optim.SparseAdam, {"lr": 0.3}, "adam"),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_an_optimiser_applied_in_backward_trains_the_sharded_tables_as_torch_does(
    ranks, world, kind, arguments, rule
):
    assert ranks.run(as_unsharded, world, kind, arguments) == [rule] * world


def rule_of(model, sharders=None):
    return sharded_tables(DistributedModelParallel(model, sharders=sharders))[0].update.rules[0]


def test_a_sharder_without_a_rule_takes_the_optimiser_applied_in_backward():
    assert rule_of(
        applied(head(), torch.optim.SGD, lr=0.3), [EmbeddingBagCollectionSharder()]
    ) == sgd(0.3)
    assert rule_of(
        applied(head(), torch.optim.SGD, lr=0.3), [EmbeddingBagCollectionSharder(sgd(0.3))]
    ) == sgd(0.3)
    assert rule_of(head(), [EmbeddingBagCollectionSharder()]) == rowwise_adagrad()
    assert rule_of(
        head(), [EmbeddingBagCollectionSharder(adam(0.1)), EmbeddingBagCollectionSharder(adam(0.1))]
    ) == adam(0.1)


def test_a_sharder_and_an_optimiser_in_backward_that_differ_are_refused():
    told = r"the tables have sgd\(0.3\) by apply_optimizer_in_backward, but sgd\(0.1\) by "
    with pytest.raises(ConfigError, match=f"{told}sharders: say one of them"):
        rule_of(applied(head(), torch.optim.SGD, lr=0.3), [EmbeddingBagCollectionSharder(sgd(0.1))])
    with pytest.raises(
        ConfigError, match=f"{told}the rule that shards them"
    ):  # Lightning's strategy comes this way
        shard_model(
            applied(head(), torch.optim.SGD, lr=0.3),
            make_plan("row_wise", make_tables(), 1),
            Comm(),
            sgd(0.1),
        )


@pytest.mark.parametrize(
    ("sharders", "told"),
    [
        ([], r"sharders=\[\]: with none of them no table would be sharded"),
        (
            EmbeddingBagCollectionSharder(),
            "sharders is a EmbeddingBagCollectionSharder, not a list",
        ),
        ([sgd(0.1)], r"sharders\[0\] is a RowRule, no sharder"),
        (
            [EmbeddingBagCollectionSharder(), nn.Linear(1, 1)],
            r"sharders\[1\] is a Linear, no sharder",
        ),
        (
            [EmbeddingBagCollectionSharder(sgd(0.1)), EmbeddingBagCollectionSharder(adagrad(0.2))],
            r"sharders\[0\] has sgd\(0.1\) and sharders\[1\] adagrad\(0.2, 1e-10\): one sharder "
            r"shards all tables",
        ),
    ],
)
def test_sharders_that_cannot_all_be_used_are_refused_by_model_and_planner(sharders, told):
    for use in (
        lambda: DistributedModelParallel(head(), sharders=sharders),
        lambda: EmbeddingShardingPlanner().plan(head(), sharders),
    ):
        with pytest.raises(ConfigError, match=told):
            use()


def said(capsys):
    return [
        line
        for line in capsys.readouterr().err.splitlines(keepends=True)
        if "tables are updated" in line
    ]


def test_that_an_optimiser_of_parameters_leaves_the_tables_out_is_said_once_with_the_rate(capsys):
    note_once.cache_clear()
    models = [DistributedModelParallel(head()) for _ in range(2)]
    optimizer = torch.optim.Adam([p for m in models for p in m.parameters()], 0.01)
    assert said(capsys) == []
    for model in models:
        for _ in range(2):
            optimizer.zero_grad()
            step(model)
            optimizer.step()
    assert said(capsys) == [NOTE]


def through_sparse_groups():
    model = DistributedModelParallel(head())
    HybridOptimizer(torch.optim.Adam(model.parameters(), 0.01), model.sparse_groups())
    return model


@pytest.mark.parametrize(
    "make",
    [
        through_sparse_groups,
        lambda: DistributedModelParallel(
            head(), sharders=[EmbeddingBagCollectionSharder(rowwise_adagrad())]
        ),
        lambda: DistributedModelParallel(applied(head(), torch.optim.SGD, lr=0.3)),
    ],
    ids=["sparse_groups", "sharder", "in_backward"],
)
def test_nothing_is_said_of_a_rate_that_somebody_chose(capsys, make):
    note_once.cache_clear()
    step(make())
    assert said(capsys) == []


def test_nothing_is_said_where_nothing_trains(capsys):
    note_once.cache_clear()
    model = DistributedModelParallel(head())
    with torch.no_grad():
        model(batch_of(make_tables(), 6, 0))
    model(batch_of(make_tables(), 6, 0))
    assert said(capsys) == []


def test_two_backwards_update_tables_twice_as_the_docstring_says():
    model = DistributedModelParallel(head(), sharders=[EmbeddingBagCollectionSharder(sgd(0.1))])
    step(model)
    step(model)
    assert sharded_tables(model)[0].updates == 2
    assert "two backwards before one" in " ".join(DistributedModelParallel.__doc__.split())


def dense_in_backward(comm):
    model = head()
    _apply_optimizer_in_backward(torch.optim.SGD, model.layers.parameters(), {"lr": 0.1})
    told = (
        "layers.0.weight has an optimizer by apply_optimizer_in_backward, which torch's DDP "
        "supports on GPUs only"
    )
    with pytest.raises(ConfigError, match=told):
        DistributedModelParallel(model, comm.group)


def test_an_optimiser_in_backward_of_the_dense_part_is_refused_where_ddp_cannot_run_it(ranks):
    ranks.run(dense_in_backward, 2)


def test_alone_an_optimiser_in_backward_of_the_dense_part_runs_as_torchs():
    model = head()
    _apply_optimizer_in_backward(torch.optim.SGD, model.layers.parameters(), {"lr": 0.1})
    before = model.layers[0].weight.detach().clone()
    step(DistributedModelParallel(model, sharders=[EmbeddingBagCollectionSharder(sgd(0.1))]))
    assert not torch.equal(before, model.layers[0].weight)
