"""The slots of managed collisions, unsharded and sharded. They are the same on any number of ranks;
the unsharded module on the batches of all ranks is the oracle.
"""

import copy

import pytest
import torch
from engine.engine_cases import make_plan
from recapp.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from recapp.distributed.model_parallel import DistributedModelParallel
from recapp.distributed.train_pipeline import TrainPipelineSparseDist
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
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)
from torch import nn

from recapp.compat.torchrec.quantised import quantize_embeddings
from recapp.engine.sharded_state import gathered_state_dict
from recapp.errors import ConfigError
from recapp.optim.rules import sgd
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import read_from_data
from recapp.tables.initial import start_values

pytestmark = pytest.mark.usefixtures("reference_kernels")

EMPTY = 2**63 - 1


def module_of(size, policy=None, interval=1, device="cpu"):
    return MCHManagedCollisionModule(size, device, policy or LFU_EvictionPolicy(), interval)


def slots_of(module, *steps):
    """The slots of the ids of the last step, after it."""
    for ids in steps:
        bags = JaggedTensor(torch.tensor(ids), lengths=torch.ones(len(ids)))
        made = module({"f": bags})["f"]
    assert torch.equal(made.lengths(), bags.lengths())
    return made.values().tolist()


# ---- slots


@pytest.mark.parametrize("size", [1, 2, 5, 64, 100])
def test_ids_have_distinct_slots_below_the_last_one_for_as_long_as_there_are_some(size):
    ids = [-7, 2**62, 3, 0, 3, EMPTY]
    found = slots_of(module_of(size), ids)
    assert found[4] == found[2] and found[5] == size - 1
    with_slots = [n for n in found[:4] if n != size - 1]
    assert len(set(with_slots)) == len(with_slots) == min(4, size - 1)


def test_a_slot_stays_while_its_id_lives_and_goes_to_a_new_one_then():
    module = module_of(4, LRU_EvictionPolicy())
    first = slots_of(module, [10, 20, 30])
    assert first == [0, 1, 2] and module.open_slots().tolist() == [0]
    assert module.evict().tolist() == [0, 1, 2] and module.evict() is None
    assert slots_of(module, [10, 30]) == [0, 2]
    assert slots_of(module, [40, 10, 30]) == [1, 0, 2]
    assert module.evict().tolist() == [1]
    module.eval()
    assert slots_of(module, [20, 40, 50]) == [3, 1, 3]


def test_rows_are_decided_on_at_intervals():
    module = module_of(3, interval=3)
    assert slots_of(module, [5, 6], [6]) == [2]
    assert slots_of(module, [7]) == [2]
    assert slots_of(module.eval(), [5, 6, 7]) == [1, 0, 2]


@pytest.mark.parametrize(
    ("policy", "stay"),
    [
        (LFU_EvictionPolicy(), {1, 3}),
        (LRU_EvictionPolicy(), {3, 4}),
        (DistanceLFU_EvictionPolicy(), {1, 4}),
        (DistanceLFU_EvictionPolicy(decay_exponent=0), {1, 3}),
        (DistanceLFU_EvictionPolicy(decay_exponent=9), {3, 4}),
    ],
    ids=["lfu", "lru", "distance", "distance^0", "distance^9"],
)
def test_the_policies_keep_other_ids(policy, stay):
    module = module_of(3, policy, interval=1)
    slots_of(module, [1] * 9, [3, 3, 3], [4, 4])
    slots = dict(zip([1, 3, 4], slots_of(module.eval(), [1, 3, 4]), strict=True))
    assert {key for key, slot in slots.items() if slot != 2} == stay


def test_functions_of_counts_say_which_ids_count():
    counts = torch.tensor([5, 4, 3, 2, 1])
    assert average_threshold_filter(counts)[0].tolist() == [True, True, False, False, False]
    mask, threshold = dynamic_threshold_filter(counts, threshold_skew_multiplier=0.75)
    assert mask.tolist() == [True] * 3 + [False] * 2 and threshold == 2.25
    assert probabilistic_threshold_filter(counts, 1.0)[0].all()
    assert not probabilistic_threshold_filter(counts, 0.0)[0].any()
    policy = LFU_EvictionPolicy(threshold_filtering_func=average_threshold_filter)
    assert slots_of(module_of(5, policy), [3, 6, 6, 6, 8, 8, 9]) == [4, 2, 2, 2, 3, 3, 4]


def test_a_state_dict_goes_on_with_the_slots():
    one = module_of(4)
    other = module_of(4)
    assert not one.state_dict()
    wanted = slots_of(one, [10, 20, 30, 30])
    other.load_state_dict(one.state_dict())
    assert set(one.state_dict()) == {
        "_mch_sorted_raw_ids",
        "_mch_remapped_ids_mapping",
        "_mch_counts",
        "_current_iter_tensor",
        "_output_segments_tensor",
    }
    assert slots_of(other.eval(), [10, 20, 30, 30]) == wanted
    other.load_state_dict(module_of(4).state_dict())
    assert slots_of(other, [10]) == [3]


def test_a_collection_of_modules_replaces_the_ids_of_its_features():
    configs = [
        EmbeddingBagConfig(name="a", num_embeddings=3, embedding_dim=4, feature_names=["f", "g"]),
        EmbeddingBagConfig(name="b", num_embeddings=9, embedding_dim=4, feature_names=["h"]),
    ]
    managed = ManagedCollisionCollection(
        {"a": module_of(3), "b": module_of(9, LRU_EvictionPolicy())}, configs
    )
    assert {name: n.item() for name, n in managed.open_slots().items()} == {"a": 2, "b": 8}
    features = KeyedJaggedTensor(
        ["other", "h", "g", "f"],
        torch.tensor([1, 90, 91, 20, 20, 21]),
        torch.arange(6.0),
        lengths=torch.tensor([1, 0, 1, 1, 1, 0, 2, 0]),
    )
    slots = managed(features)
    assert slots.keys() == ["f", "g", "h"] and slots.values().tolist() == [0, 1, 0, 6, 7]
    assert slots.lengths().tolist() == [2, 0, 1, 0, 1, 1]
    assert slots.weights().tolist() == [4, 5, 3, 1, 2]
    twice = [
        *configs[:1],
        EmbeddingBagConfig(name="c", num_embeddings=3, embedding_dim=4, feature_names=["f"]),
    ]
    with pytest.raises(ConfigError, match="feature f is read by the tables a and c, which give"):
        ManagedCollisionCollection({"a": module_of(3), "c": module_of(3)}, twice)(features)


# ---- collections


def model_of(size, policy=None, device=None, kind="bags", init_fn=None, **settings):
    config = EmbeddingBagConfig if kind == "bags" else EmbeddingConfig
    tables = [
        config(
            name=f"t{k}",
            num_embeddings=size,
            embedding_dim=4,
            feature_names=[key],
            init_fn=init_fn,
        )
        for k, key in enumerate("ab")
    ]
    collection, wrapper = {
        "bags": (EmbeddingBagCollection, ManagedCollisionEmbeddingBagCollection),
        "sequences": (EmbeddingCollection, ManagedCollisionEmbeddingCollection),
    }[kind]
    modules = {
        t.name: module_of(size, copy.deepcopy(policy), interval=2, device=device) for t in tables
    }
    return wrapper(
        collection(tables=tables, device=device, seed=3),
        ManagedCollisionCollection(modules, tables),
        **settings,
    )


def batch_of(step, rank, rows=6):
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(-(2**62), 2**62, (4 * rows,), generator=generator)
    common = torch.randint(0, 7, (4 * rows,), generator=generator)
    ids[::3] = common[::3] + step // 4
    return KeyedJaggedTensor(["a", "b"], ids, lengths=torch.full((2 * rows,), 2))


@pytest.mark.parametrize("kind", ["bags", "sequences"])
@pytest.mark.parametrize("size", [2, 20, 80])
def test_an_unsharded_collection_is_called_and_trained_by_torchs_optimisers(kind, size):
    model = model_of(size, kind=kind, return_remapped_features=size < 80)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert [tuple(p.shape) for p in before.values()] == [(size, 4)] * 2
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for step in range(4):
        found, slots = model(batch_of(step, 0))
        if kind == "bags":
            total = found.values().sum()
        else:
            total = sum(x.values().sum() for x in found.values())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if size == 80:
            assert slots is None
            continue
        assert slots.keys() == ["a", "b"] and int(slots.values().max()) < size
        assert torch.equal(slots.lengths(), batch_of(step, 0).lengths())
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name])
    same = model_of(size, kind=kind)
    same.load_state_dict(model.state_dict())
    with torch.no_grad():
        again = [m.eval()(batch_of(1, 0))[0] for m in (model, same)]
    pairs = [x.values() if kind == "bags" else x["b"].values() for x in again]
    assert torch.equal(*pairs)


@pytest.mark.parametrize("init_fn", [None, nn.init.ones_])
def test_a_row_begins_anew_where_its_slot_goes_to_another_id(init_fn):
    table = EmbeddingBagConfig(
        name="t", num_embeddings=3, embedding_dim=2, feature_names=["f"], init_fn=init_fn
    )
    bags = EmbeddingBagCollection([table], seed=3)
    model = ManagedCollisionEmbeddingBagCollection(
        bags, ManagedCollisionCollection({"t": module_of(3, LRU_EvictionPolicy())}, [table])
    )
    start = (
        torch.ones(2)
        if init_fn
        else start_values(torch.tensor([1]), table, 3, range(2), torch.float32)[0]
    )

    def vectors(*ids):
        kjt = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids)).long())
        return model(kjt)[0]["f"]

    vectors(10, 20)
    with torch.no_grad():
        bags.weight("t").fill_(7)
    assert vectors(10).tolist() == [[7, 7]]
    assert torch.equal(vectors(10, 30), torch.stack([torch.full((2,), 7.0), start]))


def parity(comm, cut, mode, policy, row_order):
    """Losses, slots and rows of a sharded model, trained, and those of the unsharded one."""
    model = model_of(20, policy, return_remapped_features=True)
    oracle = copy.deepcopy(model)
    plan = make_plan(cut, model.tables(), comm.world, mode=mode, row_order=row_order)
    sharder = ManagedCollisionEmbeddingBagCollectionSharder()
    model = DistributedModelParallel(
        model, comm.group, plan=plan, sharders=[type(sharder)(fused_params=sgd(0.5))]
    )
    optimizer = torch.optim.SGD(oracle.parameters(), 0.5)
    for step in range(8):
        batches = [batch_of(step, rank) for rank in range(comm.world)]
        pooled, slots = model(batches[comm.rank])
        wanted, of_all = oracle(joined(batches))
        here = slice(6 * comm.rank, 6 * comm.rank + 6)
        torch.testing.assert_close(pooled.values(), wanted.values()[here])
        for key in "ab":
            assert torch.equal(
                slots[key].values(), of_all[key].values().view(-1, 2)[here].flatten()
            )
        pooled.values().square().mean().backward()
        optimizer.zero_grad()
        wanted.values().square().mean().backward()
        optimizer.step()
    whole = gathered_state_dict(model)
    for name, data in oracle.state_dict().items() if comm.rank == 0 else ():
        torch.testing.assert_close(whole[name], data)
    model.eval()
    with torch.no_grad():  # each rank by itself: nothing is counted
        answers = model(batch_of(9, comm.rank))[0].values()
        torch.testing.assert_close(answers, oracle.eval()(batch_of(9, comm.rank))[0].values())


def joined(batches):
    values = [torch.cat([b[key].values() for b in batches]) for key in "ab"]
    lengths = [torch.cat([b[key].lengths() for b in batches]) for key in "ab"]
    return KeyedJaggedTensor(["a", "b"], torch.cat(values), lengths=torch.cat(lengths))


@pytest.mark.parametrize(
    ("cut", "mode", "policy", "row_order", "world"),
    [
        ("row_wise", "unique", LFU_EvictionPolicy(), "natural", 1),
        ("row_wise", "unique", LRU_EvictionPolicy(), "natural", 2),
        ("row_wise", "pooled", DistanceLFU_EvictionPolicy(), "mixed", 4),
        ("table_wise", "unique", DistanceLFU_EvictionPolicy(), "natural", 2),
        ("column_wise", "unique", LFU_EvictionPolicy(average_threshold_filter), "natural", 2),
        ("data_parallel", "unique", LRU_EvictionPolicy(), "natural", 4),
        ("grid_shard", "unique", LFU_EvictionPolicy(), "natural", 4),
    ],
)
def test_sharded_slots_and_rows_are_those_of_one_process(
    ranks, cut, mode, policy, row_order, world
):
    ranks.run(parity, world, cut, mode, policy, row_order)


class Both(nn.Module):
    """Managed collisions with slots beside an ordinary collection that reads the same features,
    and tables that want their ids as they are.
    """

    def __init__(self):
        super().__init__()
        self.slots = model_of(20)
        others = [
            EmbeddingBagConfig(
                name=f"u{key}",
                num_embeddings=50,
                embedding_dim=4,
                feature_names=[key],
                id_rule="hash",
            )
            for key in "ab"
        ]
        self.plain = EmbeddingBagCollection(others, seed=4)

    def forward(self, features):
        first = self.plain(features).values()
        second, slots = self.slots(features)
        assert slots is None
        both = torch.cat([first, second.values()], 1)
        return both.square().mean(), both


def beside_others(comm, pipelined):
    model = Both()
    oracle = copy.deepcopy(model)
    model = DistributedModelParallel(
        model,
        comm.group,
        sharders=[ManagedCollisionEmbeddingBagCollectionSharder(fused_params=sgd(0.5))],
    )
    optimizer = torch.optim.SGD(oracle.parameters(), 0.5)
    batches = iter([batch_of(step, comm.rank) for step in range(6)])
    pipeline = TrainPipelineSparseDist(
        model, torch.optim.SGD([torch.zeros(1)], 0.1), torch.device("cpu")
    )
    for step in range(6):
        if pipelined:
            found = pipeline.progress(batches)
        else:
            loss, found = model(next(batches))
            loss.backward()
        loss, wanted = oracle(joined([batch_of(step, rank) for rank in range(comm.world)]))
        torch.testing.assert_close(found, wanted[6 * comm.rank : 6 * comm.rank + 6])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_ids_of_the_data_are_not_those_of_tables_with_slots():
    tables, lookups = read_from_data(Both())
    assert [t.name for t in tables] == [x.table.name for x in lookups] == ["ua", "ub"]


@pytest.mark.parametrize("pipelined", [False, True], ids=["loop", "pipeline"])
@pytest.mark.parametrize("world", [1, 2])
def test_small_tables_go_beside_collections_that_read_the_same_features(ranks, world, pipelined):
    ranks.run(beside_others, world, pipelined)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_quantised_model_finds_the_same_slots_beside_others(sharded):
    model = Both()
    if sharded:
        model = DistributedModelParallel(model)
    for step in range(4):
        model(batch_of(step, 0))
    model.eval()
    quantised = quantize_embeddings(model, torch.float32)
    with torch.no_grad():
        for step in range(4):
            found, wanted = (m(batch_of(step, 0))[1] for m in (quantised, model))
            torch.testing.assert_close(found, wanted)


def test_slots_of_an_unsharded_model_stay_when_it_is_sharded():
    model = model_of(80, return_remapped_features=True)
    for step in range(2):
        slots = model(batch_of(step, 0))[1]
    sharded = DistributedModelParallel(model)
    with torch.no_grad():
        assert torch.equal(sharded.eval()(batch_of(1, 0))[1].values(), slots.values())


def test_slots_that_are_loaded_before_sharding_stay():
    module = module_of(4)
    slots = slots_of(module, [10, 20, 30, 30])
    other = module_of(4, device="meta")
    other.load_state_dict(module.state_dict())
    assert slots_of(other.eval(), [10, 20, 30, 30]) == slots


def test_built_on_the_meta_device_slots_are_made_with_the_shards():
    model = DistributedModelParallel(model_of(20, device="meta"), device="cpu")
    for step in range(2):
        model(batch_of(step, 0))[0].values().sum().backward()
    other = model_of(20)
    for step in range(2):
        other(batch_of(step, 0))[0].values().sum()
    mine, theirs = (m._managed_collision_collection.state_dict() for m in (model.module, other))
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def shared(batches):
    """The bags of a batch of each rank, of which those of `a` are taken by two samples each."""
    written_out = joined(batches)
    ids_a = written_out["a"].values().view(-1, 4)[:, :2].flatten()
    samples = torch.arange(6 * len(batches))
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.cat([ids_a, written_out["b"].values()]),
        lengths=torch.full((9 * len(batches),), 2),
        stride_per_key_per_rank=[[3] * len(batches), [6] * len(batches)],
        inverse_indices=(["b", "a"], torch.stack([samples, samples // 2])),
    )


def with_shared_bags(comm, kind):
    model = model_of(20, kind=kind, return_remapped_features=True)
    oracle = copy.deepcopy(model)
    plan = make_plan("row_wise", model.tables(), comm.world)
    sharders = [ManagedCollisionEmbeddingBagCollectionSharder(fused_params=sgd(0.5))]
    model = DistributedModelParallel(model, comm.group, plan=plan, sharders=sharders)
    optimizer = torch.optim.SGD(oracle.parameters(), 0.5)
    here = slice(6 * comm.rank, 6 * comm.rank + 6)
    for step in range(4):
        batches = [batch_of(step, rank) for rank in range(comm.world)]
        found, slots = model(shared(batches[comm.rank : comm.rank + 1]))
        wanted, _ = oracle(shared(batches))
        assert slots.stride_per_key() == [3, 6] and slots.stride() == 6
        losses = []
        for key in "ab":
            mine, theirs = found[key], wanted[key]
            if kind == "sequences":
                mine, theirs = (x.values().view(-1, 8) for x in (mine, theirs))
            torch.testing.assert_close(mine, theirs[here])
            losses.append([x.square().mean() for x in (mine, theirs)])
        optimizer.zero_grad()
        for of_one in zip(*losses, strict=True):
            sum(of_one).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["bags", "sequences"])
@pytest.mark.parametrize("world", [1, 2])
def test_bags_that_samples_share_get_slots_once(ranks, world, kind):
    ranks.run(with_shared_bags, world, kind)


def test_sequences_of_tables_that_have_a_pooling_are_managed_too():
    table = EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=2, feature_names=["f"])
    model = ManagedCollisionEmbeddingCollection(
        EmbeddingCollection([table]), ManagedCollisionCollection({"t": module_of(5)}, [table])
    )
    found, _ = model(KeyedJaggedTensor(["f"], torch.tensor([2**62, 7]), lengths=torch.tensor([2])))
    assert found["f"].values().shape == (2, 2)
