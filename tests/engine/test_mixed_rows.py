"""Mixed rows in the engine: every strip is asked for its share, and nothing else shows that rows
lie elsewhere.
"""

import io

import numpy as np
import pytest
import torch
from engine_cases import batch_of, make_plan, make_tables, whole_tensors
from parity.cases import rows_held

from recapp.engine.sharded_collection import (
    shard_bags,
    shard_model,
    sharded_collections,
    sharded_tables,
)
from recapp.engine.sharded_state import gathered_state_dict
from recapp.errors import PlanError
from recapp.optim.rules import rowwise_adagrad, sgd
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.sharding.sharding_plan import Shard, ShardingPlan, TableSharding, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig
from recapp.transport.communicator import Comm

pytestmark = pytest.mark.usefixtures("reference_kernels")

# ---- balance

ROWS = 100_000
BATCH = 8192
WORLD = 4
LARGE = EmbeddingBagConfig(
    name="large", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"], data_type="fp32"
)
RANKS = CandidateRanks([0, 1, 2, 3], [[0, 1], [2, 3]])
UNEVEN = tuple(
    Shard(rank, range(*rows), range(4))
    for rank, rows in enumerate([(0, 10_000), (10_000, 60_000), (60_000, 65_000), (65_000, ROWS)])
)
PIECES = tuple(Shard(k % 4, range(1000 * k, 1000 * (k + 1)), range(4)) for k in range(ROWS // 1000))


def zipf_ids(seed, first=0):
    """Ids of a batch under Zipf 1.05, sorted by frequency from a row on."""
    share = np.arange(1, ROWS + 1) ** -1.05
    drawn = np.random.default_rng(seed).choice(ROWS, BATCH, p=share / share.sum())
    return torch.from_numpy((drawn + first) % ROWS)


def asked(comm, sharding, row_order, first):
    """How many distinct rows all batches together ask of each rank."""
    held = TableSharding(sharding.shards, "unique", "custom", row_order)
    collection = shard_bags([LARGE], ShardingPlan({"large": held}, comm.world), comm, sgd())
    ids = zipf_ids(comm.rank, first)
    with torch.no_grad():
        requests = collection.shared.input_dist(KeyedJaggedTensor(["f"], ids, lengths=[1] * BATCH))
        counts_W = requests.integers.counts_WG3[:, 0, 0]
        requests.finish()
    requests.release()
    return sum(comm.all_gather(counts_W)).tolist()


def skew(ranks, sharding, row_order, first=0):
    """Rows asked of a rank for each that its share of the rows would make, the most of any rank."""
    (counts_W, *_) = ranks.run(asked, WORLD, sharding, row_order, first)
    held_W = [
        sum(len(s.rows) * len(s.cols) for s in sharding.shards if s.rank == k) for k in range(4)
    ]
    return max(
        count / sum(counts_W) * sum(held_W) / held
        for count, held in zip(counts_W, held_W, strict=True)
        if held
    )


@pytest.mark.parametrize(
    ("sharding", "crowded"),
    [
        (tile(LARGE, "row_wise", RANKS), 2.0),
        (tile(LARGE, "table_row_wise", RANKS), 1.4),
        (tile(LARGE, "grid_shard", RANKS, column_width=2), 1.4),
        (TableSharding(UNEVEN), 3.0),
        (TableSharding(PIECES), 1.1),
    ],
    ids=["row_wise", "table_row_wise", "grid_shard", "uneven", "pieces"],
)
def test_hot_neighbours_crowd_no_strip_once_rows_are_mixed(ranks, sharding, crowded):
    assert skew(ranks, sharding, "natural") > crowded
    assert skew(ranks, sharding, "mixed") < 1.06  # chance: of a strip with 1 in 20 rows


def test_the_newest_ids_may_be_the_hot_ones(ranks):
    sharding = tile(LARGE, "row_wise", RANKS)
    assert skew(ranks, sharding, "mixed", first=77_777) < 1.02


# ---- nothing else shows


def start_rows(comm, kind):
    tables = make_tables()
    plan = make_plan(kind, tables, comm.world, row_order="mixed")
    collection = shard_bags(tables, plan, comm, sgd(), seed=4)
    unsharded = EmbeddingBagCollection(tables=tables, seed=4)
    moved = 0
    for b in collection.blocks():
        row_N = rows_held(b)
        assert torch.equal(b.data, unsharded.weight(b.table).detach()[row_N][:, _slice(b.cols)])
        moved += int((row_N != torch.arange(b.rows.start, b.rows.stop)).sum())
    return moved


def _slice(part):
    return slice(part.start, part.stop)


@pytest.mark.parametrize("kind", ["random", "row_wise", "data_parallel"])
def test_start_values_go_by_row(ranks, kind):
    assert sum(ranks.run(start_rows, 2, kind)) > 100


def shard_built(comm):
    tables = make_tables()
    built = EmbeddingBagCollection(tables=tables, seed=9)
    with torch.no_grad():
        for t in tables:
            built.weight(t.name).mul_(2)
    plan = make_plan("random", tables, comm.world, row_order="mixed")
    expected = built(batch_of(tables, 6, 1)).values().detach()
    with torch.no_grad():
        found = shard_model(built, plan, comm, sgd())(batch_of(tables, 6, 1)).values()
    return torch.equal(expected, found)


def test_rows_of_a_collection_with_values_are_taken_over(ranks):
    assert ranks.run(shard_built, 2) == [True, True]


def indices(comm):
    table = EmbeddingConfig(name="s", num_embeddings=50, embedding_dim=4, feature_names=["f"])
    collection = EmbeddingCollection(tables=[table], need_indices=True)
    ids = KeyedJaggedTensor(["f"], torch.tensor([3, 49, 0, 3]), lengths=torch.tensor([1, 3]))
    expected = collection(ids)["f"]
    plan = make_plan("row_wise", [table], comm.world, row_order="mixed")
    found = shard_model(collection, plan, comm, sgd())(ids)["f"]
    assert torch.equal(expected.values(), found.values())
    return found.weights().tolist()


def test_indices_are_rows_not_positions(ranks):
    assert ranks.run(indices, 2) == [[3, 49, 0, 3]] * 2


# ---- state dicts


def parallel(comm, kind, row_order, seed=3):
    head = torch.nn.Module()
    head.bags = EmbeddingBagCollection(tables=make_tables(), seed=seed)
    head.forward = lambda features: head.bags(features).values()
    plan = make_plan(kind, make_tables(), comm.world, row_order=row_order)
    sharder = EmbeddingBagCollectionSharder(rowwise_adagrad(0.5))
    return DistributedModelParallel(head, comm.group, plan=plan, sharders=[sharder])


def trained(comm, kind, row_order):
    model = parallel(comm, kind, row_order)
    model(batch_of(make_tables(), 6, comm.rank)).sum().backward()
    return model


def tensors(comm, model):
    (collection,) = sharded_collections(model)
    return whole_tensors(comm, collection)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved_and_loaded(comm, kind, before, after):
    """Strips of all ranks, whole tables and optimiser state load under another order."""
    model = trained(comm, kind, before)
    expected = tensors(comm, model)
    state = through_a_file(model.state_dict())
    again = parallel(comm, kind, before, seed=5)
    again.load_state_dict(state)
    again.fused_optimizer.load_state_dict(through_a_file(model.fused_optimizer.state_dict()))
    assert same(tensors(comm, again), expected)

    states = comm.all_gather(state)
    merged = {name: [strip for s in states for strip in s[name]["strips"]] for name in state}
    other = parallel(comm, "random", after, seed=6)
    other.load_state_dict(merged)
    found = tensors(comm, other)
    assert all(torch.equal(found[key], v) for key, v in expected.items() if key[1] == "weight")

    whole = gathered_state_dict(model)
    if comm.rank == 0:
        for (table, tensor), value in expected.items():
            if tensor == "weight":
                assert torch.equal(whole[f"bags.embedding_bags.{table}.weight"], value)
    return True


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("row_wise", "mixed", "natural"),
        ("row_wise", "natural", "mixed"),
        pytest.param("random", "mixed", "mixed", marks=pytest.mark.full),
        pytest.param("data_parallel", "mixed", "natural", marks=pytest.mark.full),
    ],
)
def test_state_dicts_are_of_the_same_tables_in_either_order(ranks, kind, before, after):
    assert ranks.run(saved_and_loaded, 2, kind, before, after) == [True, True]


def refused(comm):
    model = trained(comm, "row_wise", "mixed")
    other = parallel(comm, "row_wise", "natural", seed=8)
    with pytest.raises(RuntimeError, match="strips do not cover rows"):
        other.load_state_dict(model.state_dict())
    return True


def test_some_strips_of_another_order_are_refused(ranks):
    assert ranks.run(refused, 2) == [True, True]


def test_an_order_that_is_no_bijection_makes_no_strip():
    model = parallel(Comm(), "table_wise", "mixed")
    state = model.state_dict()
    name = "bags.embedding_bags.t0.weight"
    ((rows, cols, data, _),) = state[name]
    for wrong in ((0, 0), (131, 0), (2.0, 0), 7, (2, 0, 0)):
        state[name] = [(rows, cols, data, wrong)]
        with pytest.raises(RuntimeError, match=r"entry 0 is no \(rows, cols, tensor\)"):
            model.load_state_dict(state)


# ---- dynamic tables


def test_rows_of_a_dynamic_table_are_mixed_as_it_is():
    table = EmbeddingBagConfig(
        name="d", num_embeddings="dynamic", embedding_dim=4, feature_names=["f"]
    )
    assert tile(table, "row_wise", RANKS, row_order="mixed").row_order == "natural"
    whole = TableSharding((Shard(0, range(table.plan_rows), range(4)),), row_order="mixed")
    with pytest.raises(PlanError, match=r"^table d: row_order=mixed, but the table is dynamic"):
        shard_bags([table], ShardingPlan({"d": whole}, 1), Comm(), sgd())


def test_a_plan_with_both_orders_costs_no_message_more(ranks):
    assert ranks.run(calls, 2, "natural") == ranks.run(calls, 2, "mixed")


def calls(comm, row_order):
    tables = make_tables()
    plan = make_plan("row_wise", tables, comm.world, row_order=row_order)
    collection = shard_bags(tables, plan, comm, sgd())
    before = comm.calls
    collection(batch_of(tables, 4, comm.rank)).values().sum().backward()
    (shared,) = sharded_tables(collection)
    assert shared.updates == 1
    return comm.calls - before
