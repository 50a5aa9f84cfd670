"""Dynamic tables of several GPUs: ranks request positions of each other, for all groups at once,
and the owner's hash table finds the rows. Integers, slots, rows and vectors are those of groups
that are routed one by one. Kernels run in Triton's interpreter here.
"""

import random
from unittest import mock

import pytest
import torch
from engine.engine_cases import make_plan, same_bits
from engine.test_dynamic_tables import EXTREME
from kernels.test_device_key_index import counts_of_second_step
from kernels.test_fused_integers import assert_same_links, links_of

from recapp.benchmarks.kernel_costs import Mirror
from recapp.engine import batch_places
from recapp.engine.fused_integers import FusedBatch, FusedIntegers
from recapp.engine.sharded_collection import shard_bags
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.state import Member
from recapp.kernels import triton_integers, triton_requests
from recapp.optim.rules import adagrad, sgd
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig, lookups_of

FEATURES = ["a", "b", "c", "d"]
KINDS = ["table_wise", "row_wise", "data_parallel", "column_wise", "mixed"]
SETTINGS = [
    {},
    {"seen": 2},
    {"max_rows": 640},
    {"eviction": "ttl", "ttl_steps": 2},
    {"seen": 2, "counter": "sketch", "max_rows": 640, "eviction": "lfu"},
]


class Case:
    """What a seed decides on."""

    def __init__(self, seed):
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.kind = rng.choice(KINDS)
        self.weighted = rng.random() < 0.4
        self.ahead = rng.random() < 0.5
        self.rule = rng.choice([sgd(0.5), adagrad(0.1)])
        dynamic = {"num_embeddings": "dynamic", "init_range": 0.5}
        shapes = [("t0", 8, "ab"), ("t1", 8, "bc"), ("t2", 4, "c"), ("t3", 8, "d")]
        self.bags = [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=dim,
                feature_names=list(features),
                pooling=rng.choice(["sum", "mean"]),
                dynamic=rng.choice(SETTINGS),
                **dynamic,
            )
            for name, dim, features in shapes
        ]
        self.bags.append(
            EmbeddingBagConfig(
                name="s", num_embeddings=40, embedding_dim=8, feature_names=["d"], id_rule="hash"
            )
        )
        self.sequences = [EmbeddingConfig("dynamic", 8, "q", feature_names=["a", "d"])]

    def sharded(self, comm):
        both = [*self.bags, *self.sequences]
        plan = make_plan(self.kind, both, comm.world, seed=self.seed, column_width=4)
        members = [Member(lookups_of(self.bags)), Member(lookups_of(self.sequences))]
        args = both, plan, comm, self.rule, 1, "triton", None, True, None, members
        return ShardedTables(*args)

    def batch(self, step, rank):
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * step + rank)
        samples = random.Random(f"{self.seed}/{step}/{rank}").choice([0, 1, 7, 12])
        lengths = torch.randint(0, 4, (len(FEATURES) * samples,), generator=generator)
        keys = torch.cat([torch.tensor(EXTREME), 3 * torch.arange(60) - 70])
        often = torch.rand(int(lengths.sum()), generator=generator)
        ids = keys[(often**2 * len(keys)).long()]
        weights = torch.rand(len(ids), generator=generator) if self.weighted else None
        return KeyedJaggedTensor(FEATURES, ids, weights, lengths, stride=samples)


def assert_same_integers(linked, reference):
    stores = linked.state.stores
    for store, mine, known in zip(stores, linked.asked, reference.asked, strict=True):
        if not (mine.local and waits_for_rows(store)):  # keys without rows have other slots
            assert_same_links(mine.combine_links, known.combine_links)
        if len(linked.headers_W) > 1:
            assert_same_links(mine.gradient_links, known.gradient_links)
    for g, (mine, known) in enumerate(zip(linked.served, reference.served, strict=True)):
        if waits_for_rows(stores[g]):
            continue  # they have no gradients either
        if len(linked.headers_W) > 1:
            assert_same_links(mine.answer_links, known.answer_links)
        found = linked.row_gradients_G[g].exact()
        expected = reference.row_gradients_G[g].exact()
        # rows of the one are in the order of slots, of the other in the order of requests
        assert gradients_of_rows(found) == gradients_of_rows(expected)


def gradients_of_rows(x):
    """Return the offsets of each row's gradients, by row."""
    edges = x.links.offsets_M1.tolist()
    index = x.links.index_N.tolist()
    return {row: index[edges[i] : edges[i + 1]] for i, row in enumerate(x.row_U.tolist())}


def trained(comm, shared, case, steps):
    """Return the vectors of some steps, and every tensor by key."""
    seen = []
    batches = [case.batch(step, comm.rank) for step in range(steps)]
    for step, features in enumerate(batches):
        if case.ahead and step + 1 < steps:
            shared.look_ahead(batches[step + 1])
        with mock.patch.object(shared, "_ahead", []), torch.no_grad():
            seen += [v for m in range(2) for v in shared(case.batch(90 + step, comm.rank), m)[0]]
        vectors = [v for m in range(2) for v in shared(features, m)[0]]
        sum((v * v).sum() for v in vectors).backward()
        seen += [v.detach() for v in vectors]
    shared.update.complete()
    return seen


def waits_for_rows(store):
    return store.finds_rows and store.admission.exact is not None


def slots_of(shared):
    """Return the position and strip of each slot that was ever used, store by store; where keys
    wait for their rows, those of rows in the order of their positions.
    """
    found = []
    for s in shared.stores:
        if s.finds_rows:
            slots = slice(s.slots.used)
            if waits_for_rows(s):
                slots = torch.cat([s.index.slots_of(i) for i in range(len(s.strips))])
            found.append((s.index.positions.rows[slots], s.index.strips.rows[slots]))
    return found


def check(comm, seed, steps=3, alone=()):
    """Compare training. The ranks in `alone` route their groups one by one, as those do whose batch
    may have too many ids for `max_rows`.
    """
    case = Case(seed)
    has_room = comm.rank not in alone
    one_by_one = mock.patch.object(FusedIntegers, "takes", lambda state: False)
    block = random.Random(seed).choice([16, 64, 1024])
    with (
        mock.patch.object(triton_integers, "BLOCK", block),
        mock.patch.object(triton_requests, "BLOCK", block),
        mock.patch.object(batch_places, "BLOCK", block),
        mock.patch.object(FusedIntegers, "has_room", lambda self, ids: has_room),
    ):
        shared = case.sharded(comm)
        assert FusedIntegers.takes(shared.state)
        seen = trained(comm, shared, case, steps)
        with one_by_one:
            known = case.sharded(comm)
            expected = trained(comm, known, case, steps)
        assert len(seen) == len(expected) and all(map(same_bits, seen, expected))
        for mine, its in zip(slots_of(shared), slots_of(known), strict=True):
            assert all(map(torch.equal, mine, its))
        linked = links_of(shared, case.batch(50, comm.rank), FusedIntegers(shared.state))
        reference = links_of(known, case.batch(50, comm.rank), None)
        assert_same_integers(linked, reference)
        assert [s.changes() for s in shared.stores if s.finds_rows] == [
            s.changes() for s in known.stores if s.finds_rows
        ]
    assert isinstance(linked.integers, FusedBatch) is has_room


@pytest.mark.full
def test_ranks_may_route_one_by_one_beside_others(interpreted, ranks):
    ranks.run(check, 2, 6, 3, (1,))


@pytest.mark.full
@pytest.mark.parametrize(("world", "seed"), [(2, 3), (2, 4), (2, 6), (2, 7), (2, 9), (4, 5)])
def test_ranks_request_rows_of_dynamic_tables_for_all_groups_at_once(
    interpreted, ranks, world, seed
):
    ranks.run(check, world, seed)


def test_a_mirror_of_a_rank_requests_rows_of_dynamic_tables_as_in_the_reference(interpreted):
    check(Mirror(torch.device("cpu")), 6, steps=1)


BARS = {"launches": 18, "sorts": 3, "waits": 2, "copies": 5, "operations": 32}


def test_the_work_of_a_step_does_not_grow_with_the_number_of_strips(interpreted):
    """Ranks have the tables by rows, so each strip is on both."""
    comm = Mirror(torch.device("cpu"))
    tables = [
        EmbeddingBagConfig(
            name=f"t{n}", num_embeddings="dynamic", embedding_dim=4, feature_names=[f"f{n}"]
        )
        for n in range(26)
    ]
    plan = make_plan("row_wise", tables, comm.world)
    collection = shard_bags(tables, plan, comm, sgd(0.1), 7, "triton")
    assert FusedIntegers.takes(collection.shared.state)
    counts = counts_of_second_step(collection)
    assert {count: n for count, n in counts.items() if n > BARS.get(count, n)} == {}
