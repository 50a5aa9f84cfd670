"""Rows that are kept as plain values are the same rows again."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recapp.dataset.collate import RawRows
from recapp.dataset.schema import Schema
from recapp.dataset.sequential_rows import example_rows, frequent_values, plain_rows, table_of
from recapp.dataset.source import open_source

SCHEMA = Schema(label="y", dense=("I1", "I2"), sparse=("one", "bag", "text", "none"))
TABLE = pa.table(
    {
        "I1": pa.array([0.1, 7.0, None], pa.float32()),
        "I2": pa.array([None, None, None], pa.float64()),
        "one": pa.array([2**63 - 1, None, -5], pa.int64()),
        "bag": pa.array([[1, 2], [], None], pa.list_(pa.int32())),
        "text": pa.array([b"caf\xc3\xa9", b"", None], pa.binary()),
        "none": pa.array([None, None, None], pa.string()),
    }
)


def test_rows_are_the_same_batch_after_json():
    again = table_of(json.loads(json.dumps(plain_rows(TABLE), allow_nan=False)), SCHEMA)
    rows = RawRows(SCHEMA, "log1p")
    text = TABLE.set_column(4, "text", TABLE["text"].cast(pa.string()))
    one, other = rows.batch(text), rows.batch(again)
    assert one.dense_BI.equal(other.dense_BI)
    assert one.sparse.values().equal(other.sparse.values())
    assert one.sparse.lengths().equal(other.sparse.lengths())


def test_ids_above_63_bits_are_the_same_again():
    kinds = {"one": pa.uint64(), "bag": pa.list_(pa.uint64())}
    columns = {"one": [2**63 + 5, 1, None], "bag": [[2**64 - 1, 1], [], None]}
    table = TABLE
    for name, kind in kinds.items():
        place = table.column_names.index(name)
        table = table.set_column(place, name, pa.array(columns[name], kind))
    again = table_of(json.loads(json.dumps(plain_rows(table))), SCHEMA)
    assert {name: again[name].type for name in kinds} == kinds
    assert {name: again[name].to_pylist() for name in kinds} == columns


def test_an_example_ends_before_a_file_with_other_types(tmp_path):
    first = pa.table({"C1": pa.array([-1934120, 7], pa.int32()), "u": [1, 2], "y": [0, 1]})
    other = pa.table({"C1": ["0a"], "u": [1.5], "y": [0]})
    pq.write_table(first, tmp_path / "a.parquet")
    pq.write_table(other, tmp_path / "b.parquet")
    of = Schema(label="y", dense=("u",), sparse=("C1",), hex=("C1",))
    found = example_rows(open_source(str(tmp_path), of), of, 3).to_pylist()
    assert found == [{"u": 1, "C1": 2**32 - 1934120}, {"u": 2, "C1": 7}]  # ids of a batch


def test_what_json_has_no_word_for_is_missing():
    numbers = pa.table({"I1": [math.nan, math.inf, 1.0], "bag": [[math.nan], [], [2.0]]})
    found = plain_rows(numbers)
    assert [row["I1"] for row in found] == [None, None, 1.0]
    assert [row["bag"] for row in found] == [[None], [], [2.0]]


@pytest.mark.parametrize(
    ("text", "raw"), [(pa.string(), pa.binary()), (pa.large_string(), pa.large_binary())]
)
def test_bytes_of_text_other_than_utf_8_are_replaced_as_those_of_binary(tmp_path, text, raw):
    latin = pa.Array.from_buffers(text, 2, pa.array([b"caf\xe9", b"tea"], raw).buffers())
    table = pa.table(
        {
            "text": latin,
            "lists": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), latin),
            "places": pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), latin),
            "label": [0, 1],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    of = Schema(label="label", dense=(), sparse=("text", "lists", "places"))
    source = open_source(str(tmp_path), of)
    assert plain_rows(example_rows(source, of, 2)) == [
        {"text": "caf\ufffd", "lists": ["caf\ufffd"], "places": "caf\ufffd"},
        {"text": "tea", "lists": ["tea"], "places": "tea"},
    ]
    assert {value for value, _ in frequent_values(source, of, "text", 2)} == {"caf\ufffd", "tea"}


@pytest.mark.parametrize("rows", [[{}], [{**plain_rows(TABLE)[0], "one": [1, "x"]}]])
def test_values_that_are_no_columns_are_an_error(rows):
    with pytest.raises((KeyError, ValueError, TypeError)):
        table_of(rows, SCHEMA)
