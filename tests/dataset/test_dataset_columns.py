"""What the columns of a file mean: ids, bags, numbers and labels as logs write them."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_files import lengths_of, one_batch, values_of, write_columns
from hypothesis import given
from hypothesis import strategies as st

from recapp.dataset.arrow_types import has_views, without_views
from recapp.dataset.collate import DENSE_TRANSFORMS, Collate
from recapp.dataset.decode import (
    BadValue,
    ColumnPlaces,
    decode_ids,
    decode_labels,
    decode_numbers,
)
from recapp.dataset.decode_bags import decode_bags
from recapp.dataset.schema import Schema, TextIds
from recapp.dataset.sequential_rows import example_rows, plain_rows
from recapp.dataset.source import open_source
from recapp.dataset.stream import BatchStream
from recapp.errors import DataError
from recapp.sparse.missing_ids import MISSING, MISSING_INT32

SCHEMA = Schema("label", ("number",), ("id",))
HEX = Schema("label", ("number",), ("id",), hex=("id",))
ROWS = Schema("label", ("number",), ("id",), integers=("id",))
TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
words = st.one_of(st.none(), st.just(""), st.integers(0, 2**32 - 1).map(lambda id: f"{id:08x}"))
any_words = st.one_of(
    words,
    st.integers(0, 2**63 - 1).map(lambda id: f"{id:x}"),
    st.integers(0, 2**32 - 1).map(lambda id: f"{id:X}"),
)


def is_written(column, absent, out):
    places = ColumnPlaces.of(pa.record_batch([column], ["one"]))
    return not places.write(["one"], [TextIds.HASHED], absent, out[None])


def by_hand(word):
    return int(word, 16) if word else MISSING


@given(
    st.lists(st.one_of(words, st.sampled_from(["DEADBEEF", "0000000a"])), max_size=30), st.data()
)
def test_hexadecimal_words_of_eight_digits_are_ids(column, data):
    first = data.draw(st.integers(0, len(column)))
    for kind in (*TEXTS, *(pa.dictionary(pa.int32(), text) for text in TEXTS[:3:2])):
        assert decode_ids(pa.array(column, kind)[first:], TextIds.HEX).tolist() == [
            by_hand(word) for word in column[first:]
        ]


@pytest.mark.parametrize("kind", [pa.decimal128(9, 2), pa.decimal256(50, 2)])
def test_decimals_are_numbers_and_labels(tmp_path, kind):
    column = pa.array(["-1.25", None, "0.10", "1.00"]).cast(kind)
    numbers, missing = decode_numbers(column)
    assert numbers.tolist() == [-1.25, 0, np.float32(0.1), 1]
    assert missing.tolist() == [False, True, False, False]
    assert decode_labels(column[3:]).tolist() == [1]
    rows = {"label": pa.array([0, 1, 1, 0]), "number": column, "id": pa.array([1, 2, 3, 4])}
    pq.write_table(pa.table(rows), tmp_path / "x.parquet")
    examples = plain_rows(example_rows(open_source(str(tmp_path), SCHEMA), SCHEMA, 4))
    assert [row["number"] for row in examples] == [-1.25, None, 0.1, 1.0]
    assert one_batch(tmp_path, SCHEMA, dense_transform="none").dense_BI[0, 0] == -1.25


@given(
    st.sampled_from([pa.int8(), pa.uint8(), pa.int32(), pa.uint32(), pa.int64()]),
    st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), max_size=40),
    st.data(),
)
def test_integers_are_read_in_one_pass_from_any_place_in_their_column(kind, values, data):
    """In 64 bits, or in 32 if all fit; otherwise other code reads the column."""
    size = kind.bit_width - (not str(kind).startswith("u"))
    values = [None if one is None else one % 2**size for one in values]
    first = data.draw(st.integers(0, len(values)))
    column = pa.array(values, kind)[first:]
    wanted = [MISSING if one is None else one for one in values[first:]]
    numbers = np.zeros(len(column), np.float32)
    assert is_written(column, -1.0, numbers)
    assert numbers.tolist() == [
        -1 if one is None else float(np.float32(one)) for one in values[first:]
    ]
    wide, short = np.zeros(len(column), np.int64), np.zeros(len(column), np.int32)
    assert is_written(column, MISSING, wide)
    assert wide.tolist() == wanted
    fits = all(one < 2**31 for one in wanted)
    assert is_written(column, MISSING_INT32, short) is fits
    if fits:
        assert short.tolist() == [MISSING_INT32 if one == MISSING else one for one in wanted]


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("odd", [MISSING, MISSING_INT32, MISSING_INT32 - 1, 2**31])
def test_an_id_that_would_be_a_missing_one_is_not_written(kind, odd):
    out = np.zeros(3, kind)
    refused = kind == np.int32 or odd == MISSING
    for values in ([5, odd, 6], [5, odd, None]):
        column = pa.array(values, pa.int64())
        assert is_written(column, np.iinfo(kind).min, out) is not refused


@given(st.lists(any_words, max_size=30))
def test_hexadecimal_words_of_other_lengths_are_ids(column):
    assert decode_ids(pa.array(column, pa.string()), TextIds.HEX).tolist() == [
        by_hand(word) for word in column
    ]


@pytest.mark.parametrize(
    "word", ["0xdeadbe", "deadbeeg", "zz", "12345678901234567", " 1234567", "\uff11\uff12"]
)
def test_a_word_that_is_not_hexadecimal_is_found(word):
    for kind in (pa.string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())):
        with pytest.raises(BadValue) as error:
            decode_ids(pa.array(["", "0000000a", None, word, "0000000b"], kind), TextIds.HEX)
        assert error.value.index == 3
        assert word in error.value.problem


def test_a_dictionary_longer_than_the_column_is_decoded_as_well():
    words = pa.array([f"{id:08x}" for id in range(100)])
    column = pa.DictionaryArray.from_arrays(pa.array([7, None, 99, 7]), words)
    assert decode_ids(column, TextIds.HEX).tolist() == [7, MISSING, 99, 7]
    spelled = pa.DictionaryArray.from_arrays(
        pa.array([7, None, 99, 7]), pa.array([str(id) for id in range(100)])
    )
    values, missing = decode_numbers(spelled)
    assert (values.tolist(), missing.tolist()) == ([7, 0, 99, 7], [False, True, False, False])


def test_a_bad_word_that_no_row_of_the_chunk_uses_is_no_error():
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0, 0]), pa.array(["0000000a", "no hex"]))
    assert decode_ids(column, TextIds.HEX).tolist() == [10, 10, 10]


@pytest.mark.parametrize(
    "kind",
    [
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.uint8(),
        pa.uint16(),
        pa.uint32(),
        pa.uint64(),
    ],
)
def test_integers_of_every_width_are_ids(kind):
    assert decode_ids(pa.array([0, None, 100, 7], kind)).tolist() == [0, MISSING, 100, 7]
    assert decode_ids(pa.array([0, 100, 7], kind)[1:]).tolist() == [100, 7]


def test_a_negative_int32_is_an_unsigned_hash_that_lost_its_sign_in_a_hexadecimal_column_alone():
    column = pa.array([-1, -(2**31), 5, None], pa.int32())
    assert decode_ids(column, TextIds.HEX).tolist() == [2**32 - 1, 2**31, 5, MISSING]
    assert decode_ids(column).tolist() == [-1, -(2**31), 5, MISSING]
    assert decode_ids(pa.array([0xFFFFFFFF], pa.uint32())).tolist() == [2**32 - 1]
    assert decode_ids(pa.array([-1], pa.int64()), TextIds.HEX).tolist() == [-1]


def test_whole_floats_are_ids_and_fractions_are_refused():
    assert decode_ids(pa.array([3.0, math.nan, None, 4294967295.0])).tolist() == [
        3,
        MISSING,
        MISSING,
        4294967295,
    ]
    for bad in (1.5, math.inf, 2.0**60):
        with pytest.raises(BadValue) as error:
            decode_ids(pa.array([3.0, None, bad]))
        assert error.value.index == 2


def test_a_column_of_nulls_is_missing_everywhere():
    assert decode_ids(pa.nulls(2)).tolist() == [MISSING, MISSING]
    assert decode_numbers(pa.nulls(2))[1].tolist() == [True, True]


bags = st.lists(
    st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 2**40)), max_size=4)),
    max_size=12,
)


@given(bags, st.data())
def test_lists_are_bags_without_their_nulls(column, data):
    first = data.draw(st.integers(0, len(column)))
    clean = [[id for id in bag or [] if id is not None] for bag in column][first:]
    for kind in (pa.list_(pa.int64()), pa.large_list(pa.int64())):
        ids, lengths, _ = decode_bags(pa.array(column, kind)[first:])
        assert (ids.tolist(), lengths.tolist()) == (
            [id for bag in clean for id in bag],
            [len(bag) for bag in clean],
        )


def test_lists_of_fixed_size_and_lists_of_words_are_bags():
    ids, lengths, _ = decode_bags(pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)))
    assert (ids.tolist(), lengths.tolist()) == ([1, 2, 3, 4], [2, 0, 2])
    ids, lengths, _ = decode_bags(pa.array([["0000000a", ""], [], ["0000000b", None]]), TextIds.HEX)
    assert (ids.tolist(), lengths.tolist()) == ([10, 11], [1, 0, 1])


def test_a_bad_value_in_a_list_is_reported_by_its_row():
    with pytest.raises(BadValue) as error:
        decode_bags(pa.array([["1", "2"], None, [], ["3", None, "x"], ["4"]]), TextIds.INTEGERS)
    assert (error.value.index, "holds 'x'" in error.value.problem) == (3, True)


@given(st.lists(st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)), max_size=20))
def test_numbers_are_read_from_every_type(column):
    expected = [np.float32(number or 0) for number in column]
    spelled = ["" if number is None else str(number) for number in column]
    for array in (
        pa.array(column, pa.int32()),
        pa.array(column, pa.int64()),
        pa.array(column, pa.float64()),
        *(
            pa.array(spelled, kind)
            for kind in (pa.string(), pa.binary(), pa.dictionary(pa.int32(), pa.string()))
        ),
    ):
        values, missing = decode_numbers(array)
        assert values.tolist() == expected
        assert (missing.tolist() if missing is not None else [False] * len(column)) == [
            number is None for number in column
        ]


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.dictionary(pa.int32(), pa.string())])
def test_bytes_that_are_no_utf8_are_found_where_digits_are_wanted(kind):
    column = (
        pa.array([None, b"12", b"\xff1"]).cast(pa.string(), safe=False)
        if kind != pa.binary()
        else pa.array([None, b"12", b"\xff1"])
    )
    column = column.dictionary_encode() if kind not in (pa.string(), pa.binary()) else column
    for decode in (
        lambda c: decode_ids(c, TextIds.HEX),
        lambda c: decode_ids(c, TextIds.INTEGERS),
        decode_numbers,
        decode_labels,
    ):
        with pytest.raises(BadValue, match=r"holds b'.xff1'") as error:
            decode(column[1:] if decode is not decode_labels else column[2:])
        assert error.value.index == (0 if decode is decode_labels else 1)


@pytest.mark.parametrize("index", [2, 5, -1, 2**31 - 1])
@pytest.mark.parametrize("rows", [[0, "bad", 1], [None, "bad"], ["bad"]])
def test_an_index_that_a_damaged_page_has_beyond_its_dictionary_is_found(index, rows):
    indices = pa.array([index if row == "bad" else row for row in rows], pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array(["1", "0"]), safe=False)
    for decode in (decode_ids, decode_numbers, decode_labels):
        if index == 2 and None in rows:
            continue  # it is what a null becomes
        with pytest.raises(
            BadValue, match="is damaged: its page's dictionary has no such entry"
        ) as error:
            decode(column)
        assert error.value.index == rows.index("bad")


def written(tmp_path, **columns):
    rows = len(next(iter(columns.values())))
    full = {"label": [0] * rows, "number": [0] * rows, "id": [0] * rows, **columns}
    return write_columns(tmp_path / "data.parquet", **full)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        ("log1p", [0, math.log(2), math.log(101), 0, 0]),
        ("log3", [math.log(3), math.log(4), math.log(103), 0, math.log(3)]),
        ("none", [0, 1, 100, -7, 0]),
    ],
)
def test_dense_transforms_treat_negative_and_missing_numbers_as_stated(
    tmp_path, transform, expected
):
    path = written(tmp_path, number=[0, 1, 100, -7, None])
    assert one_batch(path, SCHEMA, dense_transform=transform).dense_BI[
        :, 0
    ].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("transform", "exact"),
    [("log1p", lambda x: math.log1p(max(x, 0))), ("log3", lambda x: math.log(max(x, -2) + 3))],
)
def test_dense_transforms_are_the_c_librarys_in_64_bits_rounded(transform, exact):
    """So they do not depend on numpy's instructions, and C++ has the same bits."""
    numbers = np.concatenate([np.arange(-5, 50_000), 2.0 ** np.arange(24, 100)]).astype(np.float32)
    wanted = np.array([exact(float(x)) for x in numbers]).astype(np.float32)
    found = DENSE_TRANSFORMS[transform](numbers)
    assert found.dtype == np.float32 and found.tolist() == wanted.tolist()


def test_the_default_transform_is_log1p(tmp_path):
    assert one_batch(written(tmp_path, number=["", "3", "-2"]), SCHEMA).dense_BI[
        :, 0
    ].tolist() == pytest.approx([0, math.log(4), 0])


@pytest.mark.parametrize(
    "labels", [["1", "0", "1"], [1, 0, 1], [1.0, 0.0, 1.0], [True, False, True]]
)
def test_labels_are_read_from_every_type(tmp_path, labels):
    assert one_batch(written(tmp_path, label=labels), SCHEMA).labels_B.tolist() == [1, 0, 1]


def test_rows_without_labels_carry_nan(tmp_path):
    schema = Schema(None, ("number",), ("id",))
    assert np.isnan(one_batch(written(tmp_path, id=[1, 2]), schema).labels_B.numpy()).all()


TWO = Schema(["click", "dwell"], (), ("id",), real_labels=("dwell",), weight={"dwell": "price"})


def two_labels(tmp_path, **changes):
    columns = {"click": [1, 0, 1], "dwell": [0.5, -3, 1e9], "id": [1, 2, 3]}
    columns["price"] = ["2", "0", "1.5"]
    return write_columns(tmp_path / "f.parquet", **(columns | changes))


def test_labels_and_weights_are_read_by_name(tmp_path):
    batch = one_batch(two_labels(tmp_path), TWO)
    assert {name: values.tolist() for name, values in batch.labels.items()} == {
        "click": [1, 0, 1],
        "dwell": [0.5, -3, 1e9],
    }
    assert {name: values.tolist() for name, values in batch.weights.items()} == {
        "dwell": [2, 0, 1.5]
    }


def test_labels_and_weights_stay_with_their_rows_through_shuffles_and_threads(tmp_path):
    numbers = list(range(40))
    path = two_labels(
        tmp_path,
        click=[n % 2 for n in numbers],
        dwell=[n / 4 for n in numbers],
        price=[n * 2 for n in numbers],
        id=numbers,
    )
    schema = replace(TWO, weight="price")
    stream = BatchStream(open_source(str(path), schema), schema, batch_size=8, lanes=4)
    stream.num_threads = 2
    seen = []
    for batch in stream:
        ids = values_of(batch, "id")
        assert batch.labels["click"].tolist() == [n % 2 for n in ids]
        assert batch.labels["dwell"].tolist() == [n / 4 for n in ids]
        for name in ("click", "dwell"):
            assert batch.weights[name].tolist() == [n * 2 for n in ids]
        seen += ids
    assert sorted(seen) == numbers and seen != numbers


def test_empty_batches_have_the_labels_and_weights_of_others():
    empty = Collate(TWO, frozenset(), "none").batch([])
    assert [*empty.labels, *empty.weights] == ["click", "dwell", "dwell"] and empty.rows == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"click": [1, 2, 0]}, r"column click, row 1 holds 2; a label must be 0 or 1"),
        (
            {"dwell": [1.0, 2, None]},
            "column dwell, row 2 holds None; a label must be a finite number; where it is unknown, "
            r"write 0 and a weight of 0 \(dataset.weight={label: column}\)",
        ),
        ({"dwell": [math.inf, 2, 0]}, "column dwell, row 0 holds inf; a label must be a finite"),
        ({"price": [1, 1e39, 0]}, r"column price, row 1 holds 1e\+39; a weight must be a finite"),
        ({"price": [1, 2, -0.5]}, "column price, row 2 holds -0.5; .* number, 0 or more$"),
        ({"price": [[1], [2], [3]]}, r"column price \(weight price\) has type list"),
        ({"dwell": [b"", b"", b"3"]}, "column dwell, row 0 holds .*; a label must be a finite"),
    ],
)
def test_a_label_or_weight_that_is_none_is_found(tmp_path, changes, text):
    with pytest.raises(DataError, match=text):
        one_batch(two_labels(tmp_path, **changes), TWO)


def test_keys_keep_the_order_of_the_schema_whatever_the_file_and_kind(tmp_path):
    schema = Schema("label", (), ("b", "a", "c"), hex=("b",))
    path = write_columns(
        tmp_path / "f.parquet",
        a=[[1, 2], [], [3]],
        c=[7, None, 9],
        b=["0a", "0b", ""],
        label=[0, 1, 0],
    )
    batch = one_batch(path, schema)
    assert batch.sparse.keys() == ["b", "a", "c"]
    assert batch.dense_BI.shape == (3, 0)
    assert [values_of(batch, key) for key in "bac"] == [
        [10, 11, MISSING],
        [1, 2, 3],
        [7, MISSING, 9],
    ]
    assert [lengths_of(batch, key) for key in "bac"] == [[1, 1, 1], [2, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (
            {"label": [0, 1, 3]},
            r"column label, row 2 holds 3; a label must be 0 or 1: write 1 for what counts as a "
            r"click \(such as a rating of 4 or more\), 0 for what does not; or set "
            r"dataset\.label_from=4$",
        ),
        ({"label": [0.0, 0.64]}, "column label, row 1 holds 0.64; a label must be 0 or 1: write 1"),
        (
            {"label": [0, None, 1]},
            "column label, row 1 holds None; a label must be 0 or 1: .*; where it is unknown, "
            "write 0 and a weight of 0",
        ),
        ({"label": ["0", "1", "yes"]}, "column label, row 2 holds 'yes'; a label must be 0 or 1"),
        (
            {"label": ["0", "1e-400", "1"]},
            "column label, row 1 holds '1e-400'; a label must be 0 or 1",
        ),
        (
            {"label": ["0", "1", "1.00000000000000000001"]},
            "column label, row 2 holds '1.00000000000000000001'; a label",
        ),
        ({"label": ["1e0", "1", "0"]}, "column label, row 0 holds '1e0'; a label must be 0 or 1"),
        ({"label": ["0", None, "1"]}, "column label, row 1 holds None; a label must be 0 or 1"),
        (
            {"number": [0.0, math.nan, 1.0]},
            "column number, row 1 holds nan, which is not finite .*, or null where it is missing, "
            "which counts as 0$",
        ),
        ({"number": [0.0, 1.0, -math.inf]}, "column number, row 2 holds -inf, which is not finite"),
        ({"number": [0.0, 1e300, 1.0]}, "column number, row 1 holds 1e.300, which is not finite"),
        ({"number": ["", "inf", "1"]}, "column number, row 1 holds inf, which is not finite"),
        ({"number": ["1", "", "1,5"]}, "column number, row 2 holds '1,5', which is not a number"),
        ({"label": [0.0, 1e-310, 1.0]}, "column label, row 1 holds 1e-310; a label must be 0 or 1"),
        (
            {"label": ["0", "1", "1.000000000001"]},
            "column label, row 2 holds '1.000000000001'; a label must be 0 or 1",
        ),
        ({"label": [0, 1, -1]}, "column label, row 2 holds -1; .* where it is unknown, write 0"),
        ({"id": [1.0, 2.5, 3.0]}, "column id, row 1 holds 2.5; an id must be .*: write a whole"),
        (
            {"id": [1, -(2**63), 3]},
            "column id, row 1 holds -9223372036854775808, the one number that is no id",
        ),
        (
            {"id": [[1], None, [3, -(2**63)]]},
            "column id, row 2 holds -9223372036854775808, the one number that is no id",
        ),
    ],
)
def test_a_bad_value_is_named_with_file_column_and_row(tmp_path, columns, text):
    path = written(tmp_path, **columns)
    with pytest.raises(DataError, match=f"{path}: {text}") as error:
        one_batch(path, SCHEMA)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ids", [["0a", "", "no id"], [["0a"], [], ["0b", "no id"]]])
def test_text_that_is_no_id_under_the_encoding_of_its_column_is_named_with_what_to_set(
    tmp_path, ids
):
    path = written(tmp_path, id=ids)
    with pytest.raises(
        DataError,
        match=f"{path}: column id, row 2 holds 'no id'; .* has at most 16 hexadecimal digits",
    ):
        one_batch(path, HEX)
    with pytest.raises(
        DataError,
        match=f"{path}: column id, row 0 holds '0a', which is no integer; set dataset.id_rule=hash",
    ):
        one_batch(path, ROWS)


def test_booleans_are_numbers_and_labels(tmp_path):
    batch = one_batch(
        written(tmp_path, label=[True, False, True], number=[True, None, False]),
        SCHEMA,
        dense_transform="none",
    )
    assert (batch.labels_B.tolist(), batch.dense_BI[:, 0].tolist()) == ([1, 0, 1], [1, 0, 0])


def test_the_row_of_a_bad_value_counts_from_the_start_of_the_file(tmp_path):
    labels = [0] * 50
    labels[37] = 3
    table = pa.table({"label": labels, "number": [0] * 50, "id": [1] * 50})
    pq.write_table(table, tmp_path / "f.parquet", row_group_size=10)
    with pytest.raises(DataError, match="column label, row 37 holds 3"):
        one_batch(tmp_path / "f.parquet", SCHEMA)


def test_text_whose_writer_did_not_mark_it_as_such_is_text(tmp_path):
    columns = {"label": ["0", "1", "1"], "number": ["3", "", "-1"], "id": ["0000000a", "", "ff"]}
    table = pa.table(
        {name: pa.array([word.encode() for word in words]) for name, words in columns.items()}
    )
    pq.write_table(table, tmp_path / "data.parquet", store_schema=False)
    assert pq.read_schema(tmp_path / "data.parquet").field("id").type == pa.binary()
    batch = one_batch(tmp_path, HEX)
    assert batch.labels_B.tolist() == [0, 1, 1] and values_of(batch, "id") == [10, MISSING, 255]


@pytest.mark.parametrize("kind", [*TEXTS, pa.dictionary(pa.int32(), pa.string())])
def test_labels_of_text_are_0_and_1_in_any_number_of_decimals(kind):
    column = pa.array(["9", "1", "0", "1.0", "0.00", "1"], kind)[1:]
    assert decode_labels(column).tolist() == [1, 0, 1, 0, 1]
    assert decode_labels(column).dtype == np.float32


VIEWS = {
    "text": pa.string_view(),
    "bytes": pa.binary_view(),
    "texts": pa.list_(pa.string_view()),
    "many": pa.list_view(pa.int64()),
    "more": pa.large_list_view(pa.binary_view()),
}


@pytest.mark.parametrize("lanes", [1, 3])
def test_views_of_text_and_of_lists_are_read_as_the_plain_types_are(tmp_path, lanes):
    words = ["7", None, "a word of more than twelve letters", ""]
    lists = [["7", "x"], None, [], ["another word of some length"]]
    ids = [[1, 2], None, [], [3]]
    columns = {"text": words, "bytes": words, "texts": lists, "many": ids, "more": lists}
    without = {
        "text": pa.string(),
        "bytes": pa.binary(),
        "texts": pa.list_(pa.string()),
        "many": pa.list_(pa.int64()),
        "more": pa.large_list(pa.binary()),
    }
    schema = Schema("label", ("number",), tuple(VIEWS))
    rows = {"label": ["0", "1", "1", "0"], "number": ["1", "", None, "4"]}
    found = []
    for name, types, one in (("a", VIEWS, pa.string_view()), ("b", without, pa.string())):
        path = write_columns(
            tmp_path / f"{name}.parquet",
            **{column: pa.array(values * 5, one) for column, values in rows.items()},
            **{column: pa.array(values * 5, types[column]) for column, values in columns.items()},
        )
        source = open_source(str(path), schema)
        stream = BatchStream(source, schema, batch_size=18, lanes=lanes, shuffle_rows=6)
        batch = next(iter(stream))
        found.append(
            [batch.labels_B.tolist(), batch.dense_BI.tolist()]
            + [(values_of(batch, key), lengths_of(batch, key)) for key in VIEWS]
        )
    assert found[0] == found[1]
    narrowed = open_source(str(tmp_path / "a.parquet"), schema).only(["many", "text"])
    assert narrowed.files[0].read == ["text", "many"]
    assert open_source(str(tmp_path / "a.parquet"), schema).bags == {"texts", "many", "more"}


def test_text_in_views_must_spell_integers_where_a_table_takes_ids_for_rows(tmp_path):
    path = written(tmp_path, id=pa.array(["1", "x", "2"], pa.string_view()))
    with pytest.raises(DataError, match="column id, row 1 holds 'x', which is no integer"):
        one_batch(path, ROWS)


@pytest.mark.parametrize("rows", [[[], [], []], [[], None, []]])
def test_lists_of_no_ids_are_refused_before_arrow_fails_on_them(tmp_path, rows):
    path = written(tmp_path, id=pa.array(rows, pa.list_(pa.int64(), 0)))
    with pytest.raises(
        DataError, match=r"column id \(sparse feature id\) has type .*\[0\], lists of"
    ):
        one_batch(path, SCHEMA)


@given(st.lists(st.none() | st.lists(st.none() | st.sampled_from(["", "7", "x" * 40]))), st.data())
def test_columns_without_views_hold_what_the_views_held(rows, data):
    words = [row[0] if row else None for row in rows]
    first = data.draw(st.integers(0, len(rows)))
    for text in (pa.string_view(), pa.binary_view(), pa.string()):
        inner = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]
        for kind, values in [(text, words), *((make(text), rows) for make in inner)]:
            column = pa.array([[] if "list" in str(kind) else None, *values], kind)[1 + first :]
            without = without_views(column)
            without.validate(full=True)
            assert not has_views(without.type) and has_views(kind) == ("view" in str(kind))
            found = without.to_pylist()
            wanted = column.to_pylist()
            assert found == wanted
