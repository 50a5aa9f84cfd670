"""Random tables, plans, collections, batches and rules: the integers of all groups at once are
those of the reference, and training has the same bits. Kernels run in Triton's interpreter.
"""

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
from engine.engine_cases import same_bits
from kernels.test_fused_integers import assert_same_integers
from optim.dense_rules import CASES, rule_of_case
from parity.cases import sharding

from recapp.engine import batch_places
from recapp.engine.fused_integers import FusedBatch, FusedIntegers
from recapp.engine.integers import NO_IDS
from recapp.engine.requests import Requests
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.state import Member
from recapp.errors import IdError
from recapp.kernels import triton_integers, triton_places, triton_requests
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.missing_ids import MISSING
from recapp.tables.config import EmbeddingConfig, PoolingType, TableLookup
from recapp.tables.positions import ROW_ORDERS
from recapp.transport.communicator import Comm

FEATURES = "abcdefg"
BAGS = (PoolingType.SUM, PoolingType.MEAN)
MODES = "unique", "pooled"
FAR = [MISSING, MISSING + 1, -1, 2**31, 2**62, 2**63 - 1]


class Case:
    """What a seed decides on: tables and their rules, collections that look them up, a plan."""

    def __init__(self, seed, world):
        self.rng = rng = random.Random(f"{seed}/{world}")
        self.weighted = rng.random() < 0.4
        dtype = rng.choice(["fp32", "fp64"])
        self.tables = [self._table(k, dtype) for k in range(rng.randint(1, 5))]
        self.members = [self._member() for _ in range(rng.randint(1, 3))]
        lookups = [x for m in self.members for x in m.lookups]
        used = {x.table.name for x in lookups}
        self.tables = [t for t in self.tables if t.name in used]
        single = {x.table.name for x in lookups if not x.is_summed}
        modes = {t: "unique" if t in single else rng.choice(MODES) for t in sorted(used)}
        cut = {
            t.name: replace(
                sharding(rng.choice(["random", "mixed"]), t, world, rng, modes[t.name]),
                row_order=rng.choice(ROW_ORDERS),
            )
            for t in self.tables
        }
        self.plan = ShardingPlan(cut, world)
        rules = [rule_of_case(case) for case in rng.sample(list(CASES), 2)]
        self.rules = {t.name: rng.choice(rules) for t in self.tables}
        self.room = [rng.choice([0, 3]) if m.columns else 0 for m in self.members]
        self.order = rng.sample(range(len(self.members)), len(self.members))

    def _table(self, number, dtype):
        rng = self.rng
        rows = rng.choice([1, 2, 3, 7, 40, 131, 1500])
        rule = rng.choice(["error", "clamp", "drop", *(["hash"] if rows > 1 else [])])
        return EmbeddingConfig(
            rows,
            rng.choice([1, 3, 4, 8]),
            f"t{number}",
            feature_names=["a"],
            data_type=dtype,
            id_rule=rule,
            min_key=0 if rule == "hash" else rng.choice([0, 0, -5, 10**12, 1 - 2**62]),
        )

    def _member(self):
        rng = self.rng
        bags = rng.random() < 0.6
        lookups = []
        for k in range(rng.randint(1, 4)):
            table = rng.choice(self.tables)
            pooling = rng.choice(BAGS) if bags else PoolingType.NONE
            hot = None
            if bags and rng.random() < 0.2:
                pooling, hot = PoolingType.CONCAT, rng.choice([1, 2, 3])
            cut = {"hotness": hot, "truncates": True} if hot else {}
            lookups.append(TableLookup(table, rng.choice(FEATURES), f"o{k}", pooling, **cut))
        return Member(tuple(lookups), None, rng.random() < 0.2)

    def sharded(self, comm):
        shared = ShardedTables(
            self.tables, self.plan, comm, self.rules, 1, "triton", None, True, None, self.members
        )
        for member, columns in enumerate(self.room):
            if columns:
                shared.state.leave_room(member, columns)
        return shared

    def vectors(self, shared, features):
        """Return what the collections look up, in an order of theirs, without the room in front."""
        found = []
        for member in self.order:
            first, *others = shared(features, member)[0]
            found += [first[:, self.room[member] :], *others]
        return found

    def batch(self, seed, wrong=False):
        """A batch of one rank. If it is `wrong`, ids are errors where tables have the rule."""
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        samples = rng.choice([0, 1, 2, 9, 30])
        most = rng.choice([0, 1, 3, 8])
        keys = rng.sample(FEATURES, len(FEATURES))
        lengths = torch.randint(0, most + 1, (len(keys), samples), generator=generator)
        if rng.random() < 0.2:
            lengths = torch.ones_like(lengths)
        if samples and rng.random() < 0.3:
            lengths[rng.randrange(len(keys))] = 0
        sizes = lengths.sum(1).tolist()
        parts = [self._ids(f, n, rng, generator, wrong) for f, n in zip(keys, sizes, strict=True)]
        ids = torch.cat(parts)
        if (ids == ids.int()).all():
            ids = ids.int()
        weights = torch.rand(len(ids), generator=generator) if self.weighted else None
        if rng.random() < 0.3:
            ids = torch.stack([ids, ids + 1], 1)[:, 0]
            weights = None if weights is None else torch.stack([weights, weights], 1)[:, 0]
        lengths = lengths.to(rng.choice([torch.int32, torch.int64])).flatten()
        return KeyedJaggedTensor(keys, ids, weights, lengths, stride=samples)

    def _ids(self, feature, n, rng, generator, wrong):
        """Ids that no table of the feature refuses."""
        lookups = [x for m in self.members for x in m.lookups if x.feature == feature]
        strict = [x.table for x in lookups if x.table.id_rule == "error"]
        low = max((t.min_key for t in strict), default=-(2**20))
        high = min((t.min_key + t.num_embeddings for t in strict), default=2**20)
        if low >= high:
            return torch.full((n,), MISSING)
        ids = torch.randint(low, high, (n,), generator=generator)
        if n and (wrong or (not strict and rng.random() < 0.5)):
            ids[torch.randint(0, n, (2,), generator=generator)] = rng.choice(FAR)
        return ids


def compare(comm, shared, fused, case, seed):
    """Compare the integers of a batch that some collections look up."""
    rng = random.Random(f"{seed}/taken")
    taken = [rng.random() < 0.7 for _ in case.members]
    taken = taken if any(taken) else None
    features = case.batch(f"{seed}/{comm.rank}")
    if case.weighted and rng.random() < 0.3:
        features.weights().requires_grad_()
    changed = shared.state.id_rules.changed
    before = dict(changed)
    linked = requests_of(shared, features, taken, fused)
    at_once = dict(changed)
    changed.update(before)
    reference = requests_of(shared, features, taken, None)
    assert isinstance(linked.integers, FusedBatch) and changed == at_once
    for mine, known in zip(linked.headers_W.tolist(), reference.headers_W.tolist(), strict=True):
        if known[3] == NO_IDS:  # whether there are any the kernels learn, and the host does not
            mine[3] = NO_IDS
        assert mine == known
    assert_same_integers(linked, reference)
    linked.release()
    reference.release()


def requests_of(shared, features, taken, fused):
    with torch.enable_grad():
        requests = Requests(features, shared.state, taken, fused)
    requests.finish()
    requests.group()
    return requests


def trained(comm, shared, case, seed):
    """Return the vectors of some steps, and the rows after them."""
    rng = random.Random(f"{seed}/training")
    ahead = rng.random() < 0.5
    steps = [case.batch(f"{seed}/step {step}/{comm.rank}") for step in range(3)]
    learns = case.weighted and rng.random() < 0.3
    for features in steps:
        if learns:
            features.weights().requires_grad_()
    stepper = Stepper()
    if rng.random() < 0.2:
        shared.update.defer(stepper)
    seen = []
    for features, later in zip(steps, [*steps[1:], None], strict=True):
        if ahead and later is not None:
            shared.look_ahead(later)
        vectors = case.vectors(shared, features)
        sum((v * v).sum() for v in vectors).backward()
        seen += [v.detach().clone() for v in vectors]
        if learns and (grad := features.weights().grad) is not None:
            seen.append(grad)
        if shared.update.deferred:
            seen.append(torch.tensor(shared.update.power_sum(2.0, 0.0)))
            shared.update.scale(0.5)
            shared.update.end_step()
    shared.forget_ahead()
    shared.update.complete()
    with torch.no_grad():
        seen += case.vectors(shared, case.batch(f"{seed}/last/{comm.rank}"))
    seen += [b.data for store in shared.stores for b in store.blocks()]
    return [x.clone(memory_format=torch.contiguous_format) for x in seen]


class Stepper:
    """An optimiser that defers updates."""


def refusal(shared, case, features):
    """Return the text of the error of a batch; None if there is none."""
    try:
        with torch.no_grad():
            case.vectors(shared, features)
    except IdError as error:
        return str(error)
    return None


def check(comm, seed):
    case = Case(seed, comm.world)
    block = random.Random(seed).choice([16, 64, 1024])
    with (
        mock.patch.object(triton_integers, "BLOCK", block),
        mock.patch.object(triton_requests, "BLOCK", block),
        mock.patch.object(triton_places, "BLOCK", block),
        mock.patch.object(batch_places, "BLOCK", block),
    ):
        shared = case.sharded(comm)
        assert FusedIntegers.takes(shared.state)
        fused = FusedIntegers(shared.state)
        for step in range(2):
            compare(comm, shared, fused, case, f"{seed}/{step}")
        seen = trained(comm, shared, case, seed)
        faulty = random.Random(f"{seed}/{comm.rank}").random() < 0.5
        wrong = case.batch(f"{seed}/wrong/{comm.rank}", faulty)
        error = refusal(shared, case, wrong)
    with mock.patch.object(FusedIntegers, "takes", lambda state: False):
        one_by_one = case.sharded(comm)
        known = trained(comm, one_by_one, case, seed)
        assert refusal(one_by_one, case, wrong) == error
    assert len(seen) == len(known) and all(map(same_bits, seen, known))


@pytest.mark.full
@pytest.mark.parametrize(("world", "seed"), [(1, 2), (1, 7), (1, 16), (2, 0), (2, 12)])
def test_random_integers_are_those_of_the_reference(interpreted, ranks, world, seed):
    if world == 1:
        check(Comm(), seed)
    else:
        ranks.run(check, world, seed)
