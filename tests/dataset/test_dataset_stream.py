"""Batches in the one order, for every number of ranks and threads, from any position, in bounded
memory.
"""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataset_files import (
    SCHEMA,
    global_batches,
    lengths_of,
    numbered_source,
    random_groups,
    rank_batches,
    row_numbers,
    values_of,
)

from recapp.dataset import parquet, stream
from recapp.dataset.chunk_store import ChunkStore
from recapp.dataset.collate import Collate
from recapp.dataset.parquet import CHUNK_ROWS
from recapp.dataset.schema import Schema
from recapp.dataset.source import open_source
from recapp.dataset.stream import BatchStream, Reader, Turns, deal, permutations
from recapp.errors import ConfigError, DataError
from recapp.sparse.keyed_jagged_tensor import as_int64
from recapp.sparse.transfer import memory_of, places_of

SETTINGS = {"batch_size": 60, "lanes": 6, "shuffle_rows": 42, "seed": 3, "training": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return 397 rows in 3 files with row groups of 1 to 40 rows.

    One row group is empty and one larger than a lane.
    """
    sizes = random_groups(5, 300, 40)
    return numbered_source(tmp_path_factory.mktemp("numbered"), [sizes[:9], [97, 0], sizes[9:]])


def expected_batches(source, epoch=0, *, batch_size, lanes, shuffle_rows, seed, training):
    """Return the contract's batches, made with lists: deal, permute blocks, take equal shares."""
    first_rows = []
    seen = 0
    for segment in source.segments:
        first_rows.append(seen)
        seen += segment.rows
    orders = []
    for lane, pieces in enumerate(
        deal([segment.rows for segment in source.segments], lanes, shuffle_rows).lanes
    ):
        rows = [
            first_rows[segment] + first + offset
            for segment, first, count in pieces.tolist()
            for offset in range(count)
        ]
        if shuffle_rows:
            block = shuffle_rows // lanes
            blocks = [rows[first : first + block] for first in range(0, len(rows), block)]
            rows = [
                own[index]
                for number, own in enumerate(blocks)
                for index in permutations(seed, epoch, range(lane, lane + 1), number, len(own))[0]
            ]
        orders.append(rows)
    share = batch_size // lanes
    count = source.rows // batch_size if training else -(-source.rows // batch_size)
    return [
        [row for order in orders for row in order[index * share : (index + 1) * share]]
        for index in range(count)
    ]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shuffle_rows", [0, 6, 42, 1000])
def test_batches_are_those_of_the_contract(source, shuffle_rows, training):
    settings = {**SETTINGS, "shuffle_rows": shuffle_rows, "training": training}
    assert global_batches(source, **settings) == expected_batches(source, **settings)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_the_number_of_ranks_does_not_change_global_batches(source, world, training):
    settings = {**SETTINGS, "training": training}
    assert global_batches(source, world=world, **settings) == global_batches(source, **settings)


@pytest.mark.parametrize("batches", [0, 3])
@pytest.mark.parametrize(("world", "threads"), [(1, 1), (1, 3), (2, 2)])
def test_threads_do_not_change_global_batches(source, world, threads, batches):
    settings = {**SETTINGS, "training": False}
    ways = {"world": world, "threads": threads, "position": (2, batches)}
    plain = expected_batches(source, 2, **settings)
    assert global_batches(source, **ways, **settings) == plain[batches:]


def test_a_fault_comes_after_the_batches_before_it_and_threads_end_with_their_reader(tmp_path):
    path = tmp_path / "rows.parquet"
    labels = [0] * 96 + [2]
    rows = {"label": labels, "number": [0.0] * 97, "one": [*range(97)]}
    pq.write_table(pa.table(rows), path, row_group_size=8)
    schema = Schema("label", ("number",), ("one",))
    settings = {"batch_size": 8, "lanes": 1, "training": False, "shuffle_rows": 0}
    stream = BatchStream(open_source(str(path), schema), schema, **settings)
    stream.num_threads = 2
    got = []
    with pytest.raises(DataError, match="column label, row 96 holds 2"):
        got.extend(stream)
    for batch in stream:
        got.append(batch)
        break
    del batch
    assert [values_of(batch, "one")[0] for batch in got] == [*range(0, 96, 8), 0]
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("recapp-")]


@pytest.mark.parametrize("batches", [0, 2])
def test_no_chunk_is_kept_behind_its_last_row(source, monkeypatch, batches):
    stores = []
    made = lambda *given: stores.append(ChunkStore(*given)) or stores[-1]  # noqa: E731
    monkeypatch.setattr(stream, "ChunkStore", made)
    settings = {**SETTINGS, "shuffle_rows": 48, "training": False}
    assert global_batches(source, position=(0, batches), **settings)
    (store,) = stores
    assert store._chunks and not any(store._chunks)


@pytest.mark.parametrize("weight", [None, "less", {"click": "less", "buy": "more"}])
@pytest.mark.parametrize("sparse", [("one",), ("one", "many", "other")])
def test_a_batch_for_a_gpu_is_the_same_in_one_memory(tmp_path, sparse, weight):
    rows = range(45)
    columns = {name: [row % 2 for row in rows] for name in ("click", "buy")}
    columns |= {name: [row / 8 for row in rows] for name in ("number", "less", "more")}
    columns |= {name: [*rows] for name in ("one", "other")}
    columns["many"] = [[*range(row % 4)] for row in rows]
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=10)
    schema = Schema(("click", "buy"), ("number",), sparse, weight=weight)
    settings = {"batch_size": 12, "lanes": 4, "training": False, "numbered": True}
    plain, there = (
        BatchStream(open_source(str(tmp_path / "rows.parquet"), schema), schema, **settings)
        for _ in range(2)
    )
    there.for_gpu = True
    for want, got in zip(plain, there, strict=True):
        short = got.short().tensors()
        places = places_of(short)
        memory = memory_of(short, [places[id(tensor)] for tensor in short])
        assert memory is not None and memory.data_ptr() == got.dense_BI.data_ptr()
        assert [*got.labels, *got.weights] == [*want.labels, *want.weights]
        for one, other in zip(got.tensors(), want.tensors(), strict=True):
            assert one.equal(other) and one.dtype == other.dtype


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("odd", [2**31 - 1, 2**31, -(2**31)])
def test_ids_are_int32_until_a_chunk_has_one_that_does_not_fit(tmp_path, odd, threads):
    """Two lanes of two chunks of 4 rows, and the odd id in the second chunk of one."""
    path = tmp_path / "rows.parquet"
    ids = pa.array([None, *range(-2, 7), odd, *range(5)])
    more = pa.array([[row] * (row % 3) for row in range(16)])
    table = pa.table({"label": [0] * 16, "one": ids, "many": more})
    pq.write_table(table, path, row_group_size=4)
    schema = Schema("label", (), ("one", "many"))
    settings = {"batch_size": 4, "lanes": 2, "training": False, "shuffle_rows": 0}
    wide, narrow = (
        BatchStream(open_source(str(path), schema), schema, **settings) for _ in range(2)
    )
    narrow.narrows = True
    narrow.num_threads = threads
    batches = [*zip(wide, narrow, strict=True)]
    fits = odd == 2**31 - 1
    kinds = [there.sparse.values().dtype for _, there in batches]
    assert kinds == [torch.int32] * (4 if fits else 2) + [torch.int64] * (0 if fits else 2)
    for batch, there in batches:
        assert batch.sparse.values().equal(as_int64(there.sparse.values()))
        assert batch.sparse.lengths().equal(there.sparse.lengths())
    # those of the next epoch are of one type
    assert {there.sparse.values().dtype for there in narrow} == {kinds[-1]}


@pytest.mark.parametrize("training", [True, False])
def test_a_row_is_read_at_most_once_an_epoch_and_in_evaluation_exactly_once(source, training):
    rows = [
        row
        for batch in global_batches(source, **{**SETTINGS, "training": training})
        for row in batch
    ]
    assert len(rows) == len(set(rows)) == (360 if training else 397)


def test_features_labels_and_numbers_of_a_row_stay_together(source):
    for batch in BatchStream(source, SCHEMA, **SETTINGS, dense_transform="none"):
        rows = row_numbers(batch)
        assert batch.labels_B.tolist() == [row % 2 for row in rows]
        assert values_of(batch, "one") == [row * 10 for row in rows]
        assert lengths_of(batch, "many") == [row % 4 for row in rows]
        assert values_of(batch, "many") == [row for row in rows for _ in range(row % 4)]
        assert values_of(batch, "other") == [row if row % 3 else -(2**63) for row in rows]


def test_ranks_without_rows_pad_evaluation_with_empty_batches(tmp_path):
    few = numbered_source(tmp_path, [[5]])
    ranks = rank_batches(few, world=4, batch_size=4, lanes=4, shuffle_rows=0, training=False)
    assert [[len(batch) for batch in batches] for batches in ranks] == [
        [1, 1],
        [1, 0],
        [1, 0],
        [1, 0],
    ]
    empty = list(BatchStream(few, SCHEMA, batch_size=4, lanes=4, rank=3, world=4, training=False))[
        1
    ]
    assert (empty.rows, empty.dense_BI.shape, empty.sparse.keys()) == (
        0,
        (0, 1),
        ["one", "many", "other"],
    )


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("rows", [0, 1, 3, 15])
def test_fewer_rows_than_lanes_are_all_read_on_any_number_of_ranks(tmp_path, rows, world):
    source = numbered_source(tmp_path, [[20]]).slice(5, 5 + rows)
    batches = global_batches(
        source, world=world, batch_size=64, lanes=16, shuffle_rows=0, training=False
    )
    assert sorted(row for batch in batches for row in batch) == list(range(5, 5 + rows))


def test_a_footer_is_parsed_once_however_many_row_groups_there_are(tmp_path, monkeypatch):
    parsed = []
    opened = parquet.pq.ParquetFile
    monkeypatch.setattr(
        parquet.pq,
        "ParquetFile",
        lambda *given, **said: parsed.append("metadata" not in said) or opened(*given, **said),
    )
    source = numbered_source(tmp_path, [[2] * 40, [3]])
    rows = [
        row
        for batch in global_batches(
            source, world=2, batch_size=8, lanes=4, shuffle_rows=0, training=False
        )
        for row in batch
    ]
    assert sorted(rows) == list(range(83))
    assert sum(parsed) == 2


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("batches", [0, 1, 2, 5, 6])
def test_a_position_needs_no_history(source, batches, world):
    settings = {**SETTINGS, "training": False}
    whole = expected_batches(source, epoch=4, **settings)
    assert global_batches(source, world=world, position=(4, batches), **settings) == whole[batches:]


def test_a_position_set_between_iterations_reaches_the_threads(source):
    stream = BatchStream(source, SCHEMA, **SETTINGS, dense_transform="none")
    stream.num_threads = 2
    first = [row_numbers(batch) for batch in stream]
    stream.set_position(1, 4)
    second = [row_numbers(batch) for batch in stream]
    assert (first, second) == (
        expected_batches(source, 0, **SETTINGS),
        expected_batches(source, 1, **SETTINGS)[4:],
    )


def test_a_position_is_read_at_the_first_batch_and_not_when_iteration_is_prepared(source):
    stream = BatchStream(source, SCHEMA, **SETTINGS, dense_transform="none")
    prepared = iter(stream)
    stream.set_position(0, 5)
    assert [row_numbers(batch) for batch in prepared] == expected_batches(source, **SETTINGS)[5:]


@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"position": (1, 0)}, {"lanes": 5}, {"shuffle_rows": 60}]
)
def test_seed_epoch_lanes_and_shuffle_width_change_the_order(source, change):
    assert global_batches(source, **{**SETTINGS, **change}) != global_batches(source, **SETTINGS)


def test_the_length_is_that_of_a_whole_epoch_whatever_the_position(source):
    stream = BatchStream(source, SCHEMA, **SETTINGS)
    assert (len(stream), sum(1 for _ in stream)) == (6, 6)
    stream.set_position(0, 4)
    assert (len(stream), sum(1 for _ in stream)) == (6, 2)


def test_a_part_of_a_source_streams_only_its_rows(source):
    part = source.slice(50, 250)
    rows = [
        row for batch in global_batches(part, **{**SETTINGS, "training": False}) for row in batch
    ]
    assert sorted(rows) == list(range(50, 250))


def test_a_large_row_group_is_held_a_chunk_at_a_time(tmp_path, monkeypatch):
    source = numbered_source(tmp_path, [[6 * CHUNK_ROWS]])
    held, rows = _most_held(monkeypatch, source, lanes=4, shuffle_rows=4096)
    assert rows == source.rows
    assert held <= CHUNK_ROWS + 4 * 1024


def test_separate_ranges_of_a_large_row_group_are_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "SHARED_ROWS", 1000)
    monkeypatch.setattr(parquet, "CHUNK_ROWS", 100)
    sizes = [2000] * 5  # lanes of 2,500 rows: the fifth row group is passed from lane to lane
    source = numbered_source(tmp_path, [sizes])
    held, rows = _most_held(monkeypatch, source, lanes=4, shuffle_rows=256)
    assert rows == 10_000
    assert held <= 4 * 100
    settings = {"batch_size": 40, "lanes": 4, "shuffle_rows": 256, "seed": 1, "training": False}
    assert global_batches(source, **settings) == expected_batches(source, **settings)


def _most_held(monkeypatch, source, lanes, shuffle_rows):
    """Return the most rows a reader holds while lanes advance evenly, and all that it gives."""
    dealt = deal([segment.rows for segment in source.segments], lanes, shuffle_rows)
    with monkeypatch.context() as patches:
        decoded = _count_decoded(patches)
        own = Reader(source, dealt, range(lanes), 0, Collate(SCHEMA, source.bags, "none"), Turns())
        held = 0
        rows = 0
        for first in range(0, int(dealt.lanes[0][:, 2].sum()), 64):
            for lane in range(lanes):
                rows += len(own.take(lane, min(64, int(dealt.lanes[lane][:, 2].sum()) - first)))
                held = max(held, sum(decoded) - rows)
    return held, rows


def _count_decoded(monkeypatch):
    """Return a list that gets the number of rows of each decoded chunk."""
    decoded = []
    rows = Collate.rows
    monkeypatch.setattr(
        Collate,
        "rows",
        lambda self, chunk, *rest: decoded.append(chunk.num_rows) or rows(self, chunk, *rest),
    )
    return decoded


LAYOUTS = ([300] * 16, [1200] * 16, [300] * 8 + [900] * 8 + [120] * 24, [700] * 8, [1200] * 4)


@pytest.mark.parametrize("rows", LAYOUTS)
def test_without_threads_chunks_are_read_and_decoded_evenly(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(parquet, "CHUNK_ROWS", 300)
    source = numbered_source(tmp_path, [rows])
    decoded = _count_decoded(monkeypatch)
    read = []
    chunks = stream.chunks

    def noted(*arguments):
        for begin, chunk in chunks(*arguments):
            read.append(chunk.num_rows)
            yield begin, chunk

    monkeypatch.setattr(stream, "chunks", noted)
    batches = BatchStream(source, SCHEMA, batch_size=80, lanes=8, shuffle_rows=40)
    done = np.array([(sum(read), sum(decoded)) for _ in batches])
    assert done[-1].tolist() == [source.rows] * 2
    # one is read or decoded, although all lanes come to the ends of theirs together
    assert np.diff(done, axis=0).sum(axis=1).max() < 2 * 300
    ahead = done[:, 1] - 80 * np.arange(1, len(done) + 1)
    assert ahead.max() <= 2 * 8 * 300
    assert ahead[5:-40].min() > 0


def test_no_more_row_groups_than_lanes_are_open(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "CHUNK_ROWS", 2)
    source = numbered_source(tmp_path, [[7] * 40])
    dealt = deal([segment.rows for segment in source.segments], 4, 0)
    decoded = _count_decoded(monkeypatch)
    now_open = set()
    chunks = stream.chunks

    def noted(file, row_group, rows):
        now_open.add(row_group)
        try:
            yield from chunks(file, row_group, rows)
        finally:
            now_open.remove(row_group)

    monkeypatch.setattr(stream, "chunks", noted)
    own = Reader(source, dealt, range(4), 0, Collate(SCHEMA, source.bags, "none"), Turns())
    most = 0
    taken = 0
    for _ in range(int(dealt.lanes[0][:, 2].sum())):
        for lane in range(4):
            taken += len(own.take(lane, 1))
            most = max(most, len(now_open))
    assert 1 <= most <= 4
    assert (len(now_open), sum(decoded) - taken) == (0, 0)
    with pytest.raises(ValueError, match="lane 2 has no rows left"):
        own.take(2, 1)


@pytest.mark.parametrize(
    ("rows", "decoded"), [(120, [100, 20, 100]), (200, [100, 100]), (100, [100, 100])]
)
def test_the_next_row_group_is_read_ahead_with_a_short_last_chunk(
    tmp_path, monkeypatch, rows, decoded
):
    monkeypatch.setattr(parquet, "CHUNK_ROWS", 100)
    source = numbered_source(tmp_path, [[rows, rows]])
    found = _count_decoded(monkeypatch)
    collate = Collate(SCHEMA, source.bags, "none")
    with ThreadPoolExecutor(1) as threads:  # which ends when all has been read
        Reader(source, deal([rows, rows], 1, 0), range(1), 0, collate, threads).take(0, 1)
    assert found == decoded


def test_a_reader_decodes_every_row_once(source, monkeypatch):
    decoded = _count_decoded(monkeypatch)
    global_batches(source, **{**SETTINGS, "training": False})
    assert sum(decoded) == 397


def test_a_file_that_was_written_again_since_its_footer_was_read_is_an_error(tmp_path):
    source = numbered_source(tmp_path, [[200]])
    numbered_source(tmp_path, [[20]])
    with pytest.raises(DataError, match=r"part-0\.parquet: has changed since it was opened"):
        list(BatchStream(source, SCHEMA, batch_size=20, lanes=2))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lanes": 2, "world": 3}, "dataset.lanes=2"),
        ({"batch_size": 61}, "dataset.batch_size=61"),
        ({"batch_size": 600}, "dataset.batch_size=600: larger than the 397 rows .* at most 396"),
        ({"dense_transform": "log2p"}, "dataset.dense_transform=log2p: unknown; did you mean"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(source, settings, text):
    with pytest.raises(ConfigError, match=text):
        BatchStream(source, SCHEMA, **{**SETTINGS, **settings})


def test_fewer_rows_than_lanes_to_train_on_are_refused_with_what_would_do(tmp_path):
    source = numbered_source(tmp_path, [[3]])
    with pytest.raises(ConfigError, match=r"batch_size=16: .* at least dataset\.lanes=16 rows"):
        BatchStream(source, SCHEMA, batch_size=16)
    BatchStream(source, SCHEMA, batch_size=3, lanes=3)
