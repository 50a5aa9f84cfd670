"""Dynamic tables against a plain model of what is said of them (`recapp/tables/positions.py`,
`recapp/engine/dynamic_store.py`, `recapp/engine/admission.py`): a dict of keys, on random settings,
batches and orders of forward, backward and evaluation.
"""

import random
from collections import Counter
from functools import lru_cache

import pytest
import torch
from engine.dynamic_checkpoints import fill, write
from engine.engine_cases import make_plan
from engine.test_dynamic_tables import joined, rows_by_key
from tiers import one_of

from recapp.engine.admission import EVICTED_AT_ONCE, SWEEPS
from recapp.engine.sharded_collection import shard_bags
from recapp.errors import ConfigError
from recapp.optim.rules import sgd
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.initial import start_values
from recapp.tables.positions import first_position, keys_of, positions_of, stretches_of
from recapp.transport.communicator import Comm

FEATURES = {"t0": ["a", "s"], "t1": ["b", "s"], "t2": ["c"]}
DIMS = {"t0": 4, "t1": 4, "t2": 3}
EXTREME = [-(2**63), 2**63 - 1, -1, 0, 1]
SEED = 7
RATE = 0.5


class Row:
    def __init__(self, value, step):
        self.value, self.last, self.uses = value, step + 1, 1


class PlainTable:
    """A table as a dict; `step` is the number of updates so far.

    A training lookup uses the rows of its keys, and the others are new; of these, some are admitted
    and the rest are guests until the step ends. `new`, `admitted` and `evicted` count since there
    were `held` rows.
    """

    def __init__(self, config):
        self.config = config
        self.settings = config.dynamic
        self.rows = {}
        self.guests = set()
        self.counts = Counter()
        self.step = 0
        self.pending = {}
        self.starts = {}
        self.count_anew()

    def count_anew(self):
        self.new = self.admitted = self.evicted = 0
        self.held = len(self.rows)

    def start(self, key):
        if key not in self.starts:
            columns = range(self.config.embedding_dim)
            values = start_values(torch.tensor([key]), self.config, SEED, columns, torch.float64)
            self.starts[key] = values[0]
        return self.starts[key]

    def value(self, key):
        return self.rows[key].value if key in self.rows else self.start(key)

    def look_up(self, keys):
        """What a training batch of all ranks does to the table, before it is answered."""
        for key in set(keys) & self.rows.keys():
            row = self.rows[key]
            row.uses += row.last != self.step + 1
            row.last = self.step + 1
        new = set(keys) - self.rows.keys() - self.guests
        self.new += len(new)
        wanted = {key for key in new if self._seen_often(key)}
        admitted = self._with_room(wanted)
        self.admitted += len(admitted)
        self.guests |= new - admitted
        for key in admitted:
            self.rows[key] = Row(self.start(key), self.step)
            if self.settings.counter == "exact":
                del self.counts[key]

    def _seen_often(self, key):
        if self.settings.seen > 1:
            self.counts[key] += 1
        return self.settings.seen == 1 or self.counts[key] >= self.settings.seen

    def _with_room(self, wanted):
        if self.settings.max_rows is None:
            return wanted
        admitted = set()
        rows = by_stretch(self.rows)
        for stretch, new in by_stretch(wanted).items():
            most = self.settings.most_rows(stretch)
            held = rows.get(stretch, [])
            over = len(held) + len(new) - most
            if over > 0:
                unused = [key for key in held if self.rows[key].last != self.step + 1]
                leaving = sorted(unused, key=self._order)[: max(over, most // EVICTED_AT_ONCE)]
                for key in leaving:
                    self._leaves(key)
                new = new[: len(new) - max(0, over - len(leaving))]
            admitted |= set(new)
        return admitted

    def _order(self, key):
        row = self.rows[key]
        by_uses = (row.uses,) if self.settings.eviction == "lfu" else ()
        return (*by_uses, row.last, position(key))

    def _leaves(self, key):
        del self.rows[key]
        self.evicted += 1

    def learn(self, keys, gradient):
        """Note the gradient of a lookup whose backward has come."""
        for key, times in Counter(keys).items():
            self.pending[key] = self.pending.get(key, 0) + gradient * times

    def end_step(self):
        self.step += 1
        for key, gradient in self.pending.items():
            if key in self.rows:
                self.rows[key].value = self.rows[key].value - RATE * gradient
        self.pending, self.guests = {}, set()
        life = self.settings.ttl_steps
        if life is not None and self.step % max(1, life // SWEEPS) == 0:
            for key in [key for key, row in self.rows.items() if row.last <= self.step - life]:
                self._leaves(key)


@lru_cache(None)
def position(key):
    return int(positions_of(torch.tensor([key])))


@lru_cache(None)
def stretch_of(key):
    return int(stretches_of(torch.tensor(position(key))))


def by_stretch(keys):
    """Keys by stretch, in the order of their positions."""
    found = {}
    for key in sorted(keys, key=position):
        found.setdefault(stretch_of(key), []).append(key)
    return found


class Plain:
    """All tables, and when a step ends: with the next lookup or reading after a backward."""

    def __init__(self, configs):
        self.tables = {c.name: PlainTable(c) for c in configs}
        self.learned = False

    def settle(self):
        if self.learned:
            for table in self.tables.values():
                table.end_step()
        self.learned = False

    def keys(self, table, batch):
        return [k for f in FEATURES[table] for k in batch[f].values().tolist()]

    def train(self, batch):
        self.settle()
        for name, table in self.tables.items():
            table.look_up(self.keys(name, batch))

    def learn(self, batch, gradient):
        self.learned = True
        for name, table in self.tables.items():
            table.learn(self.keys(name, batch), gradient)

    def answer(self, batch):
        parts = []
        for name, table in self.tables.items():
            for feature in FEATURES[name]:
                bags = batch[feature].to_dense()
                zero = torch.zeros(table.config.embedding_dim, dtype=torch.float64)
                pooled = [sum(map(table.value, bag.tolist()), zero) for bag in bags]
                parts.append(torch.stack(pooled) if bags else zero.new_zeros(0, len(zero)))
        return torch.cat(parts, 1)


def random_settings(rng, a_stretch):
    """Of one table; `a_stretch` is about how many keys of the pool a stretch has."""
    made = {}
    if rng.random() < 0.5:
        made |= {"seen": rng.randint(2, 4), "counter": rng.choice(["exact", "sketch"])}
    kind = rng.choice(["lru", "lfu", "ttl", None])
    if kind == "ttl":
        made |= {"eviction": "ttl", "ttl_steps": rng.choice([1, 2, 5, 17])}
    elif kind:
        made |= {"eviction": kind}
    if kind and (kind != "ttl" or rng.random() < 0.5):
        made |= {"max_rows": max(64, int(64 * a_stretch * rng.choice([0.02, 0.1, 0.3, 0.9])))}
    return made


def random_pool(rng, stretches):
    """Keys, and about how many of them a stretch has: of all stretches, or of few that are full."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    if stretches is None:
        keys = torch.randint(-(2**63), 2**63 - 1, (250,), generator=generator)
        return torch.cat([torch.tensor(EXTREME), keys]), 4
    inside = torch.randint(0, 2**58 - 1, (len(stretches), 60), generator=generator)
    first = torch.tensor([first_position(stretch) for stretch in stretches])
    return keys_of((first[:, None] + inside).view(-1)), 60


def random_batch(rng, pool):
    rows = rng.randint(0, 5)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    lengths = torch.randint(0, 4, (4 * rows,), generator=generator)
    often = torch.rand(int(lengths.sum()), generator=generator)
    keys = pool[(often ** rng.choice([1, 3]) * len(pool)).long()]
    return KeyedJaggedTensor(["a", "b", "c", "s"], keys, lengths=lengths)


def configs_of(rng, a_stretch):
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings="dynamic",
            embedding_dim=DIMS[name],
            feature_names=FEATURES[name],
            data_type="fp64",
            init_range=0.1,
            dynamic=random_settings(rng, a_stretch),
        )
        for name in FEATURES
    ]


def check_tables(comm, collection, plain):
    """The tables hold what the model holds."""
    plain.settle()
    found = rows_by_key(comm, collection)
    changes = collection.shared.changes()
    for name, table in plain.tables.items():
        keys = sorted(table.rows)
        rows = [table.rows[key] for key in keys]
        assert found[name, "keys"][:, 0].tolist() == keys, f"{name} {table.settings}"
        if rows:
            expected = torch.stack([row.value for row in rows])
            torch.testing.assert_close(found[name, "weight"], expected, rtol=1e-12, atol=1e-12)
        if table.settings.tracks_use:
            assert found[name, "last_used"][:, 0].tolist() == [row.last for row in rows]
            assert found[name, "uses"][:, 0].tolist() == [row.uses for row in rows]
        else:
            assert (name, "last_used") not in found
        counted = changes[name]
        assert (counted.new, counted.admitted) == (table.new, table.admitted)
        assert counted.evicted == table.evicted == table.held + table.admitted - len(rows)
        assert table.settings.max_rows is None or len(rows) <= table.settings.max_rows


PLANS = ["table_wise", "row_wise", "column_wise", "data_parallel", "grid_shard", "mixed", "random"]


def happens(comm, folder, seed, kind, backend, steps=10):
    """Do random things to a collection and to the model; return how much of each came up."""
    rng = random.Random(seed)
    stretches = rng.choice([None, [0, 63], [31, 32, 40]])
    pool, a_stretch = random_pool(rng, stretches)
    configs = configs_of(rng, a_stretch)
    plain = Plain(configs)
    held = []
    happened = Counter()

    def made(kind):
        plan = make_plan(kind, configs, comm.world, seed=seed)
        return shard_bags(configs, plan, comm, sgd(RATE), SEED, backend)

    collection = made(kind)

    def batches():
        of_ranks = [random_batch(rng, pool) for _ in range(comm.world)]
        return of_ranks[comm.rank], joined(of_ranks)

    def evaluated():
        mine, _ = batches()
        plain.settle()
        with torch.no_grad():
            found = collection(mine).values()
        torch.testing.assert_close(found, plain.answer(mine), rtol=1e-12, atol=1e-12)

    for step in range(steps):
        lookups = []
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.3:
                evaluated()
            mine, of_all = batches()
            plain.train(of_all)
            found = collection(mine).values()
            torch.testing.assert_close(found, plain.answer(mine), rtol=1e-12, atol=1e-12)
            lookups.append((found, of_all, rng.choice(["learns", "learns", "held", "gone"])))
        if rng.random() < 0.3:
            evaluated()
        del found
        rng.shuffle(lookups)
        for number, (found, of_all, fate) in enumerate(lookups):
            lookups[number] = None
            if fate == "learns":
                scale = rng.choice([-1.0, 0.5, 2.0])
                (found.sum() * scale * comm.world).backward()
                plain.learn(of_all, scale)
            elif fate == "held":
                held.append(found)
        del found, lookups
        if rng.random() < 0.2:
            held.clear()
        moves = plain.learned and rng.random() < 0.2  # a step that has not ended has guests
        if rng.random() < 0.5:
            check_tables(comm, collection, plain)
        if moves:
            path = folder / f"{step}.ckpt"
            collection.shared.rows_of_stretches()  # ends the step
            write(path, collection, comm)
            collection = made(rng.choice(PLANS))
            fill(path, collection)
            plain.settle()
            for table in plain.tables.values():
                happened.update(admitted=table.admitted, evicted=table.evicted)
                table.count_anew()
    check_tables(comm, collection, plain)
    for table in plain.tables.values():
        happened.update(admitted=table.admitted, evicted=table.evicted, steps=table.step)
    return happened


CASES = [(1, "table_wise"), (2, "random"), (2, "mixed"), (4, "grid_shard")]


@pytest.mark.parametrize(
    ("world", "kind", "seed"),
    one_of(20, [(world, kind, seed) for world, kind in CASES for seed in range(10)]),
)
def test_keys_rows_and_counts_are_those_of_a_plain_model(ranks, tmp_path, world, kind, seed):
    backend = ("torch", "numba")[seed % 2]
    for happened in ranks.run(happens, world, tmp_path, seed, kind, backend):
        assert happened["admitted"] >= happened["evicted"] and happened["steps"]


def one_table(trains=True, **settings):
    table = EmbeddingBagConfig(
        name="t", num_embeddings="dynamic", embedding_dim=2, feature_names=["f"], dynamic=settings
    )
    plan = make_plan("table_wise", [table], 1)
    return shard_bags([table], plan, Comm(), sgd(RATE) if trains else None, SEED, "torch")


def of_keys(*keys):
    return KeyedJaggedTensor(["f"], torch.tensor(keys), lengths=torch.ones(len(keys)).int())


def rows_of(collection, *keys):
    with torch.no_grad():
        return collection(of_keys(*keys)).values()


def test_a_key_that_finds_no_room_keeps_its_count():
    """A stretch with room for one row: of two keys the one with the smaller position gets it, and
    the other one in the next step in which it is seen.
    """
    collection = one_table(seen=2, max_rows=64)
    first, second = keys_of(first_position(9) + torch.tensor([3, 5])).tolist()
    for keys in ((first, second), (first, second), (second,)):
        collection(of_keys(*keys)).values().sum().backward()
        (held,) = (b.data[:].tolist() for b in collection.blocks() if b.tensor == "keys")
    assert held == [[second]]


def test_a_backward_that_comes_too_late_is_refused_and_changes_no_row():
    """The row of the first key has left for that of the second, and the third lies in its place."""
    collection = one_table(max_rows=64)
    keys = keys_of(first_position(9) + torch.arange(3)).tolist()
    late = collection(of_keys(keys[0])).values()
    for key in keys[1:]:
        collection(of_keys(key)).values().sum().backward()
    before = rows_of(collection, *keys)
    with pytest.raises(ConfigError, match="backward of a lookup of an earlier step") as refused:
        late.sum().backward()
    assert "\n" not in str(refused.value)
    assert torch.equal(rows_of(collection, *keys), before)


def test_tables_that_are_only_read_get_no_rows_even_where_gradients_are_on():
    collection = one_table(trains=False)
    found = collection(of_keys(4, 5)).values()
    assert torch.equal(found, rows_of(collection, 4, 5))
    assert len(collection.shared.stores[0].index) == 0
