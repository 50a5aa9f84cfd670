"""Recorded steps of dynamic tables whose keys get rows at once, or after some steps, and keep them
as long as they use them: the device counts and adds keys, and the host makes room ahead and sweeps.
A recorder stands for a CUDA graph, and Triton's interpreter for a GPU; tables of a few buckets grow
in the middle of recorded steps.
"""

import pytest
import torch
from engine.dynamic_checkpoints import fill, write
from engine.engine_cases import make_plan, same_bits
from engine.test_dynamic_tables import rows_by_key
from gpu_first.recorder import counted
from torch.nn.functional import binary_cross_entropy_with_logits

from recapp.engine import dynamic_keys
from recapp.engine.dynamic_keys import KeySlots
from recapp.engine.dynamic_store import DynamicStore
from recapp.engine.sharded_collection import shard_model, sharded_tables
from recapp.errors import IdError, TrainingError
from recapp.graphs.module_graph import ModuleGraph
from recapp.graphs.recorded_batch import WARM_UP
from recapp.graphs.step_graph import StepGraph
from recapp.optim.optimizer import hybrid
from recapp.optim.rules import adagrad, adam, rowwise_adagrad
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.positions import positions_of, stretches_of
from recapp.transport.communicator import Comm

FEATURES = "abd"
B = 6
KEYS = torch.arange(20_000)
KEYS = KEYS[stretches_of(positions_of(KEYS)) == 7]
CPU = torch.device("cpu")


class Model(torch.nn.Module):
    """Two dynamic tables that share a store, and a static one."""

    def __init__(self, **of_tables):
        super().__init__()
        torch.manual_seed(1)
        dynamic = {"num_embeddings": "dynamic", **of_tables}
        self.tables = [
            EmbeddingBagConfig(
                **({"num_embeddings": 9} if f == "d" else dynamic),
                embedding_dim=4,
                name=f,
                feature_names=[f],
            )
            for f in FEATURES
        ]
        self.bags = EmbeddingBagCollection(self.tables, seed=2)
        self.top = torch.nn.Linear(12, 1)

    def forward(self, batch):
        return self.top(self.bags(batch.sparse).values()).squeeze(1)


def loss(model, batch):
    return binary_cross_entropy_with_logits(model(batch), batch.labels_B)


def batch_of(seed, new=True, bad=False, most=9, keys=None):
    """A batch whose features have any number of ids below 9, some of which no batch had before; of
    dynamic tables those among `keys`.
    """
    drawn = torch.Generator().manual_seed(seed)
    per_F = [torch.randint(1, most, (), generator=drawn).item() for _ in FEATURES]
    ids = [torch.randint(30 + 9 * new * seed, (n,), generator=drawn) - 15 for n in per_F]
    ids[-1] = ids[-1] % 9
    if keys is not None:
        ids[:-1] = [keys[15 + ids_N] for ids_N in ids[:-1]]
    if bad:
        ids[-1][0] = 9
    bags = [torch.randint(B, (n,), generator=drawn).bincount(minlength=B) for n in per_F]
    features = KeyedJaggedTensor([*FEATURES], torch.cat(ids), lengths=torch.cat(bags))
    labels_B = (torch.rand(B, generator=drawn) < 0.4).float()
    return Batch(torch.zeros(B, 0), features, labels_B)


class Trained:
    """A model and its steps: those of `StepGraph` (`recorded`), of a `ModuleGraph` in a loop of the
    user's (`calls`), or of a loop without graphs (`loop`). `rows` tells the host of new keys.
    """

    def __init__(self, steps, rule=None, backend="triton", **of_tables):
        self.model = Model(**of_tables)
        plan = make_plan("table_wise", self.model.tables, 1)
        shard_model(self.model, plan, Comm(), rule or rowwise_adagrad(0.125), backend)
        (self.shared,) = sharded_tables(self.model)
        self.dense = torch.optim.Adam(self.model.parameters(), 2**-7, fused=True)
        self.optimizer = hybrid(self.dense, [self.shared])
        self.captures = self.replays = 0
        self.graph = None
        if steps == "recorded":
            self.graph = StepGraph(self.model, loss, self.optimizer, self.capture)
            self.step = self.graph
        else:
            self.graph = ModuleGraph(self.model, CPU, self.capture) if steps == "calls" else None
            self.step = self.plain_step

    @property
    def stores(self):
        return [s for s in self.shared.stores if isinstance(s, DynamicStore)]

    def capture(self, step):
        """Record a step, and take back what it has done to the tables."""
        memory = [self.graph._verdict.stopped, *(p.data for p in self.model.parameters())]
        memory += [x for s in self.dense.state.values() for x in s.values()]
        for s in self.shared.stores:
            memory += [] if isinstance(s, DynamicStore) else [s.weights, *s.state]
        for s in self.stores:
            index = s.index
            of_use = s.admission.last_used, s.admission.uses
            held = [m.rows for m in (s._weights, *s._state, *of_use, *s.slots.memories)]
            memory += [index._table, index.numbers, s.admission._counts_4A]
            if exact := s.admission.exact:
                memory += [exact.slots.index._table, exact.slots.index.numbers]
                held += [m.rows for m in (exact.counts, *exact.slots.memories)]
            memory += [rows[:512] for rows in held]
        return counted(self, step, memory)

    def plain_step(self, batch):
        self.optimizer.zero_grad()
        value = loss(self.graph or self.model, batch)
        value.backward()
        self.optimizer.step()
        return value.detach()

    def train(self, batches):
        values = [self.step(batch).clone() for batch in batches]
        if self.graph is not None:
            self.graph.finish()
        return values

    def tensors(self):
        rows = rows_by_key(Comm(), self.shared)
        found = [rows[name] for name in sorted(rows)]
        return [*(p.detach().clone() for p in self.model.parameters()), *found]

    def slots(self):
        """Return the strip and position of each slot that was given out, and what was counted.
        Where keys wait for their rows, slots of those that do not get one lie between others, or
        behind them.
        """
        found = []
        for s in self.stores:
            n = s.slots.used
            if not (exact := s.admission.exact):
                found += [s.index.positions.rows[:n], s.index.strips.rows[:n]]
            else:
                for number, strip in enumerate(s.strips):
                    waiting = exact.keys_of_stretches(number)
                    blocks = exact.blocks(number, strip, waiting, True)
                    found += [waiting, *(b.data[:].clone() for b in blocks)]
            found.append(s.admission.rows_IR)
        return [*found, self.shared.changes()]


@pytest.fixture
def small(interpreted, monkeypatch):
    """Let hash tables have few buckets and programs few lanes."""
    monkeypatch.setattr("recapp.kernels.triton_key_index.LANES", 16)
    monkeypatch.setattr("recapp.kernels.triton_key_index.LEAST_BUCKETS", 16)
    return monkeypatch


def told(monkeypatch, work):
    """Do some work while the host is told of each new key."""
    with monkeypatch.context() as patch:
        patch.setattr(DynamicStore, "adds_unread", False)
        return work()


def same(mine, known):
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, known)
    if isinstance(mine, list | tuple):
        return len(mine) == len(known) and all(map(same, mine, known))
    return mine == known


def equal(mine, known):
    return all(map(same_bits, mine.tensors(), known.tensors())) and same(
        mine.slots(), known.slots()
    )


STEPS = WARM_UP + 4
ADAGRAD = adagrad(0.1, initial_accumulator=0.3)
SEEN = {"dynamic": {"seen": 2}}
FAR = {"dynamic": {"max_rows": 64 * 300, "eviction": "lfu"}}
TTL = {"dynamic": {"eviction": "ttl", "ttl_steps": 3}}


def batches(first=0, steps=STEPS, **settings):
    return [batch_of(seed, **settings) for seed in range(first, first + steps)]


@pytest.mark.parametrize(
    ("steps", "rule", "of_tables"),
    [
        ("recorded", rowwise_adagrad(0.125), {}),
        ("recorded", ADAGRAD, SEEN),
        pytest.param("calls", adam(0.1), {}, marks=pytest.mark.full),
        pytest.param("calls", adam(0.1), SEEN, marks=pytest.mark.full),
        pytest.param("calls", adam(0.1), TTL, marks=pytest.mark.full),
        pytest.param("recorded", ADAGRAD, {}, marks=pytest.mark.full),
        pytest.param("loop", ADAGRAD, {}, marks=pytest.mark.full),
        pytest.param("loop", ADAGRAD, {"dynamic": {"seen": 3}}, marks=pytest.mark.full),
    ],
    ids=["recorded", "seen", "calls", "calls-seen", "calls-ttl", "state", "loop", "loop-seen"],
)
def test_rows_and_slots_are_those_of_a_host_that_is_told(small, steps, rule, of_tables):
    trained, known = Trained(steps, rule, **of_tables), Trained("loop", rule, **of_tables)
    values = trained.train(batches())
    assert trained.captures == {"recorded": 1, "calls": 2, "loop": 0}[steps]
    assert trained.replays == {"recorded": 3, "calls": 6, "loop": 0}[steps]
    indexes = [slots.index for s in trained.stores for slots, _ in s._growing]
    assert all(len(index._table) > 16 for index in indexes)  # they have grown
    assert all(map(same_bits, values, told(small, lambda: known.train(batches()))))
    assert equal(trained, known)


@pytest.mark.full
@pytest.mark.parametrize("of_tables", [{}, SEEN, FAR, TTL], ids=["plain", "seen", "far", "ttl"])
@pytest.mark.parametrize("between", ["evaluated", "loaded"])
def test_what_happens_between_recorded_steps(small, tmp_path, between, of_tables):
    """Batches are evaluated, whose new keys leave no trace; or a checkpoint is loaded, of which the
    tables had other keys before.
    """
    trained, known = (
        Trained("recorded", ADAGRAD, **of_tables),
        Trained("loop", ADAGRAD, **of_tables),
    )

    def run(one):
        values = one.train(batches())
        if between == "evaluated":
            with torch.no_grad():
                values += [one.model(batch_of(90)), one.model(batch_of(91))]
        else:
            write(tmp_path / "checkpoint", one.model.bags, Comm())
            one.train(batches(50, 2))
            fill(tmp_path / "checkpoint", one.model.bags)
        return [*values, *one.train(batches(20, 3))]

    assert all(map(same_bits, run(trained), told(small, lambda: run(known))))
    assert trained.captures == 1 and trained.replays >= 6
    assert equal(trained, known)


@pytest.mark.parametrize(
    ("needs", "for_few", "of_tables"),
    [
        (False, False, {}),
        (False, False, SEEN),
        (True, True, {"dynamic": {"seen": 2, "counter": "sketch"}}),
        (True, False, {"dynamic": {"max_rows": 6400}}),
        (False, False, TTL),
    ],
    ids=["plain", "seen", "sketch", "max_rows", "ttl"],
)
def test_tables_that_choose_their_keys_need_the_host(interpreted, needs, for_few, of_tables):
    trained = Trained("loop", **of_tables)
    assert trained.shared.needs_host() is needs
    assert trained.shared.needs_host(100) is for_few
    assert trained.shared.needs_host(101) is needs
    for s in trained.stores:
        s.keep_average()
    assert trained.shared.needs_host(0)


@pytest.mark.parametrize(
    ("kind", "of_tables"),
    [
        (IdError, {}),
        pytest.param(IdError, SEEN, marks=pytest.mark.full),
        pytest.param(IdError, FAR, marks=pytest.mark.full),
        pytest.param(IdError, TTL, marks=pytest.mark.full),
        pytest.param(TrainingError, {}, marks=pytest.mark.full),
        pytest.param(TrainingError, TTL, marks=pytest.mark.full),
    ],
)
def test_a_fault_adds_no_key_any_more_and_evicts_none(small, kind, of_tables):
    def held():
        """A loss is known after its lookup, which has noted the use of rows."""
        tensors = [x for x in trained.tensors() if kind is IdError or x.is_floating_point()]
        return tensors, trained.slots()

    trained = Trained("recorded", **of_tables)
    trained.train(batches())
    faulty = batch_of(50, bad=kind is IdError)
    if kind is TrainingError:
        trained.train([faulty])  # its keys have rows, as in a loop
        faulty.labels_B[0] = torch.nan
    before = held()
    with pytest.raises(kind):
        trained.train([faulty, *batches(60, 3)])
    assert same(before, held())
    assert {s.step for s in trained.stores} == {trained.shared.updates}
    trained.train(batches(70, 2))
    assert not same(before[1], trained.slots())


@pytest.mark.parametrize(
    "of_tables", [SEEN, pytest.param(TTL, marks=pytest.mark.full)], ids=["seen", "ttl"]
)
def test_several_lookups_of_a_step_count_a_key_once(small, of_tables):
    """Keys without rows of the first lookup are known to the second, and to one between them that
    is not trained. A step that is not trained to its end counts, too.
    """

    def run(one):
        found = []
        for seed in range(3):
            one.optimizer.zero_grad()
            first = one.model(batch_of(seed))
            with torch.no_grad():
                found += [one.model(batch_of(1))] if seed == 0 else []
            second = one.model(batch_of(seed, new=False))
            found += [first.detach(), second.detach()]
            if seed != 1:
                (first.sum() - 2 * second.sum()).backward()
                one.optimizer.step()
        return found

    trained, known = Trained("loop", **of_tables), Trained("loop", **of_tables)
    assert all(map(same_bits, run(trained), told(small, lambda: run(known))))
    assert equal(trained, known)


LFU = {"eviction": "lfu"}


@pytest.mark.parametrize(
    ("steps", "told_of", "settings"),
    [
        ("loop", 5, {"max_rows": 64 * 40}),
        pytest.param("loop", 0, {"max_rows": 64 * 300}, marks=pytest.mark.full),
        pytest.param("loop", 10, {"max_rows": 64 * 24}, marks=pytest.mark.full),
        pytest.param("loop", 10, {"max_rows": 64 * 24, **LFU}, marks=pytest.mark.full),
        pytest.param("loop", 3, {"max_rows": 64 * 24, "seen": 2}, marks=pytest.mark.full),
        pytest.param("loop", 0, TTL["dynamic"], marks=pytest.mark.full),
        ("recorded", 0, TTL["dynamic"]),
        pytest.param("recorded", 0, {**TTL["dynamic"], "seen": 2}, marks=pytest.mark.full),
        pytest.param("recorded", 10, {"max_rows": 64 * 24, **LFU}, marks=pytest.mark.full),
        pytest.param("recorded", 5, {"max_rows": 64 * 40}, marks=pytest.mark.full),
        pytest.param("recorded", 0, {"max_rows": 64 * 300, **LFU}, marks=pytest.mark.full),
    ],
    ids=[
        *("near", "far", "full", "lfu", "seen", "ttl", "recorded-ttl", "ttl-seen"),
        *("recorded-full", "recorded-near", "recorded-far"),
    ],
)
def test_the_use_of_rows_and_victims_are_those_of_a_host_that_is_told(
    small, steps, told_of, settings
):
    """All keys have one stretch. Near its limit, the host is told of the keys of a step, whose
    lookups are cut out of what is recorded from then on.
    """
    trained, known = (Trained(s, ADAGRAD, dynamic=settings) for s in (steps, "loop"))
    told_in = noted(small, trained)
    small.setattr(
        "recapp.kernels.triton_new_rows.ROWS", 4
    )  # entries of a row lie in several programs
    news = [True, True, False, True, True, True, True, False, False, True, False, True, True]
    trainings = [batch_of(seed % 9, new, keys=KEYS) for seed, new in enumerate(news)]

    def run(one):
        values = one.train(trainings[:9])
        with torch.no_grad():
            values.append(one.model(batch_of(20, keys=KEYS)))
        return [*values, *one.train(trainings[9:])]

    assert all(map(same_bits, run(trained), told(small, lambda: run(known))))
    assert equal(trained, known)  # with the use of rows
    assert sum(told_in) == told_of
    assert steps == "loop" or trained.graph.cuts is bool(told_of)


def noted(monkeypatch, trained):
    """Return a list of whether searches that tell the host are those of the rows of a training."""
    told_in = []
    find_or_insert = KeySlots.find_or_insert
    (store,) = trained.stores

    def telling(slots, *of_keys):
        told_in.append(slots is store.slots)
        return find_or_insert(slots, *of_keys)

    monkeypatch.setattr(KeySlots, "find_or_insert", telling)
    return told_in


@pytest.mark.full
@pytest.mark.parametrize(
    ("steps", "of_tables"),
    [
        ("recorded", {}),
        ("recorded", SEEN),
        ("loop", FAR),
    ],
    ids=["plain", "seen", "far"],
)
def test_slots_that_were_given_back_are_taken_without_telling_the_host(
    small, tmp_path, steps, of_tables
):
    """One of the tables that share a store is loaded: slots of the rows it had are taken again."""
    trained, known = (Trained(s, ADAGRAD, **of_tables) for s in (steps, "loop"))
    told_in = noted(small, trained)
    (store,) = trained.stores

    def run(one):
        values = one.train(batches())
        write(tmp_path / "checkpoint", one.model.bags, Comm())
        values += one.train(batches(50, 2))
        fill(tmp_path / "checkpoint", one.model.bags, "a")
        return values

    values = run(trained)
    given_back, used = len(store.slots.free), store.slots.used
    told_in.clear()
    values += trained.train(batches(60, 6))
    assert not sum(told_in)
    assert given_back > 0 and store.slots.used > used and not len(store.slots.free)
    expected = told(small, lambda: run(known) + known.train(batches(60, 6)))
    assert all(map(same_bits, values, expected))
    assert equal(trained, known)


class Widened(Model):
    """Looks up another key beside each one of a batch."""

    def forward(self, batch):
        ids = batch.sparse
        both = torch.stack([ids.values(), KEYS.flip(0)[: len(ids.values())]], 1)
        lengths = torch.cat([2 * ids.lengths()[:-B], ids.lengths()[-B:]])
        dynamic = int(ids.lengths()[:-B].sum())
        values = torch.cat([both[:dynamic].view(-1), ids.values()[dynamic:]])
        features = KeyedJaggedTensor(ids.keys(), values, lengths=lengths)
        return super().forward(Batch(batch.dense_BI, features, batch.labels_B))


@pytest.mark.full
@pytest.mark.parametrize("bad", [False, True])
def test_a_model_with_more_keys_than_its_batch_keeps_to_the_limit(small, bad):
    """The host cannot see in the batch that the limit is near. It decides when keys are new, if the
    device has not stopped.
    """
    small.setitem(globals(), "Model", Widened)
    trained = Trained("recorded", dynamic={"max_rows": 64 * 10})
    (store,) = trained.stores
    ids = torch.cat([KEYS[:7], torch.tensor([9 if bad else 3])])
    lengths = torch.tensor([1, 1, 1, 1, 1, 1, 1, *[0] * 5, 1, *[0] * 5])
    batch = Batch(
        torch.zeros(B, 0), KeyedJaggedTensor([*FEATURES], ids, lengths=lengths), torch.ones(B)
    )
    trained.step(batch)
    assert store.admission.rows_IR.amax() == (0 if bad else 10)
    if bad:
        with pytest.raises(IdError):
            trained.train([])
    else:
        trained.train([batch] * 3)
        assert store.admission.rows_IR.amax() == 10


def new_keys(step, n=5):
    """A batch with some keys of each dynamic table that those of other steps do not have."""
    keys = KEYS[10 * step : 10 * step + n]
    ids = torch.cat([keys, keys, keys[:1] % 9])
    lengths = torch.tensor([n, *[0] * 5, n, *[0] * 5, 1, *[0] * 5])
    features = KeyedJaggedTensor([*FEATURES], ids, lengths=lengths)
    return Batch(torch.zeros(B, 0), features, torch.arange(B) % 2.0)


@pytest.mark.full
def test_the_last_step_before_a_limit_is_recorded_whole(small):
    """There is room for the step before it is recorded, and none for another one behind it."""
    way = "recorded", None, "triton"
    trained, known = (Trained(*way, dynamic={"max_rows": 64 * 44}) for _ in range(2))
    known.graph.why_not = "launched"
    steps = [new_keys(step) for step in range(WARM_UP + 1)]
    assert all(map(same_bits, trained.train(steps), known.train(steps)))
    assert trained.captures == 1 and not trained.graph.cuts
    more = [new_keys(step) for step in range(WARM_UP + 1, 10)]
    assert all(map(same_bits, trained.train(more), known.train(more)))
    assert trained.captures == 2 and trained.graph.cuts
    assert equal(trained, known)


@pytest.mark.full
def test_no_key_is_added_near_a_limit_after_a_fault_that_nobody_has_read(small):
    trained = Trained("recorded", dynamic={"max_rows": 64 * 24})
    trained.train([new_keys(0)])
    faulty = new_keys(0)
    faulty.labels_B[0] = torch.nan
    trained.step(faulty)
    before = trained.slots()
    with pytest.raises(TrainingError):
        trained.step(new_keys(1, 8))
    assert same(before, trained.slots())


def test_a_step_that_has_stopped_uses_no_row(small):
    trained = Trained("loop", **FAR)
    trained.train(batches(steps=2))
    before = trained.tensors()
    trained.shared.state.stopped = torch.ones(1, dtype=torch.int32)
    trained.model(batch_of(0))
    assert same(before, trained.tensors())


class Late:
    """A copy to the host that arrives when it is asked for the second time."""

    def __init__(self):
        self.asked = 0

    def query(self):
        self.asked += 1
        return self.asked > 1


def test_room_is_for_as_many_keys_as_may_be_new(small):
    """The host learns late how many were new. Where memory ends it waits, before it is an error."""
    trained, known = Trained("loop"), Trained("loop")
    (slots,) = (s.slots for s in trained.stores)
    small.setattr(
        dynamic_keys, "start_to_host", lambda tensors: ([x.clone() for x in tensors], Late())
    )
    seen = [batch_of(seed % 3) for seed in range(12)]
    for one in seen:
        trained.train([one])
        assert slots.most <= slots.index.positions.held
        assert 2 * (slots.index._used + slots._taken) <= len(slots.index._table)
    assert slots.index.positions.held < sum(sum(one.sparse.length_per_key()[:2]) for one in seen)
    told(small, lambda: known.train(seen))
    assert equal(trained, known)
    slots.index.positions.capacity = slots.index.positions.held
    trained.train(seen[:6])  # no key is new, and only the exact number tells it
    with pytest.raises(MemoryError):
        trained.train(batches(100, 10))
