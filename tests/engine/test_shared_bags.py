"""Features with fewer bags than there are samples: outputs and updates equal those of the batch
that has every bag written out for each sample that takes it.
"""

import pytest
import torch
from engine.engine_cases import make_plan, make_tables
from parity.cases import RULES, TOLERANCE, Case, Oracle, loss_of, rows_held
from tiers import one_of
from torch import nn

from recapp.compat.torchrec.batches import TrainPipelineSparseDist
from recapp.engine.sharded_collection import shard_bags
from recapp.errors import ConfigError, RankError
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig

FEATURES = ["c", "shared", "a", "b"]
HEAD = torch.linspace(-1, 1, 16 * 2 + 5 * 2 + 12, dtype=torch.float64)


def shared_batch(seed, samples=7, weighted=False, slack=0):
    """A batch of which some features have fewer bags, the first none of its own for some sample,
    and the same with every bag written out.
    """
    g = torch.Generator().manual_seed(seed)
    bags = [max(1, samples // 3), samples, 1, samples] if samples else [0, 2, 0, 0]
    index_FS = torch.stack(
        [
            torch.cat([torch.arange(n), torch.randint(0, max(n, 1), (samples - n,), generator=g)])
            if samples
            else torch.zeros(0, dtype=torch.int64)
            for n in bags
        ]
    )
    lengths = torch.randint(0, 4, (sum(bags),), generator=g)
    total = int(lengths.sum())
    ids = torch.randint(0, 7, (total + slack,), generator=g)
    ids[total:] = 1000  # no table has that
    weights = torch.rand(len(ids), generator=g, dtype=torch.float64) + 0.5 if weighted else None
    kjt = KeyedJaggedTensor(
        FEATURES,
        ids,
        weights,
        lengths,
        stride_per_key_per_rank=[[n] for n in bags],
        inverse_indices=(FEATURES[::-1], index_FS.flip(0)),
    )
    parts = {}
    for name, index_S in zip(FEATURES, index_FS, strict=True):
        held = kjt[name].to_dense()
        of_ids = kjt[name].to_dense_weights()
        parts[name] = JaggedTensor.from_dense(
            [held[i] for i in index_S.tolist()],
            None if of_ids is None else [of_ids[i] for i in index_S.tolist()],
        )
    return kjt, KeyedJaggedTensor.from_jt_dict(parts)


def train_and_compare(comm, kind, rule, mode, pooling, weighted, backend="auto"):
    """Three steps; samples per rank differ, and the last rank has none in one."""
    tables = make_tables(data_type="fp64", pooling=pooling)
    plan = make_plan(kind, tables, comm.world, mode=mode)
    collection = shard_bags(tables, plan, comm, RULES[rule], 1, backend)
    oracle = Oracle(Case(tables, None, [], HEAD, RULES[rule]), 1)
    for step in range(3):
        made = [
            shared_batch(
                10 * step + r,
                0 if step == 1 and r == comm.world - 1 and r else 5 + r,
                weighted,
                slack=3 * (step == 2),
            )
            for r in range(comm.world)
        ]
        kjt, written_out = made[comm.rank]
        with torch.no_grad():
            read = collection(kjt)
            assert torch.equal(read.values(), collection(kjt).values())
        pooled = collection(kjt)
        assert pooled.values().shape == (written_out.stride(), len(HEAD))
        torch.testing.assert_close(read.values(), pooled.values().detach(), **TOLERANCE)
        rows = sum(collection.shared.header.rows_W)
        assert rows == sum(w.stride() for _, w in made), "samples are counted, not bags"
        (loss_of(pooled.values(), HEAD).sum() * comm.world / rows).backward()
        wanted = oracle.step([w for _, w in made])[comm.rank]
        torch.testing.assert_close(pooled.values().detach(), wanted, **TOLERANCE)
    for block in collection.blocks():
        whole = oracle.tensor(block.table, block.tensor)
        torch.testing.assert_close(
            block.data, whole[rows_held(block), block.cols.start : block.cols.stop], **TOLERANCE
        )


@pytest.mark.parametrize("world", one_of(3, [2, 1, 4]))
@pytest.mark.parametrize(
    "kind",
    [
        "table_wise",
        "row_wise",
        "column_wise",
        "table_row_wise",
        "grid_shard",
        "data_parallel",
        "random",
    ],
)
def test_updates_equal_those_of_the_batch_written_out(ranks, kind, world):
    ranks.run(train_and_compare, world, kind, "rowwise_adagrad", "unique", "sum", False)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("mode", "pooling", "weighted"),
    [("pooled", "sum", True), ("pooled", "mean", False), ("unique", "mean", True)],
)
def test_modes_means_and_weights_too(ranks, mode, pooling, weighted, world):
    ranks.run(train_and_compare, world, "random", "adagrad", mode, pooling, weighted)


def test_the_unsharded_collection_gives_the_output_by_sample():
    for weighted in (False, True):
        collection = EmbeddingBagCollection(make_tables(data_type="fp64"), is_weighted=weighted)
        kjt, written_out = shared_batch(3, weighted=weighted, slack=2)
        pooled = collection(kjt)
        assert torch.equal(pooled.values(), collection(written_out).values())
        assert pooled.keys() == collection(written_out).keys()
        loss_of(pooled.values(), HEAD).sum().backward()
        found = [p.grad.clone() for p in collection.parameters()]
        collection.zero_grad()
        loss_of(collection(written_out).values(), HEAD).sum().backward()
        for one, other in zip(found, collection.parameters(), strict=True):
            torch.testing.assert_close(one, other.grad)


class Model(nn.Module):
    """Bags and sequences of one batch, one table in both."""

    def __init__(self):
        super().__init__()
        bags = [
            EmbeddingBagConfig(
                name=f"t{k}", num_embeddings=9, embedding_dim=4, data_type="fp64", feature_names=f
            )
            for k, f in enumerate([["c", "a"], ["b"]])
        ]
        rows = EmbeddingConfig(
            name="s0", num_embeddings=9, embedding_dim=4, data_type="fp64",
            feature_names=["shared", "a"],
        )  # fmt: skip
        self.bags = EmbeddingBagCollection(bags)
        self.sequences = EmbeddingCollection([rows], need_indices=True)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, features):
        pooled = self.bags(features).values()
        found = self.sequences(features)
        summed = [
            torch.stack([bag.tanh().sum(0) for bag in found[name].to_dense()])
            for name in ("shared", "a")
        ]
        logits = (torch.cat([pooled, *summed], 1).tanh() * self.scale.repeat(5)).sum(1)
        return logits.sum(), found


def whole_model(comm, ahead):
    """Bags and sequences share one exchange; with the next batch's looked ahead to or not."""
    steps = 3
    made = [[shared_batch(10 * s + r) for r in range(comm.world)] for s in range(steps)]
    torch.manual_seed(0)
    sharder = EmbeddingBagCollectionSharder(RULES["sgd"])
    model = DistributedModelParallel(Model(), comm.group, sharders=[sharder])
    twin = Model()
    dense = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    losses = []
    if ahead:
        pipeline = TrainPipelineSparseDist(model, dense, torch.device("cpu"))
        batches = iter([m[comm.rank][0] for m in made])
        losses = [pipeline.progress(batches)["a"] for _ in range(steps)]
        return [t.values().detach().tolist() for t in losses]
    for of_ranks in made:
        kjt, written_out = of_ranks[comm.rank]
        dense.zero_grad()
        loss, found = model(kjt)
        want = twin(written_out)[1] if not losses else None
        for name, jagged in found.items():
            assert torch.equal(jagged.lengths().long(), written_out[name].lengths().long())
            assert torch.equal(jagged.weights(), written_out[name].values())
            if want is not None:
                assert torch.equal(jagged.values(), want[name].values())
        loss.backward()
        dense.step()
        losses.append(found["a"].values().detach().tolist())
    return losses


@pytest.mark.parametrize("world", [1, 2])
def test_bags_and_sequences_of_a_model_take_them_also_ahead(ranks, world):
    assert ranks.run(whole_model, world, False) == ranks.run(whole_model, world, True)


def test_sequences_without_inverse_indices_have_the_bags_of_their_key():
    kjt, _ = shared_batch(3)
    plain = KeyedJaggedTensor(
        FEATURES,
        kjt.values(),
        None,
        kjt.lengths(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank(),
    )
    rows = EmbeddingConfig(name="s", num_embeddings=9, embedding_dim=4, feature_names=["c", "b"])
    found = EmbeddingCollection([rows])(plain)
    for name in ("c", "b"):
        assert torch.equal(found[name].lengths(), kjt[name].lengths())
        assert len(found[name].values()) == len(kjt[name].values())


def refused(comm, case):
    """Whether each rank gets an error, and which; one rank alone is at fault."""
    tables = make_tables(data_type="fp64")
    collection = shard_bags(tables, make_plan("row_wise", tables, comm.world), comm, RULES["sgd"])
    kjt, written_out = shared_batch(3)
    inverse = kjt.inverse_indices() if case == "key" else None
    if case == "key":
        inverse = (["c", "shared", "a", "bb"], inverse[1].flip(0))
    wrong = KeyedJaggedTensor(
        FEATURES,
        kjt.values(),
        None,
        kjt.lengths(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank(),
        inverse_indices=inverse,
    )
    try:
        collection(wrong if comm.rank == 0 else written_out)
    except (ConfigError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("none", "features have different numbers of bags, {'a': 1, 'shared': 7, 'b': 7, 'c': 2}"),
        ("key", "inverse_indices have no key 'b', which table t1 reads: did you mean bb?"),
    ],
)
def test_samples_without_a_bag_are_refused_on_all_ranks(ranks, case, message):
    first, second = ranks.run(refused, 2, case)
    assert first.startswith(f"ConfigError: {message}") and "\n" not in first
    assert second.startswith("RankError: rank 0 could not look up its batch")


def test_keys_of_equal_numbers_need_no_inverse_indices():
    kjt, written_out = shared_batch(3)
    equal = KeyedJaggedTensor(
        FEATURES,
        written_out.values(),
        None,
        written_out.lengths(),
        stride_per_key_per_rank=[[3, 4]] * 4,
    )
    collection = EmbeddingBagCollection(make_tables(data_type="fp64"))
    assert torch.equal(collection(equal).values(), collection(written_out).values())
    assert torch.equal(collection(kjt).values(), collection(equal).values())


def with_room(comm):
    tables = make_tables(data_type="fp64")
    collection = shard_bags(tables, make_plan("row_wise", tables, 1), comm, RULES["sgd"], 1)
    kjt, _ = shared_batch(3)
    want = collection(kjt).values()
    collection.leave_room(3)
    pooled = collection(kjt)
    before = torch.arange(21.0, dtype=torch.float64).view(7, 3)
    assert torch.equal(pooled.values(), want)
    assert torch.equal(pooled.prepend(before), torch.cat([before, want], 1))


def test_room_before_the_vectors_is_not_needed(ranks):
    ranks.run(with_room, 1)
