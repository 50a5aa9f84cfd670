"""Programs as they are written for TorchRec, with other import lines alone."""

import pytest
import torch
import torch.distributed as dist
from recapp.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recapp.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from recapp.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from recapp.distributed.planner import EmbeddingShardingPlanner, Topology
from recapp.distributed.planner.types import ParameterConstraints
from recapp.distributed.train_pipeline import TrainPipelineSparseDist
from recapp.distributed.types import ShardingEnv, ShardingPlan, ShardingType
from recapp.models.dlrm import DLRM, DLRMTrain
from recapp.modules.embedding_configs import EmbeddingBagConfig
from recapp.modules.embedding_modules import EmbeddingBagCollection
from recapp.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recapp.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recapp.optim.optimizers import in_backward_optimizer_filter
from recapp.optim.rowwise_adagrad import RowWiseAdagrad
from torch import nn

import recapp as torchrec
from recapp.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

pytestmark = pytest.mark.usefixtures("reference_kernels")


def introduced(comm):
    """A collection by itself: planned, sharded by hand and as the top module, trained."""
    ebc = torchrec.EmbeddingBagCollection(
        device="cpu",
        tables=[
            torchrec.EmbeddingBagConfig(
                name=f"{name}_table",
                embedding_dim=8,
                num_embeddings=64,
                feature_names=[name],
                pooling=torchrec.PoolingType.SUM,
            )
            for name in ("product", "user")
        ],
    )
    kjt = torchrec.sparse.jagged_tensor.KeyedJaggedTensor.from_jt_dict(
        {
            "product": JaggedTensor(torch.tensor([1, 2, 1, 5]), lengths=torch.tensor([3, 1])),
            "user": JaggedTensor(torch.tensor([2, 3, 4, 1]), lengths=torch.tensor([2, 2])),
        }
    )
    expected = ebc(kjt)
    group = comm.group
    sharder = torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=comm.world, compute_device="cpu"),
        constraints={
            "product_table": ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value])
        },
    )
    plan = planner.collective_plan(ebc, [sharder], group)
    rows = plan.plan[""]["product_table"].sharding_spec.shards
    assert [s.placement for s in rows] == [f"rank:{r}" for r in range(comm.world)]
    env = ShardingEnv.from_process_group(group)
    sharded = sharder.shard(ebc, plan.plan[""], env, torch.device("cpu"))
    output = sharded(kjt).wait()
    assert isinstance(output, KeyedTensor) and output.keys() == ["product", "user"]
    assert torch.equal(output.values(), expected.values())
    fast = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": torchrec.EmbOptimType.EXACT_SGD, "learning_rate": 0.25}
    )
    trained = fast.shard(ebc, plan.plan[""], env, torch.device("cpu"))
    assert trained.fused_optimizer.param_groups[0]["lr"] == 0.25
    assert dict(in_backward_optimizer_filter(trained.named_parameters())) == {}
    trained(kjt).wait().values().sum().backward()
    learned = trained(kjt).wait().values()
    assert not torch.equal(learned, expected.values())
    model = DistributedModelParallel(ebc, env=env, plan=plan, sharders=[fast])
    assert sorted(model.state_dict()) == [
        f"embedding_bags.{name}_table.weight" for name in ("product", "user")
    ]
    model(kjt).wait().values().sum().backward()
    assert torch.equal(model(kjt)["user"], learned[:, 8:])
    return str(model.plan)


@pytest.mark.parametrize("world", [1, 2])
def test_a_collection_is_planned_sharded_and_trained(ranks, world):
    for text in ranks.run(introduced, world):
        assert text.startswith(f"plan automatic for {world} rank")
        assert "product_table  row_wise " in text


def golden_training(comm, dense_table):
    """A DLRM on random data: row-wise Adagrad in backward for tables, Adagrad for layers."""
    keys = torchrec.datasets.criteo.DEFAULT_CAT_NAMES[:4]
    configs = [
        EmbeddingBagConfig(name=f"t_{key}", embedding_dim=8, num_embeddings=50, feature_names=[key])
        for key in keys
    ]
    torch.manual_seed(0)
    dlrm = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(
            tables=configs, device=torch.device("meta")
        ),
        dense_in_features=3,
        dense_arch_layer_sizes=[6, 8],
        over_arch_layer_sizes=[7, 1],
        dense_device=torch.device("cpu"),
    )
    train_model = DLRMTrain(dlrm)
    apply_optimizer_in_backward(
        RowWiseAdagrad, train_model.model.sparse_arch.parameters(), {"lr": 0.1}
    )
    plan: ShardingPlan | None = None
    if dense_table:
        constraints = {"t_cat_1": ParameterConstraints(compute_kernels=["dense"])}
        plan = EmbeddingShardingPlanner(constraints=constraints).collective_plan(
            train_model, pg=comm.group
        )
    config = QCommsConfig(forward_precision=CommType.FP32, backward_precision=CommType.FP32)
    sharder = EmbeddingBagCollectionSharder(
        qcomm_codecs_registry=get_qcomm_codecs_registry(qcomms_config=config)
    )
    model = DistributedModelParallel(
        module=train_model,
        env=ShardingEnv.from_process_group(comm.group),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],
    )
    sparse_arch = model.module.model.sparse_arch
    own = dict(in_backward_optimizer_filter(sparse_arch.named_parameters()))
    assert list(own) == ["embedding_bag_collection.embedding_bags.t_cat_1.weight"] * dense_table
    layers = {n: p for n, p in model.named_parameters() if "sparse" not in n}
    optimizers = [
        ("dense", KeyedOptimizerWrapper(layers, lambda p: torch.optim.Adagrad(p, lr=0.1))),
        ("fused", model.fused_optimizer),
    ]
    if dense_table:
        optimizers.append(("own", KeyedOptimizerWrapper(own, lambda p: RowWiseAdagrad(p, lr=0.1))))
    optimizer = CombinedOptimizer(optimizers)
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    batches = torchrec.datasets.random.RandomRecDataset(
        keys=keys,
        batch_size=16,
        hash_size=50,
        ids_per_feature=1,
        num_dense=3,
        manual_seed=4 + comm.rank,
        num_generated_batches=1,
    )
    batches = iter(batches)
    losses = [pipeline.progress(batches)[0].item() for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]  # the same batch again and again
    kinds = {name: s.sharding_type for name, s in model.plan.items()}
    return kinds["t_cat_1"], sorted(model.state_dict())


@pytest.mark.parametrize("dense_table", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_dlrm_is_trained_through_the_pipeline(ranks, world, dense_table):
    for kind, names in ranks.run(golden_training, world, dense_table):
        assert kind == "data_parallel" or not dense_table
        tables = "model.sparse_arch.embedding_bag_collection.embedding_bags"
        assert [name for name in names if name.startswith(tables)] == [
            f"{tables}.t_cat_{k}.weight" for k in range(4)
        ]


class TwoTowers(nn.Module):
    def __init__(self, ebc, dim):
        super().__init__()
        self.ebc = ebc
        self.query = nn.Linear(dim, dim)

    def forward(self, kjt: KeyedJaggedTensor):
        query, candidate = torchrec.KeyedTensor.regroup([self.ebc(kjt)], [["q"], ["c"]])
        return (self.query(query) * candidate).sum(1)


def in_two_steps(comm):
    """The dense part is wrapped later, its values come from the meta device, and a state dict of
    the unsharded model loads.
    """
    tables = [
        EmbeddingBagConfig(name=f"t_{f}", embedding_dim=4, num_embeddings=20, feature_names=[f])
        for f in ("q", "c")
    ]
    with torch.device("meta"):
        on_meta = TwoTowers(EmbeddingBagCollection(tables=tables), 4)
    model = DistributedModelParallel(
        on_meta,
        ShardingEnv.from_process_group(comm.group),
        sharders=get_default_sharders(),
        init_data_parallel=False,
    )
    assert not any(p.is_meta for p in model.parameters())
    whole = TwoTowers(EmbeddingBagCollection(tables=tables, seed=9), 4)
    dist.broadcast(whole.query.weight.data, 0, comm.group)
    dist.broadcast(whole.query.bias.data, 0, comm.group)
    model.load_state_dict(whole.state_dict())
    assert model.module is model._wrapped
    model.init_data_parallel()
    assert comm.world == 1 or model.module is not model._wrapped
    kjt = KeyedJaggedTensor(["q", "c"], torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4).int())
    torch.testing.assert_close(model(kjt), whole(kjt))


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_is_sharded_first_and_wrapped_later(ranks, world):
    ranks.run(in_two_steps, world)


def test_start_values_come_from_the_modules_or_not_at_all():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            table = EmbeddingBagConfig(
                name="t", embedding_dim=2, num_embeddings=3, feature_names=["f"]
            )
            self.ebc = EmbeddingBagCollection(tables=[table], device="meta")
            self.scale = nn.Parameter(torch.ones(1, device="meta"))

    with pytest.raises(torchrec.errors.ConfigError, match="has no reset_parameters"):
        DistributedModelParallel(Odd(), device="cpu")
    model = DistributedModelParallel(Odd(), device="cpu", init_parameters=False)
    assert model.module.scale.device.type == "cpu"
