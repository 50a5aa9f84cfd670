"""L2 over all rows: a row that no id touched takes its missed steps when it is next read, and the
table is that of torch's dense optimiser with `weight_decay`.
"""

import copy
from dataclasses import replace

import pytest
import torch
from engine.engine_cases import (
    KINDS,
    batch_of,
    make_plan,
    make_tables,
    same_bits,
    whole_tensors,
)
from engine.test_dynamic_tables import rows_by_key
from parity.cases import loss_of
from tiers import one_of

from recapp.engine.sharded_collection import shard_bags
from recapp.errors import ConfigError
from recapp.optim.optimizer import clip_norm, hybrid
from recapp.optim.rules import adagrad, adam, momentum_sgd, sgd
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.transport.communicator import Comm

L2 = 0.02
DENSE = {
    "sgd": (sgd(0.3, l2_all_rows=L2), lambda p: torch.optim.SGD(p, 0.3, weight_decay=L2)),
    "momentum_sgd": (
        momentum_sgd(0.1, 0.8, l2_all_rows=L2),
        lambda p: torch.optim.SGD(p, 0.1, 0.8, weight_decay=L2),
    ),
    "adagrad": (
        adagrad(0.3, initial_accumulator=0.1, l2_all_rows=L2),
        lambda p: torch.optim.Adagrad(
            p, 0.3, initial_accumulator_value=0.1, weight_decay=L2, eps=1e-10
        ),
    ),
    "adam": (
        adam(0.1, 0.8, 0.95, l2_all_rows=L2),
        lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.95), weight_decay=L2),
    ),
    "adam_without_l2": (adam(0.1, l2_all_rows=0), lambda p: torch.optim.Adam(p, 0.1)),
}
TABLES = make_tables(rows=(40, 17, 7), dims=(3, 3, 3), data_type="fp64")
HEAD = torch.linspace(-1, 1, 5 * 3, dtype=torch.float64)
FEW = {"most": 1}  # most rows of a batch stay untouched
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class DenseRun:
    """Unsharded tables whose gradients are dense, under an optimiser of torch."""

    def __init__(self, make):
        self.model = EmbeddingBagCollection(TABLES, is_weighted=None, seed=1)
        self.weights = {t.name: self.model.weight(t.name) for t in TABLES}
        self.optimizer = make(self.weights.values())

    def step(self, batches, lr):
        """One update on the batches of all ranks; return the outputs of each."""
        self.optimizer.zero_grad(set_to_none=False)
        outputs = [self.model(batch).values() for batch in batches]
        (sum(loss_of(output, HEAD).mean() for output in outputs) / len(batches)).backward()
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return [output.detach() for output in outputs]


def rate_of(step):
    return 0.1 / (1 + step % 3)


def set_rate(collection, lr):
    for group in collection.shared.param_groups:
        group["lr"] = lr


def compare(collection, dense):
    for (table, tensor), data in whole_tensors(collection.shared.comm, collection).items():
        weight = dense.weights[table]
        expected = weight.detach() if tensor == "weight" else None
        if expected is None:
            expected = dense.optimizer.state[weight][tensor]
        torch.testing.assert_close(data, expected, **CLOSE)


def train(
    comm, rule, kind="table_wise", *, backend="auto", steps=9, reads=True, dense=None, **plan
):
    """Train a collection; with `dense` compare outputs in every step and tables at the end."""
    made = make_plan(kind, TABLES, comm.world, column_width=2, **plan)
    collection = shard_bags(TABLES, made, comm, rule, 1, backend)
    for step in range(steps):
        batches = [batch_of(TABLES, 3, 10 * step + r, **FEW) for r in range(comm.world)]
        set_rate(collection, rate_of(step))
        values = collection(batches[comm.rank]).values()
        loss_of(values, HEAD).mean().backward()
        if dense is not None:
            expected = dense.step(batches, rate_of(step))
            torch.testing.assert_close(values.detach(), expected[comm.rank], **CLOSE)
        if reads and step % 4 == 2:
            with torch.no_grad():
                other = batch_of(TABLES, 5, 999 + step)
                found = collection(other).values()
                if dense is not None:
                    torch.testing.assert_close(found, dense.model(other).values(), **CLOSE)
    if dense is not None:
        compare(collection, dense)
    return collection


@pytest.mark.parametrize(
    ("name", "backend"), one_of(3, [*((name, "torch") for name in DENSE), ("adam", "numba")])
)
def test_tables_are_those_of_torchs_dense_optimiser(name, backend):
    rule, make = DENSE[name]
    train(Comm(), rule, backend=backend, dense=DenseRun(make))


ADAM, DENSE_ADAM = DENSE["adam"]


def test_a_read_or_a_copy_of_the_tables_changes_no_bit_of_training():
    plain = train(Comm(), ADAM, reads=False, backend="torch")
    read = shard_bags(TABLES, make_plan("table_wise", TABLES, 1), Comm(), ADAM, 1, "torch")
    for step in range(9):
        set_rate(read, rate_of(step))
        loss_of(read(batch_of(TABLES, 3, 10 * step, **FEW)).values(), HEAD).mean().backward()
        before = copy.deepcopy(read.state_dict())
        if step % 3 == 1:
            read.load_state_dict(before)
    wanted = whole_tensors(Comm(), plain)
    for key, data in whole_tensors(Comm(), read).items():
        assert same_bits(data, wanted[key]), key


def test_reads_change_no_bit_of_tables_of_fp32():
    tables = make_tables(rows=(40, 17, 7), dims=(3, 3, 3))
    found = []
    for reads in (False, True):
        made = make_plan("table_wise", tables, 1)
        collection = shard_bags(tables, made, Comm(), ADAM, 1, "torch")
        for step in range(6):
            values = collection(batch_of(tables, 3, 10 * step, **FEW)).values()
            loss_of(values, HEAD.float()).mean().backward()
            if reads:
                with torch.no_grad():
                    collection(batch_of(tables, 5, 999 + step))
        found.append(whole_tensors(Comm(), collection))
    plain, read = found
    assert all(same_bits(data, plain[key]) for key, data in read.items())
    assert plain["t0", "weight"].dtype == torch.float32


def test_rows_of_an_old_lookup_are_updated_after_the_steps_between():
    """Its backward comes after another step, and its rows miss that step."""
    dense = DenseRun(DENSE_ADAM)
    made = make_plan("table_wise", TABLES, 1)
    collection = shard_bags(TABLES, made, Comm(), ADAM, 1, "torch")
    late = loss_of(collection(batch_of(TABLES, 3, 1, **FEW)).values(), HEAD).mean()
    expected = loss_of(dense.model(batch_of(TABLES, 3, 1, **FEW)).values(), HEAD).mean()
    for seed in (2, 3):
        values = collection(batch_of(TABLES, 3, seed, **FEW)).values()
        loss_of(values, HEAD).mean().backward()
        collection.shared.update.finish_step()
        dense.step([batch_of(TABLES, 3, seed, **FEW)], ADAM.lr)
    late.backward()
    collection.shared.update.finish_step()
    dense.optimizer.zero_grad(set_to_none=False)
    expected.backward()
    dense.optimizer.step()
    compare(collection, dense)


def test_clipped_and_accumulated_gradients_have_no_part_of_l2():
    """As in torch: L2 is added in the optimiser's step, after clipping."""
    dense = DenseRun(DENSE_ADAM)
    made = make_plan("table_wise", TABLES, 1)
    collection = shard_bags(TABLES, made, Comm(), ADAM, 1, "torch")
    layer = torch.nn.Linear(1, 1)
    optimizer = hybrid(torch.optim.SGD(layer.parameters(), 0.1), [collection.shared])
    collection.shared.update.defer(optimizer)
    optimizer.table_gradients = [collection.shared.update]
    for step in range(5):
        optimizer.zero_grad()
        dense.optimizer.zero_grad(set_to_none=False)
        for part in range(2):
            batch = batch_of(TABLES, 3, 10 * step + part, **FEW)
            loss_of(collection(batch).values(), HEAD).mean().backward()
            loss_of(dense.model(batch).values(), HEAD).mean().backward()
        norm = clip_norm([], optimizer.table_gradients, 0.5)
        wanted = torch.nn.utils.clip_grad_norm_(dense.weights.values(), 0.5)
        torch.testing.assert_close(norm, float(wanted))
        optimizer.step()
        dense.optimizer.step()
    compare(collection, dense)


def test_rows_that_begin_anew_take_no_steps_of_other_rows():
    """A managed collision gives rows to other ids: these rows alone catch up."""
    collection = train(Comm(), ADAM, backend="torch")
    shared = collection.shared
    stores = shared.state.stores
    behind = [int((store.steps < store.missed.now).sum()) for store in stores]
    assert sum(behind) > 10
    shared.begin_rows("t0", torch.tensor([3, 5, 99]))
    after = [int((store.steps < store.missed.now).sum()) for store in stores]
    assert 0 <= sum(behind) - sum(after) <= 2
    fresh = shard_bags(TABLES, make_plan("table_wise", TABLES, 1), Comm(), ADAM, 1, "torch")
    start = whole_tensors(Comm(), fresh)["t0", "weight"]
    found = whole_tensors(Comm(), collection)["t0", "weight"]
    assert [n for n in range(len(start)) if same_bits(start[n], found[n])] == [3, 5]


def test_a_table_that_begins_anew_has_missed_nothing():
    collection = train(Comm(), ADAM, backend="torch")
    collection.shared.begin_anew([t.name for t in TABLES], 1)
    start = whole_tensors(Comm(), collection)
    fresh = shard_bags(TABLES, make_plan("table_wise", TABLES, 1), Comm(), ADAM, 1, "torch")
    fresh.shared.begin_anew([t.name for t in TABLES], 1)
    for key, data in whole_tensors(Comm(), fresh).items():
        assert same_bits(start[key], data)
    for seed in (50, 51, 52):
        for each in (collection, fresh):
            values = each(batch_of(TABLES, 3, seed, **FEW)).values()
            set_rate(each, 0.1)
            loss_of(values, HEAD).mean().backward()
    wanted = whole_tensors(Comm(), fresh)
    for key, data in whole_tensors(Comm(), collection).items():
        assert same_bits(data, wanted[key])


def test_rows_of_dynamic_tables_take_the_steps_since_they_exist():
    """The rows of 3 and 4 get memory that other keys left steps ago."""
    dynamic = {"dynamic": {"eviction": "ttl", "ttl_steps": 2}, "init_range": 1.0}
    tables = make_tables(rows=("dynamic",) * 3, dims=(4, 4, 4), data_type="fp64", **dynamic)
    made = make_plan("table_wise", tables, 1)
    found = {}
    for l2, rule in ((True, sgd(0.5, l2_all_rows=0.1)), (False, sgd(0.5))):
        collection = shard_bags(tables, made, Comm(), rule, 1, "torch")
        for keys in ([11, 12, 13, 14], [2], [2], [2], [2, 3, 4]):
            ids = torch.tensor(keys * 4)
            lengths = torch.full((4,), len(keys))
            batch = KeyedJaggedTensor(["a", "shared", "b", "c"], ids, None, lengths)
            (collection(batch).values() * 0.0).sum().backward()
        found[l2] = rows_by_key(Comm(), collection.shared)
    shrunk = (1 - 0.5 * 0.1) ** torch.tensor([[4.0], [1.0], [1.0]]).double()
    for key in found[True]:
        if key[1] == "weight":  # in the order of keys
            torch.testing.assert_close(found[True][key], found[False][key] * shrunk)


def test_an_average_of_the_rows_has_their_missed_steps():
    dense = DenseRun(DENSE_ADAM)
    made = make_plan("table_wise", TABLES, 1)
    collection = shard_bags(TABLES, made, Comm(), ADAM, 1, "torch")
    collection.shared.keep_average()
    average = {name: weight.detach().clone() for name, weight in dense.weights.items()}
    for step in range(4):
        batch = batch_of(TABLES, 3, step, **FEW)
        loss_of(collection(batch).values(), HEAD).mean().backward()
        dense.step([batch], ADAM.lr)
        share = 0.3 if step else 1.0
        collection.shared.update_average(share)
        for name, weight in dense.weights.items():
            average[name].lerp_(weight.detach(), share)
    collection.shared.show_average(True)
    other = batch_of(TABLES, 5, 99)
    with torch.no_grad():
        found = collection(other).values()
        for name, weight in dense.weights.items():
            weight.copy_(average[name])
        torch.testing.assert_close(found, dense.model(other).values(), **CLOSE)


@pytest.mark.parametrize(
    ("types", "wanted"), [(["fp16"], "fp32"), (["bf16"], "fp32"), (["fp32", "fp64"], "fp64")]
)
def test_rows_narrower_than_the_arithmetic_are_refused(types, wanted):
    """They would be rounded when they are read, so reads would change the training."""
    tables = [
        replace(table, data_type=types[n % len(types)]) for n, table in enumerate(make_tables())
    ]
    said = f"l2_all_rows: table t0 has data_type={types[0]}, and rows .* computes, {wanted}: set"
    with pytest.raises(ConfigError, match=said):
        shard_bags(tables, make_plan("table_wise", tables, 1), Comm(), ADAM)


def of_kinds(comm, kinds, backend):
    """Train under each kind of plan against torch; return what differs from the first, by kind."""
    found = {}
    first = None
    for kind, mode in kinds:
        dense = DenseRun(DENSE_ADAM)
        ran = train(comm, ADAM, kind, backend=backend, dense=dense, mode=mode)
        whole = whole_tensors(comm, ran)
        first = first or whole
        found[kind] = [key for key in whole if not same_bits(whole[key], first[key])]
    return found


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_tables_have_the_same_bits_under_every_plan(ranks, world):
    kinds = [(kind, "unique") for kind in KINDS]
    for found in ranks.run(of_kinds, world, kinds, "numba" if world == 2 else "torch"):
        assert found == {kind: [] for kind in KINDS}


@pytest.mark.full
def test_owners_that_sum_bags_catch_their_rows_up(ranks):
    kinds = [("row_wise", "pooled"), ("column_wise", "pooled")]
    assert ranks.run(of_kinds, 2, kinds, "torch")
