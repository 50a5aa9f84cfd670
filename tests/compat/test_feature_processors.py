"""Feature processors as programs for TorchRec write them, with other import lines alone."""

import pytest
import torch
from engine.engine_cases import batch_of, make_plan, make_tables
from recapp.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recapp.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from recapp.distributed.model_parallel import DistributedModelParallel
from recapp.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recapp.distributed.types import ShardingEnv
from recapp.modules.feature_processor_ import (
    FeatureProcessor,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recapp.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torch import nn

from recapp.engine.sharded_state import gathered_state_dict
from recapp.errors import ConfigError, DataError
from recapp.optim.rules import sgd
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection

pytestmark = pytest.mark.usefixtures("reference_kernels")

FEATURES = ["a", "shared", "b", "c"]
START = torch.tensor([1.0, 0.5, 2.0])


def processors_of(kind):
    """One for each feature, or one for all; with other weights than ones."""
    if kind == "each":
        made = {key: PositionWeightedModule(3) for key in FEATURES}
        for k, module in enumerate(made.values()):
            module.position_weight.data.copy_(START + k)
        return made
    made = PositionWeightedModuleCollection(dict.fromkeys(FEATURES[:3], 3))
    for k, weight in enumerate(made.position_weights.values()):
        weight.data.copy_(START + k)
    return made


class Model(nn.Module):
    """Weighted bags and a layer on them."""

    def __init__(self, kind, tables, device=None):
        super().__init__()
        torch.manual_seed(3)
        bags = EmbeddingBagCollection(tables, is_weighted=True, device=device, seed=1)
        self.fp = FeatureProcessedEmbeddingBagCollection(bags, processors_of(kind))
        self.over = nn.Linear(54, 1)

    def forward(self, features):
        return self.over(self.fp(features).values()).squeeze(1)


def parity(comm, kind, cut, mode):
    """Train sharded and unsharded; weights of positions, layers and tables are the same."""
    tables = make_tables()
    plan = make_plan(cut, tables, comm.world, mode=mode)
    model = DistributedModelParallel(
        Model(kind, tables, "meta"),
        comm.group,
        plan=plan,
        sharders=[EmbeddingBagCollectionSharder(sgd(0.5))],
    )
    oracle = Model(kind, tables)
    dense = torch.optim.SGD(model.parameters(), 0.25)
    of_tables = {id(p) for p in oracle.fp.collection.parameters()}
    optimisers = [
        torch.optim.SGD([p for p in oracle.parameters() if (id(p) in of_tables) is where], lr)
        for where, lr in ((True, 0.5), (False, 0.25))
    ]
    for step in range(3):
        batches = [batch_of(tables, 5, 10 * step + rank) for rank in range(comm.world)]
        for optimiser in (dense, *optimisers):
            optimiser.zero_grad()
        logits = model(batches[comm.rank])
        logits.square().mean().backward()
        dense.step()
        wanted = [oracle(batch) for batch in batches]
        torch.cat(wanted).square().mean().backward()
        for optimiser in optimisers:
            optimiser.step()
        torch.testing.assert_close(logits, wanted[comm.rank], rtol=1e-4, atol=1e-4)
    whole = gathered_state_dict(model)
    state = oracle.state_dict()
    assert list(whole) == (list(state) if comm.rank == 0 else [])
    whole |= {name: p.detach() for name, p in model.module.named_parameters()}  # on every rank
    for name, data in whole.items():
        torch.testing.assert_close(data, state[name], rtol=1e-4, atol=1e-4)
    changed = [name for name in state if "position_weight" in name]
    assert len(changed) == (4 if kind == "each" else 3)
    fresh = Model(kind, tables).state_dict()
    assert not any(torch.equal(state[name], fresh[name]) for name in changed)


@pytest.mark.parametrize(
    ("kind", "cut", "mode", "world"),
    [
        ("each", "table_wise", "unique", 2),
        ("all", "row_wise", "unique", 4),
        ("each", "row_wise", "pooled", 2),
        ("all", "column_wise", "pooled", 4),
        ("each", "column_wise", "unique", 2),
        ("all", "data_parallel", "unique", 2),
        ("each", "table_row_wise", "unique", 4),
        ("all", "grid_shard", "unique", 4),
        ("each", "mixed", "unique", 4),
        ("each", "table_wise", "unique", 1),
        ("all", "row_wise", "unique", 1),
    ],
)
def test_position_weights_are_trained_alike_under_every_plan(ranks, kind, cut, mode, world):
    ranks.run(parity, world, kind, cut, mode)


def sharded_by_hand(comm):
    tables = make_tables()
    module = FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(tables, is_weighted=True, seed=1), processors_of("each")
    )
    sharder = FeatureProcessedEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder({"optimizer": "sgd", "learning_rate": 0.25}),
        qcomm_codecs_registry={},
    )
    cuts = {"t0": row_wise(), "t1": table_wise(0), "t2": data_parallel()}
    plan = construct_module_sharding_plan(module, cuts, sharder, world_size=comm.world)
    assert list(sharder.shardable_parameters(module)) == ["t0", "t1", "t2"]
    env = ShardingEnv.from_process_group(comm.group)
    twin = sharder.shard(module, plan, env, torch.device("cpu"))
    assert isinstance(twin, ShardedFeatureProcessedEmbeddingBagCollection)
    assert twin.collection is not module.collection and twin.is_weighted()
    assert twin.collection.fused_optimizer.param_groups[0]["lr"] == 0.25
    batch = batch_of(tables, 5, comm.rank)
    torch.testing.assert_close(twin(batch).values(), module(batch).values())
    with pytest.raises(
        ConfigError, match="the module is a EmbeddingBagCollection; use the sharder"
    ):
        sharder.shard(module.collection, plan, env)


def test_its_sharder_shards_the_collection_inside(ranks):
    ranks.run(sharded_by_hand, 2)


def bags():
    return KeyedJaggedTensor(
        ["f1", "f2"], torch.arange(8), offsets=torch.tensor([0, 2, 2, 3, 4, 5, 8])
    )


def collection_of(features=("f1", "f2"), **settings):
    tables = make_tables()[: len(features)]
    for table, feature in zip(tables, features, strict=True):
        object.__setattr__(table, "feature_names", [feature])
    return EmbeddingBagCollection(tables, **{"is_weighted": True} | settings)


def test_an_id_weighs_by_its_position():
    module = PositionWeightedModule(max_feature_length=10)
    module.position_weight.data.copy_(torch.arange(10.0))
    weighted = module(bags()["f2"])
    assert weighted.weights().tolist() == [0, 0, 0, 1, 2]
    assert torch.equal(weighted.values(), bags()["f2"].values())
    weighted.weights().sum().backward()
    assert module.position_weight.grad.tolist() == [3, 1, 1, *[0] * 7]


def test_features_without_position_weights_weigh_one_and_weights_that_were_there_are_replaced():
    module = PositionWeightedModuleCollection({"f2": 3})
    module.load_state_dict({"position_weights.f2": torch.tensor([2.0, 3, 4])}, assign=True)
    assert module.position_weights_dict["f2"] is module.position_weights["f2"]
    weighted = module(bags().with_weights(torch.full((8,), 9.0)))
    assert weighted.weights().tolist() == [1, 1, 1, 2, 2, 2, 3, 4]
    assert torch.equal(weighted.offsets(), bags().offsets()) and weighted.keys() == ["f1", "f2"]


def test_values_behind_the_last_bag_have_no_weight():
    slack = KeyedJaggedTensor(["f"], torch.arange(9), lengths=torch.tensor([2, 1]))
    assert PositionWeightedModuleCollection({"f": 2})(slack).weights().tolist() == [1, 1, 1]
    assert PositionWeightedModule(2)(slack["f"]).weights().tolist() == [1, 1, 1]


def test_ones_are_the_start_and_come_back():
    module = PositionWeightedModuleCollection({"f1": 2}, device="meta")
    assert module.position_weights["f1"].is_meta
    made = module.to_empty(device="cpu")
    made.reset_parameters()
    assert made.position_weights["f1"].tolist() == [1, 1]


def test_processors_and_collection_come_apart_and_more_features_go_through():
    processors = {"f1": PositionWeightedModule(2), "f2": PositionWeightedModule(3)}
    whole = FeatureProcessedEmbeddingBagCollection(collection_of(), processors)
    other = KeyedJaggedTensor(["f3"], torch.tensor([900]), lengths=torch.tensor([1, 0, 0]))
    batch = KeyedJaggedTensor.concat([bags(), other])
    weigh, pool = whole.split()
    assert weigh(batch).weights().tolist() == [1.0] * 9
    assert torch.equal(pool(weigh(batch)).values(), whole(batch).values())
    assert whole(batch).keys() == ["f1", "f2"]
    assert "_feature_processors.f1.position_weight" in whole.state_dict()


class Unweighted(FeatureProcessor):
    def forward(self, features):
        return JaggedTensor(features.values(), lengths=features.lengths())


def wrapped(processors, **settings):
    return FeatureProcessedEmbeddingBagCollection(collection_of(**settings), processors)


REFUSED = {
    "max_feature_length=0: must be a whole number": lambda: PositionWeightedModule(0),
    r"max_feature_lengths\[f\]=1.5: must be": lambda: PositionWeightedModuleCollection({"f": 1.5}),
    "ignores sample weights.*is_weighted=True": lambda: wrapped(
        PositionWeightedModuleCollection({}), is_weighted=False
    ),
    "has no processor for feature f2: give one for each": lambda: wrapped({"f1": Unweighted()}),
    "has f3, which is no feature of the collection: known: f1, f2": lambda: wrapped(
        {"f1": Unweighted(), "f2": Unweighted(), "f3": Unweighted()}
    ),
    r"feature_processors\[f2\] is a int: give a module": lambda: wrapped(
        {"f1": Unweighted(), "f2": 3}
    ),
    r"feature_processors\[f1\]: Unweighted returned a JaggedTensor without weights": lambda: (
        wrapped({"f1": Unweighted(), "f2": Unweighted()})(bags())
    ),
}


@pytest.mark.parametrize("message", REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_fit_is_refused_in_one_line(message):
    with pytest.raises(ConfigError, match=message) as caught:
        REFUSED[message]()
    assert "\n" not in str(caught.value)


def test_a_bag_that_is_longer_than_its_weights_is_one_line():
    for weigh in (PositionWeightedModuleCollection({"f2": 2}), None):
        with pytest.raises(
            DataError, match=r"has a bag of 3 ids.*max_feature_length=2: raise max_feature_length"
        ):
            weigh(bags()) if weigh else PositionWeightedModule(2)(bags()["f2"])


def test_other_weights_must_fit_the_values():
    with pytest.raises(DataError, match="3 weights"):
        bags().with_weights(torch.ones(3))
