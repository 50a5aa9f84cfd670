"""Collections of sequences as a program uses them, and what collections that share an exchange
refuse.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from tiers import one_of
from torch import nn

from recapp import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingCollectionSharder,
    EmbeddingConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    Topology,
    sgd,
    shard_model,
)
from recapp.engine.sharded_collection import sharded_tables
from recapp.errors import ConfigError, PlanError
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.tables.collections import embedding_tables
from recapp.transport.communicator import Comm


def words(name="words"):
    return EmbeddingConfig(
        name=name, num_embeddings=20, embedding_dim=4, feature_names=["text", "title"]
    )


def bags(name="users"):
    return EmbeddingBagConfig(
        name=name, num_embeddings=20, embedding_dim=4, feature_names=["user"], pooling="sum"
    )


IDS = KeyedJaggedTensor(
    ["user", "text", "title"], torch.arange(12), lengths=[1, 1, 2, 0, 3, 1, 2, 2, 0]
)


class Both(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.bags = EmbeddingBagCollection([bags()], device=device)
        self.sequences = EmbeddingCollection([words()], device=device)


def plan_of(model, mode="unique", kind="table_wise"):
    ranks = CandidateRanks([0], [[0]])
    return ShardingPlan({t.name: tile(t, kind, ranks, mode) for t in embedding_tables(model)}, 1)


def sharded(mode="unique"):
    model = Both()
    return shard_model(model, plan_of(model, mode), Comm(), sgd())


def test_a_model_is_a_collection_of_sequences():
    collection = EmbeddingCollection([words()])
    model = DistributedModelParallel(collection, sharders=[EmbeddingCollectionSharder(sgd(0.5))])
    before = collection.weight("words").detach().clone()
    found = model(IDS)
    assert torch.equal(found["text"].values(), before[[4, 5, 6, 7]])
    found["text"].values().sum().backward()
    state = model.state_dict()
    ((_, _, rows),) = state["embeddings.words.weight"]
    changed = (rows != before).any(1).nonzero().view(-1).tolist()
    assert changed == [4, 5, 6, 7]
    assert "words: 20 x 4" in repr(model)


def test_sharded_collections_say_what_they_look_up_as_unsharded_ones_do():
    model = sharded()
    plain = Both()
    sequences = model.sequences
    assert sequences.need_indices() == plain.sequences.need_indices()
    assert sequences.embedding_configs() == plain.sequences.embedding_configs()
    assert sequences.embedding_dim() == plain.sequences.embedding_dim() == 4
    names = plain.sequences.embedding_names_by_table()
    assert sequences.embedding_names_by_table() == names
    assert model.bags.embedding_bag_configs() == plain.bags.embedding_bag_configs()
    assert model.bags.device == sequences.device == torch.device("cpu")


def test_the_planner_plans_sequences_in_rows_asked_once():
    model = Both()
    plan = EmbeddingShardingPlanner(Topology(2)).plan(model)
    assert plan.tables["words"].mode in ("unique", "replicated")
    assert plan.plan["sequences"].keys() == {"words"}


def test_nobody_sums_a_sequence():
    with pytest.raises(PlanError, match="table words: mode pooled, but its lookup text is a sequ"):
        sharded("pooled")


def test_one_batch_is_one_exchange_for_all_collections():
    model = sharded()
    (shared,) = sharded_tables(model)
    seen = []
    shared.state.observer = shared.state.observer.__class__(begins=lambda: seen.append(1))
    model.bags(IDS)
    model.sequences(IDS)
    one = len(seen)
    seen.clear()
    model.bags(IDS.permute([0]))  # another object: an exchange of its own
    model.sequences(IDS.permute([1, 2]))
    assert len(seen) == 2 * one


def test_a_collection_may_be_called_twice_with_one_batch():
    model = sharded()
    once = model.sequences(IDS)["text"].values()
    again = model.sequences(IDS)["text"].values()
    pooled = model.bags(IDS).values()
    assert torch.equal(once, again)
    (once.sum() + again.sum() + pooled.sum()).backward()
    assert sharded_tables(model)[0].updates == 1


def test_one_batch_object_in_every_step_is_one_exchange_each_time():
    model = sharded()
    (shared,) = sharded_tables(model)
    seen = []
    shared.state.observer = shared.state.observer.__class__(begins=lambda: seen.append(1))
    for training in (True, True, True, False, False):
        seen.clear()
        with torch.set_grad_enabled(training):
            before = shared.state.stores[0].weights.clone()
            pooled = model.bags(IDS).values()
            words_LD = model.sequences(IDS)["text"].values()
        assert len(seen) == (2 if training else 1)  # requests, lookup; what is only read has none
        if training:
            (pooled.sum() + words_LD.sum()).backward()
            assert not torch.equal(before, shared.state.stores[0].weights)


def test_vectors_are_those_of_the_rows_as_they_are_now():
    model = sharded()
    with torch.no_grad():
        model.bags(IDS)  # what this reads for the sequences is not theirs after an update
    step = model.bags(IDS).values().sum() + model.sequences(IDS)["text"].values().sum()
    step.backward()
    with torch.no_grad():
        found = model.sequences(IDS)["text"].values()
    rows = {b.table: b.data for b in model.sequences.blocks() if b.tensor == "weight"}
    assert torch.equal(found, rows["words"][[4, 5, 6, 7]])


def by_load(model, values):
    names = {"users": "bags.embedding_bags", "words": "sequences.embeddings"}
    model.load_state_dict({f"{path}.{t}.weight": values[t] for t, path in names.items()})


def by_average(model, values):
    (shared,) = sharded_tables(model)
    shared.keep_average()
    kept = rows_of(model)
    by_load(model, values)
    shared.update_average(1.0)
    by_load(model, kept)
    shared.show_average(True)


def by_parameter(model, values):
    with torch.no_grad():
        for name, parameter in sharded_tables(model)[0].parameters_of.items():
            parameter.weight.copy_(values[name])


def by_view(model, values):
    """Write to what an earlier state dict holds: nobody is told."""
    for block in model.views:
        block.data.copy_(values[block.table])


def rows_of(model):
    blocks = sharded_tables(model)[0].blocks()
    return {b.table: b.data.clone() for b in blocks if b.tensor == "weight"}


ORDERS = [calls for n in (1, 2, 3) for calls in product(["bags", "sequences"], repeat=n)]


def check(model, calls, rows):
    """Call collections with one batch, and compare with rows."""
    for called in calls:
        found = getattr(model, called)(IDS)
        if called == "bags":
            pooled = torch.stack([*rows["users"][:2], rows["users"][2:4].sum(0)])
            assert torch.equal(found.values(), pooled)
        else:
            assert torch.equal(found["text"].values(), rows["words"][4:8])


@pytest.mark.parametrize("change", one_of(4, [by_load, by_average, by_parameter, by_view]))
@pytest.mark.parametrize("learns", [False, True])
def test_no_vector_outlives_a_change_of_the_rows(change, learns):
    plan = plan_of(Both())
    if change is by_parameter:
        plan = plan_of(Both(), "auto", "data_parallel")
        plan = ShardingPlan({n: replace(t, as_parameter=True) for n, t in plan.tables.items()}, 1)
    values = {name: torch.full((20, 4), 3.0) for name in ("users", "words")}
    orders = ORDERS[: 6 if change is by_load else None]  # of at most two calls
    for first, second in product(orders, orders):
        if change is by_view and first != second:  # a model that calls its collections in one order
            continue
        model = shard_model(Both(), plan, Comm(), sgd(), "torch")
        model.views = [b for b in sharded_tables(model)[0].blocks() if b.tensor == "weight"]
        with torch.set_grad_enabled(learns):
            check(model, first, rows_of(model))
            change(model, values)
            check(model, second, values)


def test_rows_that_a_collection_did_not_ask_for_are_not_trained_in_silence():
    model = sharded()
    pooled = model.bags(IDS).values()
    model.sequences(IDS.permute([0, 1, 2]))
    with pytest.raises(ConfigError, match=r"features text, title, but the collection of these"):
        pooled.sum().backward()
    model.bags(IDS)  # looked at, and not trained


def test_collections_may_be_fed_apart():
    model = sharded()
    for _ in range(2):
        loss = model.bags(IDS.permute([0])).values().sum()
        loss = loss + model.sequences(IDS.permute([1, 2]))["title"].values().sum()
        loss.backward()
    assert sharded_tables(model)[0].updates == 2


def test_equal_names_are_one_table_where_the_weight_is_one():
    model = nn.ModuleDict(
        {"a": EmbeddingCollection([words("t")]), "b": EmbeddingCollection([words("t")])}
    )
    with pytest.raises(ConfigError, match="two tables are called t; names must be unique, unless"):
        embedding_tables(model)
    model["b"].embeddings["t"].weight = model["a"].embeddings["t"].weight
    assert embedding_tables(model) == [words("t")]
