"""The small adapters: awaitables, environments, the type of what travels."""

import copy
import operator
import pickle

import pytest
import torch
from engine.engine_cases import batch_of, make_tables

from recapp.compat.torchrec.planning import CommType, QCommsConfig, get_qcomm_codecs_registry
from recapp.compat.torchrec.plans_by_hand import (
    ShardingEnv,
    get_local_rank,
    get_local_size,
    row_wise,
    shard,
    shard_modules,
    table_wise,
)
from recapp.compat.torchrec.train_pipeline import (
    Awaitable,
    LazyAwaitable,
    LazyGetItemMixin,
    LazyNoWait,
    NoWait,
)
from recapp.compat.torchrec.wrapped_collections import (
    ManagedCollisionEmbeddingBagCollectionSharder,
)
from recapp.console import note_once
from recapp.engine.sharded_collection import ShardedEmbeddingBagCollection
from recapp.errors import ConfigError
from recapp.parallel import EmbeddingBagCollectionSharder
from recapp.tables.collections import EmbeddingBagCollection

pytestmark = pytest.mark.usefixtures("reference_kernels")


class Counted(LazyAwaitable[torch.Tensor]):
    """Counts how often it was waited for."""

    times = 0

    def _wait_impl(self):
        self.times += 1
        return torch.ones(2, 3)


def test_a_lazy_value_is_waited_for_once_and_when_it_is_read():
    lazy = Counted()
    assert lazy.times == 0 and isinstance(lazy, Awaitable)
    assert lazy.shape == (2, 3) and lazy.wait() is lazy.wait() and lazy.times == 1
    assert lazy._result is lazy.wait()
    with pytest.raises(AttributeError, match="Counted has no attribute '__secret__'"):
        getattr(lazy, "__secret__")  # noqa: B009
    assert NoWait("there").wait() == "there"


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.add(x, 2 * torch.ones(2, 3)),
        lambda x: torch.cat([x, torch.ones(2, 3)], dim=1),
        lambda x: torch.nn.functional.linear(input=x, weight=torch.ones(1, 3)),
        lambda x: 2 * x - x / 3 + x**2,
        lambda x: x @ torch.ones(3, 1),
        lambda x: torch.ones(4, 2) @ x,
        lambda x: torch.ones(2, 3) - x,
        lambda x: -x,
        lambda x: abs(x - 3),
        lambda x: x == 1,
        lambda x: x < torch.tensor([0, 1, 2]),
        lambda x: x[0, 1:],
        lambda x: torch.stack(list(x)[::-1]),
        lambda x: torch.tensor([len(x), x.sum().item(), float(x[0, 0]), x.numel()]),
    ],
)
def test_a_lazy_value_computes_as_its_value(compute):
    assert torch.equal(compute(Counted()), compute(torch.ones(2, 3)))


@pytest.mark.parametrize(
    "function", ["and_", "or_", "xor", "lshift", "floordiv", "mod", "pow", "le", "ne"]
)
def test_whole_numbers_that_are_lazy_compute_on_either_side(function):
    compute = getattr(operator, function)
    assert compute(LazyNoWait(13), 3) == compute(13, LazyNoWait(3)) == compute(13, 3)
    assert compute(LazyNoWait(13), LazyNoWait(3)) == compute(13, 3)


def test_a_lazy_dict_is_read_as_a_dict():
    lazy = LazyNoWait({"t1": torch.ones(2), "t2": torch.zeros(2)})
    assert list(lazy) == ["t1", "t2"] and "t1" in lazy and "t3" not in lazy and len(lazy) == 2
    assert lazy and torch.equal(lazy["t1"] + 2, torch.full((2,), 3.0))
    assert list(lazy.keys()) == ["t1", "t2"] and lazy in {lazy}


def test_a_lazy_value_is_copied_and_pickled_without_waiting():
    lazy = LazyNoWait(torch.arange(3))
    for other in (pickle.loads(pickle.dumps(lazy)), copy.deepcopy(lazy)):
        assert other._result is None and torch.equal(other.wait(), torch.arange(3))


class CountedParts(LazyGetItemMixin[str, torch.Tensor], LazyAwaitable[dict[str, torch.Tensor]]):
    """Counts how often it was waited for; its parts are lazy."""

    times = 0

    def _wait_impl(self):
        self.times += 1
        return {"a": torch.ones(2), "b": torch.full((2,), 2.0)}


def test_lazy_parts_wait_for_the_whole_once():
    whole = CountedParts()
    whole.callbacks.append(lambda parts: {name: 10 * part for name, part in parts.items()})
    a = whole["a"]
    b = whole["b"]
    assert isinstance(a, LazyAwaitable) and whole.times == 0
    assert torch.equal(torch.add(a, b), torch.full((2,), 30.0)) and whole.times == 1


class Forgets(LazyAwaitable[torch.Tensor]):
    def __init__(self):
        pass

    def _wait_impl(self):
        return torch.ones(2)


def test_a_lazy_class_that_forgets_its_base_is_one_line():
    with pytest.raises(RuntimeError, match=r"Forgets has not been initialized properly: have its"):
        torch.ones(2) + Forgets()


class Twice(torch.nn.Module):
    def forward(self, x):
        return torch.add(LazyNoWait(x), x * 3)


def test_torchs_fx_traces_that_an_awaitable_is_made():
    traced = torch.fx.symbolic_trace(Twice())
    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 4.0))


@pytest.mark.parametrize(
    ("forward", "backward", "payload"),
    [
        (CommType.FP32, CommType.FP32, None),
        (CommType.FP16, CommType.FP16, torch.float16),
        (CommType.BF16, CommType.BF16, torch.bfloat16),
        (CommType.FP16, CommType.BF16, torch.bfloat16),
        (CommType.FP16, CommType.FP32, None),
    ],
)
def test_what_travels_has_one_type_and_a_note_says_when_two_were_named(
    forward, backward, payload, capsys
):
    note_once.cache_clear()
    config = QCommsConfig(forward_precision=forward, backward_precision=backward)
    sharder = EmbeddingBagCollectionSharder(
        qcomm_codecs_registry=get_qcomm_codecs_registry(qcomms_config=config)
    )
    assert sharder.payload is payload
    assert get_qcomm_codecs_registry(config, device=torch.device("cuda")) == (
        get_qcomm_codecs_registry(config)
    )
    assert ("recapp sends both as" in capsys.readouterr().err) == (forward is not backward)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QCommsConfig(CommType.FP8), "forward_precision=CommType.FP8: must be one of"),
        (lambda: QCommsConfig(backward_loss_scale=2.0), "recapp has no loss scale"),
        (
            lambda: get_qcomm_codecs_registry(QCommsConfig(), comm_ops=[1]),
            "comm_ops has no effect, because all messages of vectors have one type",
        ),
        (
            lambda: EmbeddingBagCollectionSharder(qcomm_codecs_registry={"a": 1}),
            "make it with recapp's get_qcomm_codecs_registry",
        ),
    ],
)
def test_other_types_and_scales_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_empty_registry_and_one_of_fp32_ask_for_nothing():
    fp32 = get_qcomm_codecs_registry(QCommsConfig())
    assert fp32 is None
    bags = EmbeddingBagCollectionSharder(qcomm_codecs_registry={})
    assert bags.payload is None
    wrapped = ManagedCollisionEmbeddingBagCollectionSharder(bags, qcomm_codecs_registry={})
    assert wrapped.payload is None


def local_numbers(comm):
    env = ShardingEnv.from_process_group(comm.group)
    return env.world_size, env.rank, get_local_rank(), get_local_size(), get_local_size(2)


def test_an_environment_has_the_ranks_of_its_group(ranks, monkeypatch):
    for number, found in enumerate(ranks.run(local_numbers, 4)):
        assert found == (4, number, number, 4, 2)
    alone = ShardingEnv.from_local(1, 0)
    assert (alone.world_size, alone.rank, alone.process_group) == (1, 0, None)


def sharded_by_hand(comm, one_cut):
    tables = make_tables()
    whole = EmbeddingBagCollection(tables, seed=3)
    plan = row_wise() if one_cut else {t.name: table_wise(rank=1) for t in tables}
    env = ShardingEnv.from_process_group(comm.group)
    sharded = shard(whole, plan, env, torch.device("cpu"))
    assert isinstance(sharded, ShardedEmbeddingBagCollection)
    batch = batch_of(tables, 5, comm.rank)
    assert torch.equal(sharded(batch).values(), whole(batch).values())
    return {t: s.ranks for t, s in sharded.plan.tables.items()}


@pytest.mark.parametrize("one_cut", [True, False])
def test_one_collection_is_sharded_as_said(ranks, one_cut):
    for found in ranks.run(sharded_by_hand, 2, one_cut):
        assert set(map(tuple, found.values())) == {(0, 1) if one_cut else (1,)}


def test_ready_shards_and_cuts_may_stand_side_by_side():
    tables = make_tables()
    whole = EmbeddingBagCollection(tables, seed=3)
    ready = shard(whole, row_wise(), ShardingEnv.from_local(1, 0)).plan.tables
    mixed = {**ready, "t1": table_wise(rank=0)}
    batch = batch_of(tables, 5, 0)
    sharded = shard(whole, mixed, ShardingEnv.from_local(1, 0))
    assert torch.equal(sharded(batch).values(), whole(batch).values())
    assert [s.sharding_type for s in sharded.plan.tables.values()] == [
        "row_wise",
        "table_wise",
        "row_wise",
    ]


def test_modules_are_sharded_in_place_without_ddp():
    model = torch.nn.ModuleDict({"bags": EmbeddingBagCollection(make_tables(), seed=3)})
    assert shard_modules(model) is model
    assert isinstance(model["bags"], ShardedEmbeddingBagCollection)
    assert isinstance(shard_modules(EmbeddingBagCollection(make_tables())), type(model["bags"]))
