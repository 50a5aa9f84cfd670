"""Plans by hand, shard by shard with TorchRec's argument names: models that run under them answer
and learn as the unsharded collection does, and what no shard can be is said.
"""

import copy

import pytest
import torch
from recapp.distributed.embedding_types import EmbeddingComputeKernel
from recapp.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recapp.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recapp.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)

from recapp import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from recapp.engine.sharded_state import gathered_state_dict
from recapp.errors import PlanError
from recapp.optim.rules import sgd
from recapp.parallel import DistributedModelParallel

ROWS = 11
DIM = 6
NAMES = ("uneven", "mosaic", "apart", "copies")


def collection():
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[n])
        for n in NAMES
    ]
    return EmbeddingBagCollection(tables, seed=3)


def spec(*shards):
    return EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_offsets=list(first), shard_sizes=list(sizes), placement=f"rank:{rank}/cpu"
            )
            for rank, first, sizes in shards
        ]
    )


def by_hand(world):
    """Rows in strips of 7, 1 and 3; a rectangle that is cut both ways; a whole table; copies."""
    last = world - 1
    made = EmbeddingModuleShardingPlan(world_size=world)
    made["uneven"] = ParameterSharding(
        sharding_type=ShardingType.ROW_WISE.value,
        compute_kernel=EmbeddingComputeKernel.FUSED.value,
        ranks=[0, last],
        sharding_spec=spec((0, (0, 0), (7, DIM)), (last, (7, 0), (1, DIM)), (0, (8, 0), (3, DIM))),
    )
    made["mosaic"] = ParameterSharding(
        sharding_type="grid_shard",
        compute_kernel="fused",
        sharding_spec=spec((last, (0, 0), (5, 4)), (0, (5, 0), (6, 4)), (1, (0, 4), (ROWS, 2))),
    )
    cuts = {
        "uneven": row_wise(([2, ROWS - 2] + [0] * (world - 2), "cpu"), compute_kernel="fused"),
        "mosaic": column_wise(size_per_rank=[5, 1], device_types=["cpu", "cpu"]),
        "apart": table_wise(rank=1, device="cpu"),
        "copies": data_parallel(),
    }
    rest = construct_module_sharding_plan(collection(), cuts, local_size=world, world_size=world)
    made["apart"] = rest["apart"]
    made["copies"] = rest["copies"]
    return [ShardingPlan(plan={"": made}), ShardingPlan(plan={"": rest})]


def features(number):
    drawn = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (len(NAMES) * 3,), generator=drawn)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=drawn)
    return KeyedJaggedTensor(list(NAMES), ids, lengths=lengths)


def trained(comm):
    whole = collection()
    found = []
    for plan in by_hand(comm.world):
        model = DistributedModelParallel(
            copy.deepcopy(whole),
            env=comm.group,
            plan=plan,
            sharders=[EmbeddingBagCollectionSharder(sgd(0.5))],
        )
        pooled = model(features(comm.rank)).values()
        assert torch.equal(pooled, whole(features(comm.rank)).values())
        pooled.pow(2).sum().backward()  # the loss of all is the mean over ranks
        found.append(gathered_state_dict(model))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_shards_of_any_size_answer_and_learn_as_one_table(ranks, reference_kernels, world):
    whole = collection()
    loss = sum(whole(features(rank)).values().pow(2).sum() for rank in range(world)) / world
    loss.backward()
    for state in ranks.run(trained, world)[0]:
        for name in NAMES:
            weight = whole.weight(name)
            gradient = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
            learned = weight.detach() - 0.5 * gradient
            torch.testing.assert_close(state[f"embedding_bags.{name}.weight"], learned)


def test_what_was_written_is_what_is_read():
    made = by_hand(2)[0].plan[""]["uneven"]
    assert (made.sharding_type, made.compute_kernel, made.ranks) == ("row_wise", "fused", [0, 1])
    shards = made.sharding_spec.shards
    assert [s.shard_sizes for s in shards] == [[7, DIM], [1, DIM], [3, DIM]]
    assert [s.placement for s in shards] == ["rank:0", "rank:1", "rank:0"]
    again = ParameterSharding("row_wise", "fused", [0, 1], EnumerableShardingSpec(list(shards)))
    assert again == made


def one(placement="rank:0/cpu", sizes=(ROWS, DIM)):
    return EnumerableShardingSpec([ShardMetadata([0] * len(sizes), list(sizes), placement)])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ParameterSharding("row", "fused", [0], one()), "sharding_type=row: "),
        (
            lambda: ParameterSharding("row_wise", "fused_uvm", [0], one()),
            "compute_kernel=fused_uvm: must be fused",
        ),
        (
            lambda: ParameterSharding("row_wise", EmbeddingComputeKernel.DENSE, [0], one()),
            "compute_kernel=dense: must be fused",
        ),
        (lambda: ParameterSharding("row_wise", "fused", [0]), "sharding_spec=None: a plan by hand"),
        (lambda: ParameterSharding("data_parallel", "dense"), r"or use .* data_parallel\(\)"),
        (
            lambda: ParameterSharding("table_wise", "fused", [1], one()),
            r"must be the ranks of the shards, \[0\]",
        ),
        (
            lambda: ParameterSharding("table_wise", "fused", sharding_spec=one(), enforce_hbm=True),
            "enforce_hbm would have no effect",
        ),
        (lambda: ParameterSharding("table_wise", "fused", [0], one("cpu")), "must name a rank"),
        (
            lambda: ParameterSharding("table_wise", "fused", [0], one("rank:0/meta")),
            "placement=meta: must be cpu or cuda",
        ),
        (
            lambda: ParameterSharding("table_wise", "fused", [0], one(sizes=(ROWS,))),
            r"shard_sizes=\[11\]: must be rows and columns",
        ),
        (lambda: table_wise(0, device="uvm"), "device=uvm: must be cpu or cuda"),
        (lambda: table_wise(0, compute_kernel="dense"), "table_wise: compute_kernel=dense"),
        (lambda: row_wise(([6, 5], ["cpu", "cuda"])), "sizes_placement=cpu, cuda: must be"),
        (lambda: row_wise(num_buckets=4), "num_buckets=4 would have no effect"),
        (lambda: row_wise(([6, 5], ["cpu"])), "2 sizes and 1 devices"),
        (lambda: planned(row_wise(([6, 6], "cpu"))), r"strips of \[6, 6\] rows are not its 11"),
        (lambda: planned(row_wise(([12, -1], "cpu"))), r"strips of \[12, -1\] rows"),
        (
            lambda: planned(column_wise(ranks=[0, 1], device_types=["cpu"])),
            "2 strips and 1 device_types",
        ),
    ],
)
def test_what_no_shard_can_be_is_said(make, said):
    with pytest.raises(PlanError, match=said):
        make()


def planned(cut):
    return construct_module_sharding_plan(collection(), dict.fromkeys(NAMES, cut), world_size=2)
