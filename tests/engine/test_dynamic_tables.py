"""Dynamic tables train as static ones do, whatever the plan; which keys have rows depends on what
was seen alone.
"""

import pytest
import torch
from engine.engine_cases import RULES, make_plan, same_bits
from parity.cases import rows_held
from tiers import cover, one_of

from recapp.engine.sharded_collection import shard_bags
from recapp.errors import ConfigError, PlanError, RecappError
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.initial import start_values
from recapp.transport.communicator import Comm

KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel", "grid_shard", "mixed")
ROWS = 40
EXTREME = [-(2**63), 2**63 - 1, -1, 0, 1]


def tables(dynamic=True, dims=(8, 8, 5), dtype="fp32", **settings):
    size = {"num_embeddings": "dynamic", "dynamic": settings} if dynamic else {}
    return [
        EmbeddingBagConfig(
            **{
                "name": f"t{k}",
                "num_embeddings": ROWS,
                "embedding_dim": dim,
                "feature_names": features,
                "data_type": dtype,
                "init_range": 0.1,
                "pooling": pooling,
            }
            | size
        )
        for k, (dim, features, pooling) in enumerate(
            zip(dims, (["a", "s"], ["b", "s"], ["c"]), ("sum", "mean", "sum"), strict=True)
        )
    ]


def batch_of(step, rank, rows=12, keys=None, most=3):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, most + 1, (4 * rows,), generator=generator)
    often = torch.rand(int(lengths.sum()), generator=generator)
    numbers = (often**3 * ROWS).long()  # small ones more often
    return KeyedJaggedTensor(
        ["a", "b", "c", "s"], numbers if keys is None else keys[numbers], lengths=lengths
    )


def made(comm, kind, rule, seed=3, backend="auto", configs=None):
    configs = configs or tables()
    plan = make_plan(kind, configs, comm.world, seed=seed)
    return shard_bags(configs, plan, comm, RULES[rule], 7, backend)


def train(collection, comm, steps, keys=None, first=0):
    found = []
    for step in range(first, first + steps):
        values = collection(batch_of(step, comm.rank, keys=keys)).values()
        found.append(values.detach())
        values.square().sum().backward()
    return found


def rows_by_key(comm, collection):
    """Every tensor of every table by key, on every rank; whoever holds a row holds its bits."""
    held = [
        (b.table, b.tensor, b.shape, rows_held(b), b.cols, b.data[:].clone(), b.owner)
        for b in collection.blocks()
    ]
    whole = {}
    for table, tensor, shape, rows, cols, data, owner in (
        block for blocks in comm.all_gather(held) for block in blocks
    ):
        into = whole.setdefault((table, tensor), torch.zeros(shape, dtype=data.dtype))
        if owner:
            into[rows, cols.start : cols.stop] = data
    found = {}
    for (table, tensor), values in whole.items():
        keys = whole.get((table, "keys"), torch.arange(len(values))[:, None])[:, 0]
        if len(keys) == len(values):
            order = keys.argsort()
            found[table, tensor] = values[order]
    return found


def as_static(comm, kind, rule, backend):
    dynamic = made(comm, kind, rule, backend=backend)
    static = made(comm, kind, rule, backend=backend, configs=tables(dynamic=False))
    outputs = zip(train(dynamic, comm, 4), train(static, comm, 4), strict=True)
    equal = all(same_bits(a, b) for a, b in outputs)
    by_key, whole = rows_by_key(comm, dynamic), rows_by_key(comm, static)
    for (table, tensor), values in whole.items():
        keys = by_key[table, "keys"][:, 0]
        assert len(keys) > ROWS // 2
        equal &= same_bits(by_key[table, tensor], values[keys])
    return equal


@pytest.mark.parametrize(
    ("world", "kind", "rule", "backend"),
    one_of(9, cover(2, [[2, 1, 4], KINDS, ["rowwise_adagrad", "sgd", "adam"], ["torch", "numba"]])),
)
def test_a_dynamic_table_of_the_ids_0_to_R_is_the_static_table_bit_for_bit(
    ranks, world, kind, rule, backend
):
    assert all(ranks.run(as_static, world, kind, rule, backend))


def any_keys():
    generator = torch.Generator().manual_seed(9)
    keys = torch.randint(-(2**62), 2**62, (ROWS,), generator=generator)
    keys[: len(EXTREME)] = torch.tensor(EXTREME)
    return keys


def limited(comm, kind, settings, ahead=0, backend="torch", dtype="fp32"):
    collection = made(
        comm, kind, "adagrad", backend=backend, configs=tables(dtype=dtype, **settings)
    )
    keys = any_keys()
    batches = [batch_of(step, comm.rank, keys=keys) for step in range(12)]
    outputs = []
    for step, batch in enumerate(batches):
        if ahead:
            for later in batches[step + 1 : step + 2] if step else batches[:2]:
                collection.shared.look_ahead(later)
        values = collection(batch).values()
        with torch.no_grad():
            again = collection(batch_of(99 + step, comm.rank, keys=keys)).values()
        outputs += [values.detach(), again]
        values.square().sum().backward()
    return outputs, rows_by_key(comm, collection)


SETTINGS = (
    {},
    {"seen": 10},
    {"seen": 9, "counter": "sketch"},
    {"max_rows": 64, "eviction": "lru"},
    {"max_rows": 64, "eviction": "lfu", "seen": 4},
    {"eviction": "ttl", "ttl_steps": 2},
)


@pytest.mark.parametrize(
    ("settings", "backend", "world"),
    one_of(18, cover(2, [SETTINGS, ["torch", "numba"], [2, 1, 4]])),
)
def test_which_keys_have_rows_and_what_is_in_them_is_the_same_under_every_plan(
    ranks, world, backend, settings
):
    wanted = ranks.run(limited, world, "table_wise", settings, 0, backend)
    if settings:
        rows = wanted[0][1]["t0", "keys"]
        assert 0 < len(rows) < ROWS, "the settings keep some keys out and let others in"
    for kind, ahead in (("row_wise", 1), ("column_wise", 0), ("data_parallel", 1), ("mixed", 0)):
        found = ranks.run(limited, world, kind, settings, ahead, backend)
        for (a_outputs, a_rows), (b_outputs, b_rows) in zip(wanted, found, strict=True):
            assert all(map(same_bits, a_outputs, b_outputs)), kind
            assert a_rows.keys() == b_rows.keys()
            assert all(same_bits(a_rows[name], b_rows[name]) for name in a_rows), kind


@pytest.mark.parametrize("settings", one_of(3, SETTINGS))
def test_look_ahead_changes_no_bit(ranks, settings):
    with_none, with_one = (
        ranks.run(limited, 2, "row_wise", settings, ahead, "auto") for ahead in (0, 1)
    )
    for (a, a_rows), (b, b_rows) in zip(with_none, with_one, strict=True):
        assert all(map(same_bits, a, b))
        assert all(same_bits(a_rows[name], b_rows[name]) for name in a_rows)


@pytest.mark.full
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_number_of_ranks_decides_nothing(ranks, settings):
    """Two ranks with a batch each and one rank with both batches have the same rows."""

    one, two = (ranks.run(global_batch, world, settings)[0] for world in (1, 2))
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name].double(), two[name].double(), rtol=1e-9, atol=0), name


def joined(batches):
    """The samples of several batches as one."""
    parts = [batch.to_dict() for batch in batches]
    features = {
        key: JaggedTensor(
            torch.cat([part[key].values() for part in parts]),
            lengths=torch.cat([part[key].lengths() for part in parts]),
        )
        for key in parts[0]
    }
    return KeyedJaggedTensor.from_jt_dict(features)


def global_batch(comm, settings):
    collection = made(
        comm, "row_wise", "adagrad", backend="numba", configs=tables(dtype="fp64", **settings)
    )
    keys = any_keys()
    for step in range(10):
        batches = [batch_of(step, rank, keys=keys) for rank in range(2)]
        mine = joined(batches) if comm.world == 1 else batches[comm.rank]
        # an exchange divides by the ranks, as a mean over the global batch does
        (collection(mine).values().sum() * comm.world).backward()
    return rows_by_key(comm, collection)


def crowded(comm):
    collection = made(comm, "row_wise", "sgd", configs=tables(max_rows=64))
    keys = torch.arange(65 * (1 - comm.rank))  # on one rank only
    features = KeyedJaggedTensor(
        ["a", "b", "c", "s"], keys, lengths=torch.tensor([len(keys), 0, 0, 0])
    )
    with torch.no_grad():
        collection(features)  # evaluation needs no rows
    with pytest.raises(RecappError) as refused:
        collection(features)
    return str(refused.value)


def test_more_distinct_ids_in_a_batch_than_max_rows_are_an_error_of_all_ranks(ranks):
    guilty, other = ranks.run(crowded, 2)
    assert guilty.startswith(
        "table t0: dynamic.max_rows=64: a batch has 65 distinct ids of this table"
    )
    assert other.startswith("rank 0 could not look up its batch")


@pytest.mark.usefixtures("reference_kernels")
def test_ids_that_need_no_rows_yet_need_no_room():
    collection = made(Comm(), "row_wise", "sgd", configs=tables(max_rows=64, seen=2))
    features = KeyedJaggedTensor(
        ["a", "b", "c", "s"], torch.arange(200), lengths=torch.tensor([200, 0, 0, 0])
    )
    for rows in (0, 64):
        collection(features).values().sum().backward()
        found = collection.shared.rows_of_stretches()["t0"]["rows"]
        assert sum(found) <= rows and (sum(found) > 0) == (rows > 0)


BAD = (
    ({"id_rule": "hash"}, "tables.t.id_rule=hash: a dynamic table takes any id"),
    ({"min_key": 3}, "tables.t.min_key=3: a dynamic table takes any id"),
    ({"dynamic": {"max_rows": 10}}, "tables.t.dynamic.max_rows=10: must be a whole number of at"),
    ({"dynamic": {"seen": 0}}, "tables.t.dynamic.seen=0: must be a whole number of at least 1"),
    ({"dynamic": {"evict": "lru"}}, "tables.t.dynamic.evict: unknown; did you mean eviction?"),
    ({"dynamic": {"eviction": "fifo"}}, "tables.t.dynamic.eviction=fifo: "),
    ({"dynamic": {"eviction": "ttl"}}, "tables.t.dynamic.eviction=ttl: needs ttl_steps, a whole"),
    ({"dynamic": {"ttl_steps": 3}}, "tables.t.dynamic.ttl_steps=3: only eviction=ttl reads it"),
    ({"dynamic": {"seen": 2**31}}, "tables.t.dynamic.seen=2147483648: must be a whole number of a"),
    ({"dynamic": {"max_rows": 2**63}}, "tables.t.dynamic.max_rows=9223372036854775808: must be"),
    ({"dynamic": 5}, "tables.t.dynamic=5: must be a mapping of expected_rows, max_rows, seen"),
    ({"dynamic": False}, "tables.t.dynamic=False: must be a mapping of"),
    ({"num_embeddings": "dynamik"}, "tables.t.num_embeddings=dynamik: must be a whole number of"),
    (
        {"num_embeddings": 100, "dynamic": {"max_rows": 1000}},
        "tables.t.num_embeddings=100: the setting dynamic needs a table of any keys",
    ),
    ({"init_range": "a"}, "tables.t.init_range=a: must be a number of at least 0"),
    ({"dynamic": {"counter": "exat"}}, "tables.t.dynamic.counter=exat: did you mean exact?"),
)


@pytest.mark.parametrize(("values", "says"), BAD)
def test_what_a_dynamic_table_cannot_be_is_refused_in_one_line(values, says):
    with pytest.raises(ConfigError) as refused:
        EmbeddingBagConfig(
            **{
                "name": "t",
                "num_embeddings": "dynamic",
                "embedding_dim": 4,
                "feature_names": ["f"],
            }
            | values
        )
    assert str(refused.value).startswith(says) and "\n" not in str(refused.value)


def test_sums_are_not_asked_of_owners_of_dynamic_rows():
    config = tables()[:1]
    with pytest.raises(PlanError, match="table t0: mode pooled, but the table is dynamic"):
        shard_bags(config, make_plan("row_wise", config, 1, mode="pooled"), Comm(), RULES["sgd"])


def test_a_dynamic_table_that_is_not_sharded_says_what_to_do():
    collection = EmbeddingBagCollection(tables()[:1])
    with pytest.raises(ConfigError, match="table t0 is dynamic: only a sharded collection makes"):
        collection(batch_of(0, 0))


def test_a_key_without_a_row_answers_its_start_value_and_evaluation_makes_none():
    config = tables()[:1]
    collection = made(Comm(), "table_wise", "sgd", configs=config)
    keys = torch.tensor([5, -(2**63), 5])
    features = KeyedJaggedTensor(["a", "s"], keys, lengths=torch.tensor([1, 1, 1, 0]))
    with torch.no_grad():
        pooled = collection(features).values()
    start = start_values(keys[:2], config[0], 7, range(8), torch.float32)
    assert torch.equal(pooled[:, :8], start)
    assert len(collection.shared.stores[0].index) == 0
    collection(features).values().sum().backward()
    assert len(collection.shared.stores[0].index) == 2
