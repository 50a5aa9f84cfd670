"""Columns inside of structs, lists and maps are read by names with dots: the values that plain
Python finds in the same rows, from every format, and no more of a file than their leaves.
"""

import json
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from recapp.dataset.collate import RawRows
from recapp.dataset.decode import decode_ids
from recapp.dataset.nested_columns import leaves_of, own_column, part_of, with_parts
from recapp.dataset.parquet import _paths, of_row_group
from recapp.dataset.schema import Schema
from recapp.dataset.sequential_rows import decoded_chunks
from recapp.dataset.source import open_raw, open_source
from recapp.errors import DataError

USER = pa.struct([("id", pa.int64()), ("place", pa.struct([("country", pa.string())]))])
ITEMS = pa.list_(pa.struct([("id", pa.int64()), ("price", pa.float64())]))
CONTEXT = pa.map_(pa.string(), pa.string())
TYPES = pa.schema(
    [
        ("event", pa.struct([("click", pa.int8())])),
        ("user", USER),
        ("items", ITEMS),
        ("context", CONTEXT),
        ("item", pa.struct([("price", pa.float32())])),
    ]
)
SCHEMA = Schema(
    "event.click",
    ("item.price",),
    ("user.id", "user.place.country", "items.id", "context.device", "context.os.version"),
)


def random_rows(random, most):
    """Return some rows, with nulls at every level."""

    def maybe(make, share=0.8):
        return make() if random.random() < share else None

    def id():
        return random.randrange(100)

    def word():
        return random.choice(["DE", "FR", "7"])

    def pairs():
        return {key: maybe(word) for key in ("device", "os.version", "x") if random.random() < 0.5}

    def user():
        return {"id": maybe(id), "place": maybe(lambda: {"country": maybe(word)})}

    def items():
        return [maybe(lambda: {"id": maybe(id), "price": 0.5}) for _ in range(random.randrange(4))]

    return [
        {
            "event": {"click": random.randrange(2)},
            "user": maybe(user),
            "items": maybe(items),
            "context": maybe(pairs),
            "item": maybe(lambda: {"price": 2.5}),
        }
        for _ in range(random.randrange(most))
    ]


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 40))]


def tables(rows):
    """Return rows as a table; maps of Arrow are lists of pairs."""
    pairs = [
        row | {"context": None if row["context"] is None else [*row["context"].items()]}
        for row in rows
    ]
    return pa.Table.from_pylist(pairs, TYPES)


def spelled(id):
    return None if id is None else str(id)


def expected(rows):
    """Return the values of SCHEMA's columns, by plain Python."""
    users = [row["user"] or {} for row in rows]
    contexts = [row["context"] or {} for row in rows]
    items = [row["items"] or [] for row in rows]
    return {
        "event.click": [row["event"]["click"] for row in rows],
        "item.price": [(row["item"] or {}).get("price", 0) for row in rows],
        "user.id": [spelled(user.get("id")) for user in users],
        "user.place.country": [(user.get("place") or {}).get("country") for user in users],
        "items.id": [
            [spelled(one["id"]) for one in bag if one and one["id"] is not None] for bag in items
        ],
        "context.device": [context.get("device") for context in contexts],
        "context.os.version": [context.get("os.version") for context in contexts],
    }


def coded(values):
    return decode_ids(pa.array(values, pa.string())).tolist()


def check_rows(rows, parts):
    """Check decoded rows against those of Python."""
    wanted = expected(rows)
    targets = np.concatenate([one.targets_TN[0] for one in parts])
    assert targets.tolist() == wanted["event.click"]
    assert np.concatenate([one.numbers_IN[0] for one in parts]).tolist() == wanted["item.price"]
    singles = [name for name in SCHEMA.sparse if name != "items.id"]
    found = np.concatenate([one.ids_SN for one in parts], axis=1).tolist()
    assert dict(zip(singles, found, strict=True)) == {name: coded(wanted[name]) for name in singles}
    bags = [np.split(bag.values_L, bag.offsets_N1[1:-1]) for one in parts for bag in one.bags]
    flat = [bag.tolist() for of_part in bags for bag in of_part]
    assert flat == [coded(bag) for bag in wanted["items.id"]]


FORMATS = ("parquet", "feather", "arrows", "jsonl")
SOME = {
    "event": {"click": 1},
    "user": {"id": 5, "place": {"country": "DE"}},
    "items": [{"id": 7, "price": 0.5}],
    "context": {"device": "ios", "os.version": "7"},
    "item": {"price": 2.5},
}


def write(path, rows):
    table = tables(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=7)
    elif path.suffix == ".feather":
        pa.feather.write_feather(table, path, chunksize=7)
    elif path.suffix == ".arrows":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, 7)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", FORMATS)
def test_values_are_those_that_python_finds(tmp_path, kind, seed):
    rows = [SOME, *random_rows(Random(seed), 40)]  # the first one names all fields of JSON
    path = write(tmp_path / f"a.{kind}", rows)
    source = open_source(str(path), SCHEMA)
    assert source.bags == {"items.id"}
    check_rows(rows, list(decoded_chunks(source, SCHEMA, "none")))
    narrow = source.slice(1, source.rows)  # chunks are cut at any row
    if narrow.rows:
        check_rows(rows[1:], list(decoded_chunks(narrow, SCHEMA, "none")))


@pytest.mark.parametrize("seed", SEEDS)
def test_raw_rows_of_callers_may_be_nested(seed):
    rows = [SOME, *random_rows(Random(seed), 40)]
    table = tables(rows)
    table = pa.concat_tables([table.slice(0, seed % 7), table.slice(seed % 7)])
    batch = RawRows(SCHEMA, "none").batch(table)
    wanted = expected(rows)
    assert batch.dense_BI[:, 0].tolist() == wanted["item.price"]
    of_user = batch.sparse["user.id"].values().tolist()
    assert of_user == coded(wanted["user.id"])
    assert batch.sparse["items.id"].lengths().tolist() == [len(bag) for bag in wanted["items.id"]]
    assert batch.sparse["context.device"].values().tolist() == coded(wanted["context.device"])


def test_only_the_leaves_are_read(tmp_path):
    path = str(write(tmp_path / "a.parquet", [SOME] * 20))
    source = open_source(path, SCHEMA)
    assert _paths(source.files[0]) == [
        "event.click",
        "user.id",
        "user.place.country",
        "items.list.element.id",
        "context.key_value.key",
        "context.key_value.value",
        "item.price",
    ]
    statistics = of_row_group(source.files[0], "items.id", 0).statistics
    assert (statistics.min, statistics.max) == (7, 7)


def test_a_column_whose_own_name_has_a_dot_is_meant_first(tmp_path):
    table = pa.table(
        {
            "user": pa.array([{"id": 1, "a.b": 4}, {"id": 2, "a.b": 5}]),
            "user.id": [8, 9],
            "label": [0, 1],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    schema = Schema("label", (), ("user.id", "user.a.b"))
    source = open_source(str(tmp_path / "a.parquet"), schema)
    (rows,) = decoded_chunks(source, schema)
    assert rows.ids_SN.tolist() == [[8, 9], [4, 5]]
    assert of_row_group(source.files[0], "user.id", 0).statistics.min == 8
    assert of_row_group(source.files[0], "user.a.b", 0).statistics.min == 4


def test_the_last_value_of_a_key_counts_and_keys_may_be_numbers():
    column = pa.array([[(1, 5), (1, 6), (2, 7)], [], None], pa.map_(pa.int32(), pa.int64()))
    assert part_of(column, "m", "m.1").to_pylist() == [6, None, None]
    types = pa.schema([("m", column.type)])
    assert with_parts(types, ["m.1", "m.x"]).names == ["m", "m.1"]
    assert own_column(types, "m.1") == "m" and own_column(types, "m.x") == "m.x"


def test_keys_and_values_of_views_are_found_in_any_part_of_a_column():
    rows = [[("a", "1"), ("b", "2")], None, [], [("a", "3")], [("b", "4"), ("a", None)]]
    plain = pa.array(rows, CONTEXT)
    views = (plain.keys.cast(pa.string_view()), plain.items.cast(pa.string_view()))
    column = pa.MapArray.from_arrays(plain.offsets, *views, mask=plain.is_null())
    for first in range(5):
        found = part_of(column[first:], "m", "m.a")
        assert (
            found.type == pa.string() and found.to_pylist() == ["1", None, None, "3", None][first:]
        )


def test_maps_may_hold_structs_and_lists_hold_maps():
    inner = pa.struct([("n", pa.int64())])
    column = pa.array([[[("a", {"n": 3})], None, []], None], pa.list_(pa.map_(pa.string(), inner)))
    assert part_of(column, "x", "x.a.n").to_pylist() == [[3, None, None], None]
    assert list(leaves_of("x", column.type)) == ["x", "x"]


def test_without_a_schema_nested_columns_are_their_fields(tmp_path):
    source = open_raw(str(write(tmp_path / "a.parquet", [SOME])))
    assert source.types.names == [
        *("event.click", "user.id", "user.place.country", "items.id", "items.price"),
        *("context", "item.price"),
    ]


@pytest.mark.parametrize(
    ("sparse", "words"),
    [
        (("user",), r"column user .* has type struct<.*; name its fields, each as COLUMN.FIELD"),
        (("user.idd",), r"no column for user.idd; tried user.idd; did you mean user.id"),
        (("context",), r"has type map<.*>; .*; name the values of its keys, each as COLUMN.KEY"),
        (("items",), r"has type list<.*; name its fields, each as COLUMN.FIELD"),
    ],
)
def test_a_name_that_is_no_leaf_is_one_line(tmp_path, sparse, words):
    path = write(tmp_path / "a.parquet", [SOME])
    with pytest.raises(DataError, match=words):
        open_source(str(path), Schema("event.click", (), sparse))
