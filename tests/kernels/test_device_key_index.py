"""Dynamic tables on a GPU, in Triton's interpreter: programs follow one another there, so races
between threads do not show.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine.engine_cases import make_plan
from engine.test_dynamic_semantics import happens
from engine.test_dynamic_tables import EXTREME, batch_of, rows_by_key, train
from engine.test_dynamic_tables import made as made_collection
from engine.test_dynamic_tables import tables as dynamic_tables
from gpu_first.recorder import Recorder
from kernels.test_key_index import CPU, crowded, few, random_steps, spread

from recapp.engine.sharded_collection import shard_bags
from recapp.errors import ConfigError
from recapp.kernels.reference import SortedIndex
from recapp.optim.rules import rowwise_adagrad
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.initial import start_hash, start_values
from recapp.tables.positions import STRETCHES, keys_of, positions_of
from recapp.transport.communicator import Comm

TESTS = Path(__file__).parents[1]


@pytest.fixture
def made(interpreted, monkeypatch):
    """Return a function that makes an index of few lanes and buckets: several programs, growth."""
    monkeypatch.setattr("recapp.kernels.triton_key_index.LANES", 32)
    monkeypatch.setattr("recapp.kernels.triton_key_index.LEAST_BUCKETS", 16)
    return lambda: interpreted.key_index(range(STRETCHES), 1 << 16, CPU)


@pytest.mark.parametrize("positions", [spread, few])
def test_keys_are_found_added_and_removed_as_in_a_dict(made, positions):
    random_steps(made(), positions, 3, 80)


@pytest.mark.full
@pytest.mark.parametrize("positions", [spread, crowded, few])
def test_many_strips_and_steps(made, positions):
    random_steps(made(), positions, 10, 300, strips=26)


def test_keys_of_one_hash_and_words_of_buckets_are_keys_like_others(made):
    """All keys begin at one bucket, and their positions are the words that mark buckets."""
    index = made()
    index._secret = 0  # every key has the same hash
    strip_N = torch.arange(24).to(torch.int16) % 3
    position_N = torch.arange(-8, 16) // 2
    index.positions.grow(24)
    index.strips.grow(24)
    slot_N, first_U = index.find_or_insert(position_N, strip_N, torch.arange)
    assert slot_N.tolist() == first_U.tolist() == list(range(24))
    index.remove(slot_N[::2])
    assert index.find(position_N, strip_N).tolist() == [-1 if n % 2 == 0 else n for n in range(24)]


def test_removed_keys_leave_no_trace_in_time(made):
    """The table is made anew, not larger, where as many keys go as come."""
    index = made()
    sizes = set()
    for step in range(5):
        position_N = torch.arange(20) + 20 * step
        index.positions.grow(20)
        index.strips.grow(20)
        slot_N, _ = index.find_or_insert(position_N, torch.zeros(20).short(), torch.arange)
        index.remove(slot_N)
        sizes.add(index.nbytes)
    assert len(index) == 0 and max(sizes) <= 8 * 80


def test_no_keys_are_no_launch(made):
    none = torch.zeros(0, dtype=torch.int64)
    for index in (made(), SortedIndex(range(STRETCHES), 8, CPU)):
        slot_N, first_U = index.find_or_insert(none, none.short(), torch.arange)
        assert len(slot_N) == len(first_U) == len(index.find(none, none.short())) == 0
        assert len(index.slots_of(0)) == 0


@pytest.mark.full
def test_kernels_compile_for_a_gpu_that_is_not_here():
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "kernels.compile_key_index"],
        env={
            **os.environ,
            "TRITON_INTERPRET": "0",
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(set(done.stdout.splitlines())) == [
        "begin",
        "count_new",
        "find",
        "find swap least",
        "follow",
        "insert_new swap",
        "rebuild swap",
        "remove",
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_start_values_of_all_strips_have_the_bits_of_the_definition(interpreted, dtype):
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings="dynamic",
            embedding_dim=70,
            feature_names=[name],
            data_type=dtype,
            init_range=init_range,
        )
        for name, init_range in (("a", 0.3), ("b", 0.1), ("c", 1.0))
    ]
    first_column = [0, 3, 5]
    generator = torch.Generator().manual_seed(1)
    position_M = torch.cat([spread(generator, 17), torch.tensor([-(2**63), 2**63 - 1, 0])])
    strip_M = (torch.arange(20) % 3).to(torch.int16)
    slot_M = torch.randperm(20, generator=generator) + 5
    rows_RD = torch.zeros(30, 65, dtype=tables[0].data_type.dtype)
    starts_I = (
        torch.tensor([start_hash(table, 7) for table in tables]),
        torch.tensor(first_column),
        torch.tensor([table.start_range / 2**24 for table in tables]),
    )
    interpreted.begin_rows(rows_RD, starts_I, (slot_M, position_M, strip_M))
    expected_RD = torch.zeros_like(rows_RD)
    for strip, (table, first) in enumerate(zip(tables, first_column, strict=True)):
        own = strip_M == strip
        columns = range(first, first + 65)
        values = start_values(keys_of(position_M[own]), table, 7, columns, rows_RD.dtype)
        expected_RD[slot_M[own]] = values.to(rows_RD.dtype)
    assert torch.equal(rows_RD, expected_RD)


def collection_of(strips, **settings):
    tables = [
        EmbeddingBagConfig(
            name=f"t{n}",
            num_embeddings="dynamic",
            embedding_dim=4,
            feature_names=[f"f{n}"],
            dynamic=settings,
        )
        for n in range(strips)
    ]
    plan = make_plan("table_wise", tables, 1)
    return shard_bags(tables, plan, Comm(), rowwise_adagrad(0.1), 7, "triton")


BARS = {  # launches, operations, waits of a step that adds rows: they may fall
    "rows": ({}, (5, 12, 1)),
    "limits": ({"max_rows": 64 * 50}, (5, 31, 2)),
    "counts": ({"seen": 2}, (11, 59, 5)),
}


@pytest.mark.parametrize(("settings", "bars"), BARS.values(), ids=BARS)
def test_the_work_of_a_step_does_not_grow_with_the_number_of_strips(interpreted, settings, bars):
    store = collection_of(26, **settings).shared.stores[0]
    for step in range(2):
        keys = torch.arange(26 * 4) + 26 * step
        rows = positions_of(keys), (keys % 26).to(torch.int16)
        recorder = Recorder()
        with recorder.recording():
            store.locate(*rows, trains=True)
        if step == 0:
            store.settle(1)
    counts = recorder.counts()
    for count, bar in zip(("launches", "operations", "waits"), bars, strict=True):
        assert counts[count] <= bar, count
    assert len(store.index) > 0


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_keys_rows_and_counts_are_those_of_a_plain_model(interpreted, tmp_path, seed):
    assert happens(Comm(), tmp_path, seed, "table_wise", "triton", steps=6)["steps"]


def trained_tables(backend):
    """Return the outputs of steps of dynamic tables and a static one, and every tensor by key."""
    configs = [
        *dynamic_tables(dims=(8, 8, 5), seen=1),
        EmbeddingBagConfig(
            name="s", num_embeddings=40, embedding_dim=8, feature_names=["c"], id_rule="hash"
        ),
    ]
    keys = torch.cat([torch.tensor(EXTREME), torch.arange(100, 200)])
    comm = Comm()
    collection = made_collection(comm, "table_wise", "rowwise_adagrad", 3, backend, configs)
    outputs = train(collection, comm, 3, keys=keys)
    with torch.no_grad():
        outputs.append(collection(batch_of(9, 0)).values())
    return outputs, rows_by_key(comm, collection)


def test_dynamic_tables_beside_others_train_as_in_the_reference(interpreted):
    found, expected = map(trained_tables, ("triton", "torch"))
    torch.testing.assert_close(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        torch.testing.assert_close(found[1][name], values)


def counts_of_second_step(collection):
    """Train 26 dynamic tables on new keys twice, and count what the second step gives a GPU."""
    for step in range(2):
        keys = torch.arange(26 * 4) + 26 * step
        batch = KeyedJaggedTensor(
            [f"f{n}" for n in range(26)], keys, lengths=torch.ones(26 * 4, dtype=torch.int32)
        )
        recorder = Recorder()
        with recorder.recording():
            values = collection(batch).values()
            torch.autograd.backward(values, torch.ones_like(values))
    return recorder.counts()


@pytest.mark.parametrize(
    ("settings", "bars"),
    [({}, (10, 1, 6)), ({"seen": 2}, (10, 1, 6)), ({"max_rows": 64 * 1000}, (10, 1, 6))],
    ids=["rows", "counts", "limits"],
)
def test_a_step_of_dynamic_tables_is_that_of_static_ones_and_a_search(interpreted, settings, bars):
    collection = collection_of(26, **settings)
    counts = counts_of_second_step(collection)
    launches, waits, operations = bars
    bars = {"launches": launches, "sorts": 1, "waits": waits, "operations": operations}
    assert {count: n for count, n in counts.items() if n > bars.get(count, n)} == {}


def test_more_distinct_ids_in_a_batch_than_max_rows_are_an_error(interpreted):
    collection = collection_of(1, max_rows=64)
    lengths = torch.ones(100, dtype=torch.int32)
    collection(KeyedJaggedTensor(["f0"], torch.arange(100) // 50, lengths=lengths))
    with pytest.raises(ConfigError, match="max_rows=64: a batch has 100 distinct ids"):
        collection(KeyedJaggedTensor(["f0"], torch.arange(100), lengths=lengths))
