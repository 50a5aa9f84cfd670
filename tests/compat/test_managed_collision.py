"""Managed collisions as programs for TorchRec write them, with other import lines alone."""

import pytest
import torch
from recapp.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recapp.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from recapp.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder,
    ShardedManagedCollisionEmbeddingBagCollection,
)
from recapp.distributed.mc_modules import ManagedCollisionCollectionSharder
from recapp.distributed.model_parallel import DistributedModelParallel
from recapp.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recapp.distributed.types import ShardingEnv, ShardingPlan
from recapp.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recapp.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recapp.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from recapp.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from recapp.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torch import nn

from recapp.compat.torchrec.optimizers import RowWiseAdagrad
from recapp.engine.sharded_state import gathered_state_dict
from recapp.errors import ConfigError
from recapp.optim.rules import sgd
from recapp.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

pytestmark = pytest.mark.usefixtures("reference_kernels")

ROWS = 128
EMPTY = 2**63 - 1
KEYS = ["feature_0", "feature_1"]


def tables(kind=EmbeddingBagConfig, rows=ROWS, **settings):
    return [
        kind(
            name=f"table_{k}",
            feature_names=[key],
            embedding_dim=8,
            num_embeddings=rows,
            **settings,
        )
        for k, key in enumerate(KEYS)
    ]


def managed(configs, policy=None, device="meta"):
    modules = {
        t.name: MCHManagedCollisionModule(
            zch_size=t.num_embeddings,
            input_hash_size=4000,
            device=torch.device(device),
            eviction_interval=2,
            eviction_policy=policy or LRU_EvictionPolicy(),
        )
        for t in configs
    }
    return ManagedCollisionCollection(managed_collision_modules=modules, embedding_configs=configs)


class SparseArch(nn.Module):
    def __init__(self, configs, device, policy=None):
        super().__init__()
        self._mc_ebc = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=configs, device=device), managed(configs, policy)
        )
        self.over = nn.Linear(16, 1)

    def forward(self, kjt: KeyedJaggedTensor):
        pooled, remapped = self._mc_ebc(kjt)
        assert remapped is None
        return self.over(torch.cat([pooled[key] for key in KEYS], dim=1)).squeeze(1)


def batch_of(step, rank, most=2**62, rows=64):
    """Ids of two features, of any size, many of them new and some common for some time only; a
    label says whether the first is odd.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    often = torch.randint(0, 12, (rows,), generator=generator)
    rare = torch.randint(-most, most, (rows,), generator=generator)
    if step % 8 < 4:
        rare[::2] = torch.randint(-40, 40, (len(rare[::2]),), generator=generator)
    kjt = KeyedJaggedTensor.from_lengths_sync(
        KEYS, torch.cat([often, rare]), torch.ones(2 * rows, dtype=torch.int64)
    )
    return kjt, (often % 2).float()


CUTS = {
    "row_wise": row_wise,
    "data_parallel": data_parallel,
    "table_wise": lambda: table_wise(rank=0),
    "column_wise": lambda: column_wise(ranks=[1, 0]),
}


def trained(comm, kinds, policy=None, steps=30):
    """Train as TorchRec's program does; return the losses, what is answered then, and the number
    of slots without an id by table.
    """
    torch.manual_seed(0)
    arch = SparseArch(tables(), torch.device("meta"), policy)
    weights = [t.weight for t in arch._mc_ebc._embedding_bag_collection.embedding_bags.values()]
    apply_optimizer_in_backward(RowWiseAdagrad, weights, {"lr": 0.1})
    plan = kinds and ShardingPlan(
        {
            "_mc_ebc": construct_module_sharding_plan(
                arch._mc_ebc,
                per_param_sharding={f"table_{k}": CUTS[kind]() for k, kind in enumerate(kinds)},
                world_size=comm.world,
            )
        }
    )
    model = DistributedModelParallel(
        arch,
        ShardingEnv.from_process_group(comm.group),
        torch.device("cpu"),
        plan,
        [ManagedCollisionEmbeddingBagCollectionSharder()],
    )
    assert isinstance(model.module._mc_ebc, ShardedManagedCollisionEmbeddingBagCollection)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        kjt, label = batch_of(step, comm.rank)
        loss = nn.functional.binary_cross_entropy_with_logits(model(kjt), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        answers = [model(batch_of(step, 0)[0]) for step in range(steps)]
    open_slots = model.module._mc_ebc._managed_collision_collection.open_slots()
    return losses, answers, {name: count.item() for name, count in open_slots.items()}


def first_and_last(losses):
    return torch.stack(losses[:3]).mean(), torch.stack(losses[-3:]).mean()


@pytest.mark.parametrize("world", [1, 2])
def test_a_program_trains_within_the_rows_that_it_gave_its_tables(ranks, world):
    for losses, _, open_slots in ranks.run(trained, world, None):
        first, last = first_and_last(losses)
        assert last < 0.5 * first
        assert open_slots == {"table_0": ROWS - 1 - 12, "table_1": 0}


@pytest.mark.parametrize("policy", [LRU_EvictionPolicy(), LFU_EvictionPolicy()], ids=["lru", "lfu"])
def test_losses_answers_and_slots_are_equal_under_other_plans(ranks, policy):
    wanted = ranks.run(trained, 2, ("table_wise", "table_wise"), policy, 10)
    for kinds in (("row_wise", "column_wise"), ("data_parallel", "row_wise")):
        for one, other in zip(wanted, ranks.run(trained, 2, kinds, policy, 10), strict=True):
            assert all(map(torch.equal, one[0] + one[1], other[0] + other[1]))
            assert one[2] == other[2]


def test_the_policies_keep_other_rows(ranks):
    lru, lfu = (
        ranks.run(trained, 1, None, policy, 10)[0]
        for policy in (LRU_EvictionPolicy(), LFU_EvictionPolicy())
    )
    assert torch.equal(lru[0][0], lfu[0][0])
    assert not all(map(torch.equal, lru[1], lfu[1]))


def test_a_sequence_has_a_vector_for_each_id():
    configs = tables(EmbeddingConfig)
    sequences = ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=configs, device="meta", need_indices=True),
        managed(configs, LFU_EvictionPolicy()),
    )
    sharder = ManagedCollisionEmbeddingCollectionSharder(
        mc_sharder=ManagedCollisionCollectionSharder(),
        fused_params={"optimizer": "sgd", "learning_rate": 0.5},
    )
    model = DistributedModelParallel(sequences, device="cpu", sharders=[sharder])
    kjt, _ = batch_of(0, 0)
    model(kjt)  # after every second step ids get slots
    found, remapped = model(kjt)
    assert remapped is None and list(found) == KEYS
    assert isinstance(found["feature_0"], JaggedTensor)
    assert found["feature_0"].values().shape == (64, 8)
    assert int(found["feature_1"].weights().max()) < ROWS, "slots are the indices of the rows"
    found["feature_0"].values().sum().backward()
    model.eval()
    learned = model(kjt)[0]["feature_0"].values()
    counts = torch.bincount(kjt["feature_0"].values())[kjt["feature_0"].values()]
    step = found["feature_0"].values() - learned
    torch.testing.assert_close(step, (0.5 * counts)[:, None].expand(64, 8))


@pytest.mark.parametrize("sharded", [False, True])
def test_rows_and_numbers_of_a_frozen_table_stay(sharded):
    configs = tables(rows=8)
    bags = EmbeddingBagCollection(tables=configs)
    managed_bags = ManagedCollisionEmbeddingBagCollection(
        bags, managed(configs, device="cpu"), return_remapped_features=True
    )
    model = DistributedModelParallel(managed_bags, device="cpu") if sharded else managed_bags
    held = model.module if sharded else model

    def state():
        found = gathered_state_dict(model) if sharded else model.state_dict()
        return {key: value.clone() for key, value in found.items()}

    def look(steps):
        for step in steps:
            model(batch_of(step, 0)[0])

    look(range(4))
    bags = held._embedding_bag_collection
    bags.embedding_bags["table_0"].weight.requires_grad_(False)
    blocks = [b.data for b in bags.blocks()] if sharded else [p.data for p in bags.parameters()]
    for rows in blocks:
        rows.fill_(9)  # no start value
    before = state()
    look(range(4, 8))
    after = state()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved and all("table_1" in key for key in moved), moved
    assert any("embedding_bags.table_1" in key for key in moved)


def by_sharder(comm):
    """Sharded by hand, as the top module, with the settings of the collection."""
    configs = tables()
    bags = EmbeddingBagCollection(tables=configs, is_weighted=True, seed=5)
    module = ManagedCollisionEmbeddingBagCollection(bags, managed(configs))
    env = ShardingEnv.from_process_group(comm.group)
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder(fused_params={"optimizer": "sgd", "learning_rate": 0.25})
    )
    plan = construct_module_sharding_plan(
        module, {"table_0": row_wise(), "table_1": data_parallel()}, world_size=comm.world
    )
    assert list(sharder.shardable_parameters(module)) == ["table_0", "table_1"]
    sharded = sharder.shard(module, plan, env, torch.device("cpu"))
    assert type(sharded) is sharder.module_type and module._embedding_module is not None
    assert sharded._embedding_bag_collection is not module._embedding_bag_collection
    kjt = KeyedJaggedTensor(
        KEYS, torch.tensor([7, -1, 7]), torch.tensor([2.0, 1, 1]), torch.tensor([1, 1, 1, 0])
    )
    pooled, remapped = sharded(kjt)
    assert isinstance(pooled.wait(), KeyedTensor) and remapped is None
    assert sharded._embedding_bag_collection.shared.param_groups[0]["lr"] == 0.25
    return pooled.values().detach()


def test_a_module_is_sharded_by_its_sharder_with_the_settings_of_its_collection(ranks):
    (one,), two = ranks.run(by_sharder, 1), ranks.run(by_sharder, 2)
    assert all(torch.equal(one, other) for other in two)
    with_other_start = EmbeddingBagCollection(tables=tables(), seed=6, device="meta")
    other = ManagedCollisionEmbeddingBagCollection(with_other_start, managed(tables()))
    assert other._embedding_bag_collection.seed == 6


def test_an_optimiser_that_was_applied_before_is_taken_over():
    configs = tables()
    bags = EmbeddingBagCollection(tables=configs, device="meta")
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.125})
    model = DistributedModelParallel(ManagedCollisionEmbeddingBagCollection(bags, managed(configs)))
    assert [group["lr"] for group in model.sparse_groups()] == [0.125]


def test_a_state_dict_has_rows_and_slots_under_the_names_of_the_program():
    models = [
        DistributedModelParallel(SparseArch(tables(), torch.device("meta")), device="cpu")
        for _ in range(2)
    ]
    kjt, _ = batch_of(0, 0)
    for _ in range(2):
        models[0](kjt).sum().backward()
    state = gathered_state_dict(models[0])
    assert state["_mc_ebc._embedding_module.embedding_bags.table_1.weight"].shape == (ROWS, 8)
    modules = "_mc_ebc._managed_collision_collection._managed_collision_modules"
    assert state[f"{modules}.table_1._mch_remapped_ids_mapping"].shape == (ROWS,)
    models[1].load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(*(model.eval()(kjt) for model in models))


def make_module(**changes):
    settings = {
        "zch_size": ROWS,
        "device": "cpu",
        "eviction_policy": LRU_EvictionPolicy(),
        "eviction_interval": 1,
    }
    return MCHManagedCollisionModule(**settings | changes)


def wrapped(
    configs=None, modules=None, bags=None, kind=ManagedCollisionEmbeddingBagCollection, **more
):
    configs = configs or tables()
    modules = modules or {t.name: make_module() for t in configs}
    bags = bags or EmbeddingBagCollection(tables=configs, device="meta")
    return kind(bags, ManagedCollisionCollection(modules, configs), **more)


REFUSED = {
    "zch_size=0: must be a whole number of at least 1": lambda: make_module(zch_size=0),
    "eviction_interval=0: must be": lambda: make_module(eviction_interval=0),
    "buckets=0: must be": lambda: make_module(buckets=0),
    "eviction_policy is a str: give LRU_EvictionPolicy": lambda: make_module(eviction_policy="lru"),
    "input_hash_func would have no effect": lambda: make_module(input_hash_func=torch.remainder),
    "mch_size would have no effect": lambda: make_module(mch_size=10),
    "mch_hash_func would have no effect": lambda: make_module(mch_hash_func=torch.remainder),
    "output_global_offset would have no effect": lambda: make_module(output_global_offset=8),
    "output_segments would have no effect": lambda: make_module(output_segments=[0, 128]),
    "threshold_filtering_func is a int: give a function": lambda: LFU_EvictionPolicy(3),
    "decay_exponent=0: must be above 0": lambda: LRU_EvictionPolicy(0),
    "decay_exponent=-1: must be at least 0": lambda: DistanceLFU_EvictionPolicy(-1),
    "table_2, which is no table of embedding_configs: did you mean": lambda: wrapped(
        modules={f"table_{k}": make_module() for k in range(3)}
    ),
    "managed_collision_modules[table_0] is a Linear": lambda: wrapped(
        modules={"table_0": nn.Linear(1, 1), "table_1": make_module()}
    ),
    "table table_1 is not in managed_collision_modules": lambda: wrapped(
        modules={"table_0": make_module()}
    ),
    "its module has zch_size=256, the table num_embeddings=128": lambda: wrapped(
        modules={f"table_{k}": make_module(zch_size=256) for k in range(2)}
    ),
    "table table_0 is dynamic and evicts rows": lambda: wrapped(tables(rows="dynamic")),
    "table table_0: id_rule=hash: managed collisions take": lambda: wrapped(tables(id_rule="hash")),
    "table table_0: min_key=3: managed collisions take": lambda: wrapped(tables(min_key=3)),
    "are not the embedding_configs of the ManagedCollisionCollection": lambda: wrapped(
        bags=EmbeddingBagCollection(tables=tables()[:1], device="meta")
    ),
    "wraps an EmbeddingCollection, not a EmbeddingBagCollection": lambda: wrapped(
        kind=ManagedCollisionEmbeddingCollection
    ),
    "managed_collision_collection is a dict": lambda: ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables(), device="meta"), {}
    ),
    "a sharder is given together with fused_params": lambda: (
        ManagedCollisionEmbeddingBagCollectionSharder(
            EmbeddingBagCollectionSharder(), fused_params={"optimizer": "sgd"}
        )
    ),
    "CollectionSharder.shard: managed collisions are sharded with their tables only": lambda: (
        ManagedCollisionCollectionSharder().shard(managed(tables()), {})
    ),
    "tables only: shard the ManagedCollisionEmbeddingBagCollection with its own": lambda: (
        ManagedCollisionCollectionSharder().shard(module=wrapped(), params={})
    ),
    "qcomm_codecs_registry is a str: make it": lambda: ManagedCollisionCollectionSharder("fp16"),
    "Sharder.shard: the module is a EmbeddingBagCollection": lambda: (
        ManagedCollisionEmbeddingBagCollectionSharder().shard(
            EmbeddingBagCollection(tables=tables(), device="meta"), {}
        )
    ),
    "decay_exponent=a: must be above 0": lambda: LRU_EvictionPolicy("a"),
    "decay_exponent=None: must be at least 0": lambda: DistanceLFU_EvictionPolicy(None),
    "MCHManagedCollisionModule: the module is on the meta device, so it cannot": lambda: managed(
        tables()
    )(batch_of(0, 0)[0]),
    "table table_0 is on the meta device: only a sharded collection": lambda: wrapped()(
        batch_of(0, 0)[0]
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(message):
    with pytest.raises(ConfigError) as refused:
        REFUSED[message]()
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_module_tells_its_sizes():
    module = make_module()
    assert (module.output_size(), module.input_size(), module.buckets()) == (ROWS, EMPTY, 1)


def test_sharders_of_bags_and_of_sequences_name_their_first_argument_as_torchrec_does():
    bags = ManagedCollisionEmbeddingBagCollectionSharder
    sequences = ManagedCollisionEmbeddingCollectionSharder
    inner = EmbeddingBagCollectionSharder(rule=sgd(0.25))
    assert bags(ebc_sharder=inner).rule == sequences(ec_sharder=inner).rule == sgd(0.25)
    for kind, name in ((bags, "ec_sharder"), (sequences, "ebc_sharder")):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            kind(**{name: inner})
