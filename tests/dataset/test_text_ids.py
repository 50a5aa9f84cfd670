"""Ids mean one thing: text that spells an integer is that integer, any other text is its XXH64
hash, and text is hexadecimal only where a setting says so.
"""

import json
from decimal import Decimal
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recapp.dataset import decode
from recapp.dataset.decode import BadValue, ColumnPlaces, compiled_texts, decode_ids
from recapp.dataset.schema import Schema, TextIds
from recapp.dataset.sequential_rows import decoded_chunks, example_rows, plain_rows
from recapp.dataset.source import open_source
from recapp.errors import DataError
from recapp.kernels.numba_text import xxh64
from recapp.sparse.missing_ids import MISSING

TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
INT64 = st.integers(-(2**63) + 1, 2**63 - 1)


def sanity_buffer(size):
    """Return the buffer of which xxHash's own self test hashes parts (`tests/sanity_test.c`)."""
    state = 2654435761
    content = bytearray()
    for _ in range(size):
        content.append(state >> 56)
        state = state * 11400714785074694797 % 2**64
    return bytes(content)


PUBLISHED = [
    (b"", 0xEF46DB3751D8E999),
    (b"a", 0xD24EC4F1A98C6E5B),
    (b"as", 0x1C330FB2D66BE179),
    (b"asd", 0x631C37CE72A97393),
    (b"asdf", 0x415872F599CEA71E),
    (b"abc", 0x44BC2CF5AD770999),
    (b"Call me Ishmael. Some years ago--never mind how long precisely-", 0x02A2E85470D6FD96),
    (sanity_buffer(1), 0xE934A84ADB052768),
    (sanity_buffer(4), 0x9136A0DCA57457EE),
    (sanity_buffer(14), 0x8282DCC4994E35C8),
    (sanity_buffer(222), 0xB641AE8CB691C174),
]


@pytest.mark.parametrize(
    ("content", "value"), PUBLISHED, ids=[f"{len(content)} bytes" for content, _ in PUBLISHED]
)
def test_the_hash_is_xxh64_as_published(content, value):
    bytes_C = np.frombuffer(b"??" + content, dtype=np.uint8)
    assert int(xxh64(bytes_C, 2, len(bytes_C))) % 2**64 == value


def id_of(word):
    """Return an id worked out by hand: a canonical decimal of int64, else the hash."""
    content = word if isinstance(word, bytes) else word.encode()
    if not content:
        return MISSING
    spelled = content.decode("utf-8", "replace")
    if (
        spelled.lstrip("-").isdecimal()
        and spelled.isascii()
        and str(int(spelled)) == spelled
        and -(2**63) <= int(spelled) < 2**63
    ):
        return int(spelled)
    value = int(xxh64(np.frombuffer(content, dtype=np.uint8), 0, len(content)))
    return (value + 2**63) % 2**64 - 2**63


words = st.one_of(
    st.text(max_size=40),
    INT64.map(str),
    st.integers(-(10**20), 10**20).filter(lambda number: number != -(2**63)).map(str),
    st.sampled_from(
        [
            "007",
            "+5",
            "-0",
            "00",
            "0",
            "-",
            "1e3",
            " 5",
            "5 ",
            "\uff11\uff12",
            "DE",
            str(2**63 - 1),
            str(2**63),
        ]
    ),
)


@given(st.lists(st.one_of(st.none(), words), max_size=20), st.data())
def test_text_of_every_arrow_type_has_the_id_worked_out_by_hand(column, data):
    first = data.draw(st.integers(0, len(column)))
    expected = [id_of(word) if word is not None else MISSING for word in column[first:]]
    for kind in (
        *TEXTS,
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.binary()),
    ):
        assert decode_ids(pa.array(column, kind)[first:]).tolist() == expected


@given(st.lists(INT64, max_size=20))
def test_decimal_text_is_the_integer_under_every_rule(numbers):
    spelled = pa.array([str(number) for number in numbers], pa.string())
    for reading in (TextIds.HASHED, TextIds.INTEGERS):
        assert (
            decode_ids(spelled, reading).tolist()
            == decode_ids(pa.array(numbers, pa.int64()), reading).tolist()
            == numbers
        )


def test_a_number_is_one_id_in_every_type_that_can_hold_it():
    kinds = (
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float64(),
        pa.float16(),
        pa.string(),
        pa.binary(),
    )
    for number in (-5, 0, 100):
        values = [str(number) if kind in (pa.string(), pa.binary()) else number for kind in kinds]
        assert {
            int(decode_ids(pa.array([v], k))[0]) for v, k in zip(values, kinds, strict=True)
        } == {number}


def test_an_unsigned_number_beyond_int64_is_the_id_of_its_text_and_of_no_other():
    numbers = [2**63, 5, None, 2**64 - 1, 2**63 + 1]
    ids = decode_ids(pa.array(numbers, pa.uint64()))
    assert (
        ids.tolist()
        == decode_ids(pa.array([None if n is None else str(n) for n in numbers])).tolist()
    )
    assert ids[1] == 5 and ids[2] == MISSING and len(set(ids.tolist())) == 5
    with pytest.raises(BadValue, match="holds '9223372036854775808', which is no integer"):
        decode_ids(pa.array(numbers, pa.uint64()), TextIds.INTEGERS)
    assert (
        decode_ids(pa.array([2**64 - 1], pa.uint64()), TextIds.HEX)
        == decode_ids(pa.array(["f" * 16]), TextIds.HEX)
        == [-1]
    )


def test_the_number_that_stands_for_missing_ids_is_refused_in_every_spelling():
    for column, reading in (
        (pa.array([1, MISSING]), TextIds.HASHED),
        (pa.array(["1", str(MISSING)]), TextIds.HASHED),
        (pa.array(["1", str(MISSING)]), TextIds.INTEGERS),
        (pa.array(["1", "8" + "0" * 15]), TextIds.HEX),
        (pa.array([1, 2**63], pa.uint64()), TextIds.HEX),
    ):
        with pytest.raises(BadValue, match="the one number that is no id") as error:
            decode_ids(column, reading)
        assert error.value.index == 1


def test_the_text_whose_hash_would_stand_for_missing_ids_gets_the_next_number():
    assert compiled_texts().of_hash(np.uint64(2**63)) == MISSING + 1
    assert compiled_texts().of_hash(np.uint64(2**63 + 2)) == MISSING + 2


def forms_of(words, data):
    """Yield a column of texts in the forms of Arrow, as a part of a longer one."""
    plain = pa.array(["1", *words], pa.string())
    yield plain[1:]
    yield plain.cast(pa.large_string())[1:]
    more = data.draw(st.integers(0, 2)) * (len(words) + 2)  # entries that no row has
    known = dict.fromkeys(w for w in words if w is not None)
    entries = pa.array([*known, *["0"] * more], pa.string())
    codes = pa.array([None if w is None else entries.index(w).as_py() for w in words], pa.int32())
    for values in (entries, entries.cast(pa.large_string())):
        yield pa.DictionaryArray.from_arrays(pa.concat_arrays([codes, codes]), values)[len(words) :]


def written(column, rule, absent, like):
    """What the compiled pass writes for a column; None if it leaves the column to others."""
    batch = pa.record_batch([column, pa.nulls(len(column))], ["texts", "other"])
    out = np.zeros((2, len(column)), like)
    return None if ColumnPlaces.of(batch).write(["texts"], [rule], absent, out) else out[0].tolist()


HEX = st.text("0123456789abcdefABCDEF", max_size=16).filter(lambda w: w.lower() != "8" + "0" * 15)


@given(st.lists(st.one_of(st.none(), HEX), max_size=20), st.data())
def test_hexadecimal_text_of_every_form_is_its_number(words, data):
    numbers = [MISSING if not w else int(w, 16) for w in words]
    for column in forms_of(words, data):
        ids = written(column, TextIds.HEX, MISSING, np.int64)
        assert ids == [n if n < 2**63 else n - 2**64 for n in numbers]
        assert decode_ids(column, TextIds.HEX).tolist() == ids


@given(st.lists(st.one_of(st.none(), words), max_size=20), st.data())
def test_text_of_every_form_has_the_id_worked_out_by_hand(words, data):
    for column in forms_of(words, data):
        ids = written(column, TextIds.HASHED, MISSING, np.int64)
        assert ids == [MISSING if not w else id_of(w) for w in words]


NUMBERS = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.decimals(-(10**7), 10**7, allow_nan=False, places=5).map(lambda number: f"{number:f}"),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr),
    st.sampled_from(["", "-", ".", "1.", ".5", "-0", "0.0", "-0.5", "00", "01", "1e3", " 1", "1 "]),
    st.sampled_from(["+1", "1.2.3", "1-2", "9007199254740993", "123456789012345678901", "nan"]),
    st.text("0123456789-.", max_size=22),
)


@given(st.lists(st.one_of(st.none(), NUMBERS), max_size=20), st.data())
def test_text_of_every_form_is_the_number_that_arrow_reads_or_is_left_to_it(words, data):
    texts = pa.array([w or None for w in words], pa.string())
    for column in forms_of(words, data):
        numbers = written(column, None, 7, np.float32)
        if numbers is not None:
            values = texts.cast(pa.float64()).fill_null(7).to_numpy(zero_copy_only=False)
            assert [*map(str, numbers)] == [*map(str, values.astype(np.float32).tolist())]


def test_plain_numbers_are_not_left_to_arrow():
    plain = ["0", "-1", "12345678", "0.25", "-0.5", "10.0", "3.1415926535", "", None]
    numbers = written(pa.array(plain), None, 7, np.float32)
    assert numbers == [np.float32(w or 7).item() for w in plain]


@pytest.mark.parametrize("bad", ["g", "G", "/", ":", "@", "`", "\0", "\x80", "0g000000", "1" * 17])
def test_text_that_is_not_hexadecimal_is_found_at_any_length(bad):
    for before in ("", "0", "0000000", "00000000"):
        column = pa.array(["1", "12345678", before + bad])
        with pytest.raises(BadValue, match="has at most 16 hexadecimal digits") as error:
            decode_ids(column, TextIds.HEX)
        assert error.value.index == 2


def test_codes_without_an_entry_and_entries_without_value_are_left_to_others():
    codes = pa.array([0, 3], pa.int32())
    column = pa.DictionaryArray.from_arrays(codes, pa.array(["a", "b"]), safe=False)
    assert written(column, TextIds.HEX, MISSING, np.int64) is None
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), pa.array(["a", None]))
    assert written(column, TextIds.HEX, MISSING, np.int64) is None
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), pa.array(["a", "x"]))
    assert written(column, TextIds.HEX, MISSING, np.int64) is None
    assert decode_ids(column, TextIds.HEX).tolist() == [10, 10]
    assert written(pa.array(["1", "2"]), TextIds.HEX, MISSING, np.int32) is None


def test_ids_of_128_bits_and_uuids_are_text():
    hashes = ["81ce123cbb5bd8ce818f60fb3586bba5", "81ce123cbb5bd8ce818f60fb3586bba6"]
    uuids = ["6ba7b810-9dad-11d1-80b4-00c04fd430c8", "6ba7b811-9dad-11d1-80b4-00c04fd430c8"]
    ids = decode_ids(pa.array([*hashes, *uuids, hashes[0]])).tolist()
    assert len(set(ids)) == 4 and ids[0] == ids[4]


def test_bytes_that_are_no_utf8_are_hashed_as_they_are():
    content = [b"\xff\xfe1", b"ab"]
    broken = pa.array(content).cast(pa.string(), safe=False)
    assert (
        decode_ids(broken).tolist()
        == decode_ids(pa.array(content)).tolist()
        == [id_of(word) for word in content]
    )


def test_text_has_the_same_ids_in_every_version():
    ids = decode_ids(
        pa.array(["DE", "Grüße", "007", "1e3", "81ce123cbb5bd8ce818f60fb3586bba5", "-12"])
    ).tolist()
    assert ids == [
        -2325406367082704377,
        2996662272629394261,
        -5647975354166609820,
        3738687871403132999,
        -6929258365865552327,
        -12,
    ]


def test_without_numba_integers_are_read_and_text_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    decode.compiled_texts.cache_clear()
    assert decode_ids(pa.array([1, 2])).tolist() == [1, 2]
    with pytest.raises(DataError, match=r"text ids and crosses need numba, .* pip install numba"):
        decode_ids(pa.array(["a"]))


@pytest.mark.parametrize(("kind", "most"), [(pa.int8(), 128), (pa.uint8(), 256)])
def test_a_dictionary_that_uses_all_indices_of_its_type_may_have_nulls(kind, most):
    entries = pa.array(range(most), pa.int64())
    column = pa.DictionaryArray.from_arrays(pa.array([most - 1, None, 0], kind), entries)
    assert decode_ids(column).tolist() == [most - 1, MISSING, 0]
    texts = pa.DictionaryArray.from_arrays(column.indices, entries.cast(pa.string()))
    assert decode_ids(texts, TextIds.HASHED)[1] == MISSING


def test_text_of_no_rows_may_come_without_bounds():
    column = pa.Array.from_buffers(pa.string(), 0, [None, pa.py_buffer(b""), pa.py_buffer(b"")])
    assert decode_ids(column).tolist() == []


UUIDS = st.lists(st.one_of(st.none(), st.uuids()), max_size=20)
WHOLE = st.integers(-(10**38) + 1, 10**38 - 1).filter(lambda number: number != -(2**63))


def uuid_column(uuids):
    stored = pa.array([one and one.bytes for one in uuids], pa.binary(16))
    return pa.ExtensionArray.from_storage(pa.uuid(), stored)


@given(UUIDS, st.data())
def test_a_uuid_has_the_id_of_its_canonical_text(uuids, data):
    first = data.draw(st.integers(0, len(uuids)))
    expected = [MISSING if one is None else id_of(str(one)) for one in uuids[first:]]
    column = uuid_column(uuids)
    assert decode_ids(column[first:]).tolist() == expected
    codes = pa.array(range(first, len(uuids)), pa.int32())
    assert decode_ids(pa.DictionaryArray.from_arrays(codes, column)).tolist() == expected


@given(st.lists(st.one_of(st.none(), WHOLE), max_size=20), st.data())
def test_a_decimal_without_fraction_has_the_id_of_its_text(numbers, data):
    first = data.draw(st.integers(0, len(numbers)))
    expected = [MISSING if one is None else id_of(str(one)) for one in numbers[first:]]
    for kind in (pa.decimal128(38, 0), pa.decimal256(50, 0)):
        column = pa.array([None if one is None else Decimal(one) for one in numbers], kind)
        assert decode_ids(column[first:]).tolist() == expected


@given(st.lists(st.one_of(st.none(), st.binary(min_size=16, max_size=16)), max_size=20))
def test_bytes_of_one_length_have_the_ids_of_other_bytes(words):
    expected = [MISSING if one is None else id_of(one) for one in words]
    assert decode_ids(pa.array(words, pa.binary(16))).tolist() == expected


def test_ids_of_128_bits_are_the_same_in_every_format(tmp_path):
    """Of Parquet, Arrow and text; also in lists."""
    uuids = [UUID(int=3**80), None, UUID(int=7)]
    numbers = [5, -(3**70), 2**64]
    column = uuid_column(uuids)
    decimals = pa.array([Decimal(one) for one in numbers], pa.decimal128(38, 0))
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 2, 3], pa.int32()), column)
    table = pa.table({"label": [0, 1, 1], "user": column, "item": decimals, "seen": lists})
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table, tmp_path / "plain.parquet", store_schema=False)
    pa.feather.write_feather(table, tmp_path / "a.feather")
    texts = [[None if one is None else str(one) for one in column] for column in (uuids, numbers)]
    seen = [[texts[0][0]], [], [texts[0][2]]]
    rows = zip([0, 1, 1], *texts, seen, strict=True)
    objects = [dict(zip(("label", "user", "item", "seen"), row, strict=True)) for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in objects))
    schema = Schema("label", (), ("user", "item", "seen"))
    expected = [id_of(text or "") for text in (*texts[0], *texts[1], texts[0][0], texts[0][2])]
    for name in ("a.parquet", "plain.parquet", "a.feather", "a.jsonl"):
        source = open_source(str(tmp_path / name), schema)
        (rows,) = decoded_chunks(source, schema)
        assert [*rows.ids_SN.reshape(-1), *rows.bags[0].values_L] == expected
        example = plain_rows(example_rows(source, schema, 3))
        assert [row["user"] for row in example] == texts[0]


def test_a_uuid_is_no_row_of_a_table():
    column = uuid_column([None, UUID(int=7)])
    with pytest.raises(BadValue, match=r"holds '00000000-.*', which is no integer"):
        decode_ids(column, TextIds.INTEGERS)
