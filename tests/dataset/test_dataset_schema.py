"""Columns are found under every naming that is in use, and nothing else is taken for them."""

from dataclasses import replace

import pyarrow as pa
import pytest

from recapp.dataset.data_settings import DataSettings
from recapp.dataset.schema import Schema, criteo_schema, schema_of
from recapp.errors import CheckpointError, ConfigError, DataError
from recapp.settings.records import record
from recapp.tables.table_settings import ListedTables, TablesOfDataset

CRITEO = criteo_schema()
NAMINGS = {
    "torchrec": ("label", "int_{}", 0, "cat_{}", 0),
    "torchrec from one": ("label", "int_{}", 1, "cat_{}", 1),
    "Merlin, HugeCTR": ("label", "I{}", 1, "C{}", 1),
    "reczoo x4, Kaggle": ("Label", "I{}", 1, "C{}", 1),
    "from zero": ("label", "I{}", 0, "C{}", 0),
    "Spark": ("_c0", "_c{}", 1, "_c{}", 14),
    "pandas": ("0", "{}", 1, "{}", 14),
    "NVIDIA DLRM": ("label", "num_{}", 0, "cat_{}", 0),
    "mixed": ("click", "num_{}", 1, "C{}", 1),
}


def names_of(label, dense, dense_first, sparse, sparse_first):
    numbers = (dense.format(dense_first + index) for index in range(13))
    return [label, *numbers, *(sparse.format(sparse_first + index) for index in range(26))]


def arrow(names, kinds=None):
    return pa.schema([(name, (kinds or {}).get(name, pa.string())) for name in names])


@pytest.mark.parametrize("naming", NAMINGS.values(), ids=NAMINGS)
def test_every_naming_in_use_is_found(naming):
    names = names_of(*naming)
    canonical = [
        "label",
        *(f"I{number}" for number in range(1, 14)),
        *(f"C{number}" for number in range(1, 27)),
    ]
    assert CRITEO.resolve(arrow(names), "f") == dict(zip(canonical, names, strict=True))
    shuffled = sorted(names, key=lambda name: name[::-1])
    assert CRITEO.resolve(arrow(["Id", *shuffled, "weight"]), "f") == dict(
        zip(canonical, names, strict=True)
    )


def test_unknown_names_are_read_by_position():
    names = [f"x{index * 7}" for index in range(40)]
    columns = CRITEO.resolve(arrow(names), "f")
    assert (columns["label"], columns["I1"], columns["I13"], columns["C1"], columns["C26"]) == (
        "x0",
        "x7",
        "x91",
        "x98",
        "x273",
    )
    assert CRITEO.resolve(arrow(["label", *names[1:]]), "f")["C26"] == "x273"
    assert criteo_schema(label=None).resolve(arrow(names[1:]), "f")["I1"] == "x7"


@pytest.mark.parametrize(
    "names",
    [[f"x{index}" for index in range(41)], [*(f"x{index}" for index in range(39)), "label"]],
)
def test_position_is_no_guess(names):
    with pytest.raises(DataError, match="no column for"):
        CRITEO.resolve(arrow(names), "f")


def test_a_missing_column_names_what_was_tried_and_what_is_close():
    names = [name if name != "C7" else "C07" for name in names_of("label", "I{}", 1, "C{}", 1)]
    text = (
        r"^day_0\.parquet: no column for C7; tried C7, cat_6, cat_7, _c20, 20, c7, C6; did you "
        r"mean .*C07"
    )
    with pytest.raises(DataError, match=text) as error:
        CRITEO.resolve(arrow(names), "day_0.parquet")
    assert "\n" not in str(error.value)


def test_many_missing_columns_are_one_line():
    with pytest.raises(
        DataError, match=r"no column for I1 \(and 12 more\); tried I1, .*; the file has label, a, b"
    ):
        CRITEO.resolve(arrow(["label", "a", "b"]), "f")


def test_a_missing_label_is_an_error_only_where_labels_are_wanted():
    names = names_of("label", "I{}", 1, "C{}", 1)[1:]
    with pytest.raises(DataError, match="no column for label; tried label, Label, _c0, 0, click"):
        CRITEO.resolve(arrow(names), "f")
    assert len(criteo_schema(label=None).resolve(arrow(names), "f")) == 39


@pytest.mark.parametrize(
    ("column", "kind", "text"),
    [
        (
            "C3",
            pa.timestamp("s"),
            r"column C3 \(sparse feature C3\) has type timestamp\[s\]; allowed: integers, text, "
            r"or lists of those; write the hour, the weekday or the day as an integer$",
        ),
        ("I2", pa.timestamp("us"), "; write the seconds, hours or days since a date as a number$"),
        ("I2", pa.date32(), "; write the seconds, hours or days since a date as a number$"),
        ("C3", pa.decimal128(9, 2), "; cast it to int64 or string$"),
        ("I2", pa.struct([("a", pa.int64())]), "; name its fields, each as COLUMN.FIELD$"),
        (
            "C3",
            pa.list_(pa.struct([("a", pa.int64())])),
            "; name its fields, each as COLUMN.FIELD$",
        ),
        (
            "C3",
            pa.map_(pa.string(), pa.int64()),
            "; name the values of its keys, each as COLUMN.KEY$",
        ),
        ("C3", pa.list_(pa.list_(pa.int64())), "; write one list of ids a row$"),
        ("C3", pa.bool_(), "; cast it to int64: 0 and 1$"),
        ("label", pa.timestamp("s"), "; write a column of 0 and 1$"),
        (
            "I2",
            pa.list_(pa.float32()),
            r"column I2 \(dense feature I2\) has type list<.*>; allowed: numbers, or .*; write "
            r"each number of its lists as a column, or name it in dataset.sparse if they hold ids$",
        ),
        ("label", pa.binary(4), r"column label \(label label\) has type fixed_size_binary"),
    ],
)
def test_a_type_that_cannot_be_read_is_refused_before_reading(column, kind, text):
    with pytest.raises(DataError, match=text):
        CRITEO.resolve(arrow(names_of("label", "I{}", 1, "C{}", 1), {column: kind}), "f")


def test_a_column_that_is_there_twice_is_refused_where_it_is_used():
    names = names_of("label", "I{}", 1, "C{}", 1)
    with pytest.raises(
        DataError, match=r"^f: column C3 \(C3\) is there 2 times; leave one of them"
    ):
        CRITEO.resolve(arrow([*names, "C3"]), "f")
    assert len(CRITEO.resolve(arrow([*names, "x", "x"]), "f")) == 40


def test_a_label_of_another_name_is_the_only_one_looked_for():
    names = names_of("label", "I{}", 1, "C{}", 1)
    with pytest.raises(DataError, match="no column for bought; tried bought;"):
        criteo_schema("bought").resolve(arrow(names), "f")


def settings(**dataset):
    tables = {"source": "from_dataset", "id_rule": dataset.pop("table_rule", None)}
    columns = {
        "path": "logs",
        "naming": "exact",
        "label": "label",
        "dense": [],
        "sparse": ["a", "b"],
        "id_rule": "hash",
    }
    return record(DataSettings, columns | dataset, "dataset"), record(
        TablesOfDataset, tables, "tables"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("hashed", "hashed")),
        ({"hex": ["b"]}, ("hashed", "hex")),
        ({"id_rule": "clamp", "hex": ["b"]}, ("integers", "hex")),
        ({"id_rule": "error", "table_rule": "hash"}, ("hashed", "hashed")),
        ({"table_rule": "drop"}, ("integers", "integers")),
    ],
)
def test_text_is_read_as_the_settings_of_data_set_and_tables_ask(changes, expected):
    schema = schema_of(*settings(**changes))
    assert tuple(schema.text_ids(name) for name in "ab") == expected


def test_text_must_be_integers_where_one_of_the_tables_that_read_it_takes_ids_for_rows():
    tables = [
        {"name": "t", "feature_names": ["a", "b"], "id_rule": "hash"},
        {"name": "u", "feature_names": ["b"]},
    ]
    schema = schema_of(settings()[0], record(ListedTables, {"source": "list", "tables": tables}))
    assert (schema.text_ids("a"), schema.text_ids("b")) == ("hashed", "integers")


def test_criteo_is_hexadecimal_with_and_without_labels():
    for label in ("label", None):
        schema = schema_of(*settings(naming="criteo", label=label, dense=None, sparse=None))
        assert (schema.label, {schema.text_ids(name) for name in schema.sparse}) == (label, {"hex"})


def test_hexadecimal_columns_must_be_sparse_columns():
    with pytest.raises(
        ConfigError, match=r"dataset\.hex names user, which is no sparse column; did you mean users"
    ):
        Schema("y", (), ("users", "items"), hex=("user",))


def test_a_checkpoint_of_another_id_encoding_is_refused_with_what_to_set():
    trained = Schema("label", (), ("a", "b"), hex=("a",)).id_encoding()
    Schema(None, (), ("a",), hex=("a",)).check_id_encoding(trained, "x.ckpt")
    with pytest.raises(
        CheckpointError,
        match=(
            r"x\.ckpt was trained on ids of a that were read as hexadecimal: set "
            r".*dataset\.hex=\[a\]"
        ),
    ):
        Schema("label", (), ("a", "b")).check_id_encoding(trained, "x.ckpt")
    with pytest.raises(CheckpointError, match=r"on ids of b that were read as plain text"):
        Schema("label", (), ("a", "b"), hex=("a", "b")).check_id_encoding(trained, "x.ckpt")
    with pytest.raises(CheckpointError, match="hashed by md5, this recapp hashes by xxh64"):
        Schema("label", (), ("a",)).check_id_encoding({"text": "md5", "hex": []}, "x.ckpt")
    for damaged in (
        3,
        {},
        {"text": "xxh64"},
        {"text": 1, "hex": []},
        {"text": "xxh64", "hex": "a"},
    ):
        with pytest.raises(
            CheckpointError, match=r"manifest of checkpoint x\.ckpt is damaged: ids="
        ):
            Schema("label", (), ("a",)).check_id_encoding(damaged, "x.ckpt")


def test_dictionary_types_are_judged_by_their_values():
    kinds = {
        "C3": pa.dictionary(pa.int32(), pa.string()),
        "C4": pa.dictionary(pa.int32(), pa.bool_()),
    }
    with pytest.raises(DataError, match="sparse feature C4"):
        CRITEO.resolve(arrow(names_of("label", "I{}", 1, "C{}", 1), kinds), "f")


def test_a_schema_needs_distinct_names_and_a_sparse_feature():
    with pytest.raises(ConfigError, match="x named more than once"):
        Schema("y", ("x",), ("x",))
    with pytest.raises(ConfigError, match="no sparse column"):
        Schema("y", ("x",), ())


def test_several_labels_are_found_by_name_and_come_first_by_position():
    both = replace(criteo_schema(["click", "buy"]), weight="price")
    names = names_of("click", "I{}", 1, "C{}", 1)
    found = both.resolve(arrow([*names, "buy", "price"]), "f")
    assert [name for name in found if name == found[name]] == list(found) and len(found) == 42
    with pytest.raises(DataError, match="no column for buy; tried buy;"):
        both.resolve(arrow([*names, "price"]), "f")
    unnamed = [f"x{n}" for n in range(41)]
    by_position = criteo_schema(["click", "buy"]).resolve(arrow(unnamed), "f")
    assert (by_position["buy"], by_position["I1"], by_position["C26"]) == ("x1", "x2", "x40")


def test_labels_and_weights_come_from_the_settings():
    schema = schema_of(*settings(label=["l", "m"], weight={"m": "w"}))
    assert schema.labels == ("l", "m") and schema.weights == {"m": "w"}
    assert schema_of(*settings(weight="w")).weights == {"label": "w"}


def test_weights_need_a_label():
    with pytest.raises(ConfigError, match="which is no label; did you mean click"):
        Schema("click", (), ("a",), weight={"clik": "w"})
    with pytest.raises(ConfigError, match=r"dataset\.weight=w: there is no label"):
        Schema(None, (), ("a",), weight="w")
    with pytest.raises(ConfigError, match="dataset columns: a named more than once"):
        Schema("click", (), ("a",), weight="a")
