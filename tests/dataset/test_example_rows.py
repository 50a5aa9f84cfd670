"""Rows that are kept as plain values are the same rows again."""

import json
import math

import pyarrow as pa
import pytest

from recapp.dataset.raw_rows import RawRows
from recapp.dataset.schema import Schema
from recapp.dataset.sequential_rows import plain_rows, table_of

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


def test_what_json_has_no_word_for_is_missing():
    numbers = pa.table({"I1": [math.nan, math.inf, 1.0], "bag": [[math.nan], [], [2.0]]})
    found = plain_rows(numbers)
    assert [row["I1"] for row in found] == [None, None, 1.0]
    assert [row["bag"] for row in found] == [[None], [], [2.0]]


@pytest.mark.parametrize("rows", [[{}], [{**plain_rows(TABLE)[0], "one": [1, "x"]}]])
def test_values_that_are_no_columns_are_an_error(rows):
    with pytest.raises((KeyError, ValueError, TypeError)):
        table_of(rows, SCHEMA)
