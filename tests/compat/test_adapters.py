"""The small adapters: environments, the type of what travels."""

import pytest
import torch
from engine.engine_cases import batch_of, make_tables

from recapp.compat.torchrec.planning import (
    CommType,
    QCommsConfig,
    ShardingEnv,
    get_local_rank,
    get_local_size,
    get_qcomm_codecs_registry,
    row_wise,
    shard,
    shard_modules,
    table_wise,
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
