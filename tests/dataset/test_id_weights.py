"""Weights of ids from a second column: those that plain Python finds in the same rows, beside the
ids that they belong to, in the batches of every reader.
"""

import json
from itertools import chain
from random import Random
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recapp.dataset.collate import RawRows, join_batches
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.decode import BadValue
from recapp.dataset.decode_bags import decode_bags, decode_id_weights
from recapp.dataset.schema import Schema, schema_of
from recapp.dataset.sequential_rows import decoded_chunks, fitted
from recapp.dataset.source import open_source
from recapp.dataset.stream import BatchStream
from recapp.errors import ConfigError, DataError
from recapp.serving.json_rows import read_rows
from recapp.serving.limits import Limits
from recapp.serving.open_inference import InputTensor, table_of
from recapp.sparse.transfer import memory_of, places_of
from recapp.tables.table_settings import TablesOfDataset

SCHEMA = Schema(
    "label",
    (),
    ("user", "seen", "tags", "item"),
    id_weights={"seen": "seconds", "item": "share"},
    separator={"tags": "|"},
)


def random_rows(rows):
    random = Random(rows)

    def bag():
        return [random.randrange(50) if random.random() < 0.8 else None for _ in range(length)]

    found = []
    for number in range(rows):
        length = random.randrange(4)
        seen = bag()
        found.append(
            {
                "label": number % 2,
                "row": number,
                "user": number,
                "seen": None if length == 0 and number % 3 == 0 else seen,
                "seconds": None if length == 0 else [random.randrange(-40, 40) / 8 for _ in seen],
                "tags": "|".join(map(str, range(number % 3))),
                "item": random.choice([None, number]),
                "share": random.randrange(8) / 4,
            }
        )
    return found


def expected(row):
    """Return the ids and weights of a row, by feature."""
    seen = zip(row["seen"] or [], row["seconds"] or [], strict=True)
    seen = [(id, weight) for id, weight in seen if id is not None]
    item = [] if row["item"] is None else [(row["item"], row["share"])]
    tags = [(int(tag), 1.0) for tag in row["tags"].split("|") if tag]
    return {"user": [(row["user"], 1.0)], "seen": seen, "tags": tags, "item": item}


def found_in(batch):
    """Return the same of each row of a batch, by the row's user, which is its number."""
    bags = {
        name: zip(batch.sparse[name].to_dense(), batch.sparse[name].to_dense_weights(), strict=True)
        for name in SCHEMA.sparse
    }
    rows = [
        {name: [*zip(ids.tolist(), weights.tolist(), strict=True)]}
        for name, bag in bags.items()
        for ids, weights in bag
    ]
    each = len(rows) // len(SCHEMA.sparse)
    joined = [dict(chain.from_iterable(one.items() for one in rows[n::each])) for n in range(each)]
    return {row["user"][0][0]: row for row in joined}


@pytest.fixture
def logs(tmp_path):
    rows = random_rows(60)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=11)
    return rows, table, str(tmp_path / "a.parquet")


@pytest.mark.parametrize("for_gpu", [False, True])
@pytest.mark.parametrize("threads", [0, 2])
def test_batches_have_the_weights_of_their_ids(logs, threads, for_gpu):
    rows, _, path = logs
    found = {}
    for rank in range(2):
        stream = BatchStream(
            open_source(path, SCHEMA), SCHEMA, rank=rank, world=2, batch_size=8, lanes=4,
            training=False, shuffle_rows=8,
        )  # fmt: skip
        stream.num_threads = threads
        stream.for_gpu = for_gpu
        for batch in stream:
            found |= found_in(batch)
            if for_gpu:
                short = batch.short().tensors()
                places = places_of(short)
                assert memory_of(short, [places[id(tensor)] for tensor in short]) is not None
    assert found == {row["user"]: expected(row) for row in rows}


def test_raw_rows_and_requests_have_them_too(logs):
    rows, table, _ = logs
    wanted = {row["user"]: expected(row) for row in rows}
    raw = RawRows(SCHEMA, "none")
    assert found_in(raw.batch(table)) == wanted
    joined = join_batches([raw.batch(table.slice(0, 7)), raw.batch(table.slice(7))])
    assert found_in(joined) == wanted
    served = SimpleNamespace(scorer=SimpleNamespace(schema=raw.schema))
    body = json.dumps({"rows": rows}).encode()
    asked = read_rows(memoryview(body), {}, served, Limits()).table
    assert found_in(raw.batch(asked)) == wanted
    assert raw.no_rows().sparse.weights().shape == (0,)


def test_tensors_of_a_request_have_lengths_for_both_columns():
    schema = Schema(None, (), ("seen",), id_weights={"seen": "seconds"})
    lengths = pa.array([2, 0], pa.int32())
    given = [
        InputTensor("seen", "INT64", pa.array([7, 8])),
        InputTensor("seen.lengths", "INT32", lengths),
        InputTensor("seconds", "FP32", pa.array([0.5, 2], pa.float32())),
        InputTensor("seconds.lengths", "INT32", lengths),
    ]
    ids = RawRows(schema, "none").batch(table_of(given, schema, Limits())).sparse
    assert (ids.values().tolist(), ids.lengths().tolist()) == ([7, 8], [2, 0])
    assert ids.weights().tolist() == [0.5, 2.0]


def test_texts_with_separators_and_padding():
    ids = pa.array(["3|0|4", "", None, "5"])
    weights = decode_id_weights(pa.array([".5|9|-1", "", None, "2e3"]), "w", "|")
    found = decode_bags(ids, padding=0, separator="|", weights=weights)
    assert [one.tolist() for one in found] == [[3, 4, 5], [2, 0, 0, 1], [0.5, -1, 2000]]


def test_rare_ids_keep_their_weights(tmp_path):
    table = pa.table(
        {"label": [0, 1], "seen": [[7, 8], [7]], "seconds": [[0.5, 2.0], [4.0]], "user": [1, 2]}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    settings = DataSettings(
        path=str(tmp_path), sparse=("user", "seen"), id_weights={"seen": "seconds"},
        min_frequency={"seen": 2},
    )  # fmt: skip
    schema = schema_of(settings, TablesOfDataset(source="from_dataset"))
    source = open_source(str(tmp_path), schema)
    schema = fitted(schema, source)
    (rows,) = decoded_chunks(source, schema)
    (bag,) = rows.bags
    assert bag.values_L[0] == bag.values_L[2] == 1 and bag.values_L[1] < 0
    assert bag.weight_L.tolist() == [0.5, 2.0, 4.0]


@pytest.mark.parametrize(
    ("ids", "weights", "said"),
    [
        ([[1, 2]], [[0.5]], r"column seen, row 1 holds 2 ids, and column w 1 weights: write a we"),
        ([[1, 2]], [None], r"column seen, row 1 holds 2 ids, and column w 0 weights"),
        ([[1, 2]], [[0.5, None]], r"column seen, row 1 holds an id without a weight in column w"),
        ([[1, 2]], [[0.5, float("inf")]], r"column w, row 1 holds inf, which is not finite"),
        ([[1, 2]], [["1", "x"]], r"column w, row 1 holds 'x', which is not a number"),
        ([["a"]], [[[1.0]]], r"column w \(id weight w\) has type list<.*; allowed: numbers, str"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(tmp_path, ids, weights, said):
    first = pa.table({"seen": ids, "w": weights}).slice(0, 0)
    kinds = first.schema
    table = pa.table({"label": [0, 1], "seen": [[], *ids], "w": [[], *weights]})
    assert table.schema.field("w").type == kinds.field("w").type or weights == [None]
    pq.write_table(table, tmp_path / "a.parquet")
    schema = Schema("label", (), ("seen",), id_weights={"seen": "w"})
    with pytest.raises(DataError, match=said):
        list(decoded_chunks(open_source(str(tmp_path), schema), schema))


def test_missing_weights_of_missing_ids_do_not_matter():
    weights = decode_id_weights(pa.array([[None, 2.0]]), "w", None)
    found = decode_bags(pa.array([[None, 3]]), weights=weights)
    assert [one.tolist() for one in found] == [[3], [1], [2.0]]
    with pytest.raises(BadValue, match="holds an id without a weight"):
        decode_bags(pa.array([[3, 3]]), weights=weights)


def test_settings_that_do_not_fit_are_one_line():
    def schema(**more):
        settings = DataSettings(path="logs", sparse=("user", "seen"), **more)
        return schema_of(settings, TablesOfDataset(source="from_dataset"))

    with pytest.raises(ConfigError, match=r"dataset\.id_weights names sen, .* did you mean seen"):
        schema(id_weights={"sen": "w"})
    with pytest.raises(
        ConfigError, match=r"user named more than once \(dataset.sparse, dataset.id"
    ):
        schema(id_weights={"seen": "user"})
    assert schema(id_weights={"seen": "w", "user": "w"}).inputs == ("user", "seen", "w")
