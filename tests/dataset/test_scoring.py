"""The rows of a prediction: which batch holds which rows, on whichever rank, and what is kept."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataset_files import SCHEMA, numbered_table, row_numbers, write_numbered
from hypothesis import given
from hypothesis import strategies as st

from recapp.dataset.data_settings import ScoringSettings
from recapp.dataset.schema import criteo_schema
from recapp.dataset.scoring import RankInput, open_input
from recapp.errors import ConfigError, DataError

FILES = [[10, 3], [0], [7, 30], [1]]  # rows of the row groups of four files: 51
ROWS = 51


def opened(path, schema=SCHEMA, **settings):
    return open_input(ScoringSettings(input=str(path), **settings), schema, "none")


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    return write_numbered(tmp_path_factory.mktemp("input") / "logs", FILES)


@given(world=st.integers(1, 20), size=st.integers(1, 60))
def test_every_row_is_in_one_batch_in_order_and_batches_begin_where_they_did_on_one_rank(
    numbered, world, size
):
    rows = opened(numbered, rows_per_batch=size)
    ranks = [
        [(b.first_row, row_numbers(b)) for b in RankInput(rows, rank, world)]
        for rank in range(world)
    ]
    # the exchange needs as many of every rank
    assert {len(batches) for batches in ranks} == {len(RankInput(rows, 0, world))}
    assert len(ranks[0]) == -(-len(range(0, ROWS, size)) // world)
    batches = [batch for rank in ranks for batch in rank if batch[1]]
    assert batches == [(n, list(range(n, min(n + size, ROWS)))) for n in range(0, ROWS, size)]


def test_the_rows_that_are_done_after_a_batch_of_each_rank_are_counted(numbered):
    rows = opened(numbered, rows_per_batch=4)
    ranks = [RankInput(rows, rank, 3) for rank in range(3)]
    done = [0] * len(ranks[0])
    for rank in ranks:
        for number, batch in enumerate(rank):
            done[number] += batch.rows
    assert [sum(done[: n + 1]) for n in range(len(done))] == [
        ranks[0].rows_after(n + 1) for n in range(len(done))
    ]
    assert sum(done) == ROWS


def test_what_is_read_is_what_training_reads_without_a_label(numbered):
    (batch,) = opened(numbered, rows_per_batch=64).batches(range(ROWS))
    assert torch.isnan(batch.labels_B).all() and batch.rows == ROWS
    assert batch.sparse["many"].lengths().tolist() == [row % 4 for row in range(ROWS)]
    assert batch.sparse["one"].values().tolist() == [row * 10 for row in range(ROWS)]


def test_a_batch_that_moves_keeps_its_place_and_what_is_kept(numbered):
    found = opened(numbered, columns=["one"], rows_per_batch=8)
    batch = next(found.batches(range(16, 32)))
    moved = batch.to("meta")
    assert moved.first_row == 16 and moved.kept is batch.kept
    assert moved.dense_BI.device.type == "meta"
    assert batch.to("cpu") is batch


# ---- kept columns


def write(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def kept(found):
    return pa.concat_tables([b.kept for b in found.batches(range(found.rows))])


def test_kept_columns_have_their_rows_types_and_order(tmp_path):
    table = numbered_table(0, 30)
    extra = {
        "text": pa.array([f"row {n % 3}" for n in range(30)]),
        "category": pa.array([f"c{n % 2}" for n in range(30)]).dictionary_encode(),
        "nested": pa.array([{"a": n, "b": [n]} for n in range(30)]),
        "none": pa.array([None if n % 5 else n for n in range(30)], pa.int32()),
        "a.b": pa.array(range(30), pa.uint8()),
    }
    for name, column in extra.items():
        table = table.append_column(name, column)
    pq.write_table(table, tmp_path / "logs.parquet", row_group_size=7)
    columns = ["nested", "a.b", "category", "many", "one", "none", "text", "label"]
    found = kept(opened(tmp_path / "logs.parquet", columns=columns, rows_per_batch=4))
    assert found.column_names == columns
    for name in columns:
        assert found[name].to_pylist() == table[name].to_pylist(), name
    assert found.schema.field("category").type == pa.string()  # a dictionary is of its file
    assert found.schema.field("none").type == pa.int32()


def test_a_text_column_that_is_also_a_feature_is_kept_as_text(tmp_path):
    ids = ["a", "b", None, "a"]
    path = write(tmp_path / "x.parquet", row=[1, 2, 3, 4], one=ids, many=ids, other=ids)
    found = kept(opened(path, columns=["one"], rows_per_batch=3))
    assert found["one"].to_pylist() == ids and found.schema.field("one").type == pa.string()


def test_views_are_kept_as_plain_text_and_lists(tmp_path):
    table = numbered_table(0, 5)
    table = table.append_column("seen", pa.array(list("abcde")).cast(pa.string_view()))
    pq.write_table(table, tmp_path / "x.parquet")
    found = kept(opened(tmp_path / "x.parquet", columns=["seen"]))
    assert found["seen"].to_pylist() == list("abcde")
    assert found.schema.field("seen").type == pa.string()


def refused(kind, make):
    with pytest.raises(kind) as raised:
        make()
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_a_column_that_is_not_there_is_told_which_are(numbered):
    said = refused(DataError, lambda: opened(numbered, columns=["ohter"]))
    assert "has no column ohter" in said and "did you mean other" in said
    assert "it has label, row, one, many, other" in said and "part-0.parquet" in said


def test_a_column_that_only_some_files_have_is_refused_with_the_file(tmp_path):
    pq.write_table(
        numbered_table(0, 3).append_column("user", pa.array([1, 2, 3])), tmp_path / "a.parquet"
    )
    pq.write_table(numbered_table(3, 3), tmp_path / "b.parquet")
    assert f"{tmp_path}/b.parquet has no column user" in refused(
        DataError, lambda: opened(tmp_path, columns=["user"])
    )


def test_a_kept_column_of_two_types_is_refused_with_both_files(tmp_path):
    for name, kind in (("a", pa.int64()), ("b", pa.string())):
        more = pa.array([1, 2, 3]).cast(kind)
        pq.write_table(
            numbered_table(0, 3).append_column("user", more), tmp_path / f"{name}.parquet"
        )
    said = refused(DataError, lambda: opened(tmp_path, columns=["user"]))
    assert "user has type string in" in said and "int64 in" in said and "a.parquet" in said


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    table = numbered_table(0, 3)
    for _ in range(2):
        table = table.append_column("user", pa.array([1, 2, 3]))
    pq.write_table(table, tmp_path / "a.parquet")
    assert "has column user 2 times" in refused(
        DataError, lambda: opened(tmp_path, columns=["user"])
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"columns": ["one", "one"]}, "one is named more than once"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    assert words in refused(ConfigError, lambda: ScoringSettings(input="x", **settings))


# ---- files


def test_a_missing_feature_is_named_with_its_file(tmp_path):
    pq.write_table(numbered_table(0, 3), tmp_path / "a.parquet")
    pq.write_table(numbered_table(0, 3).drop(["many"]), tmp_path / "b.parquet")
    said = refused(DataError, lambda: opened(tmp_path))
    assert f"{tmp_path}/b.parquet: no column for many" in said


def test_nothing_that_matches_is_an_error_of_the_setting_input(tmp_path):
    said = refused(DataError, lambda: opened(f"{tmp_path}/*.parquet"))
    assert said == f"input={tmp_path}/*.parquet: no file matches; check the pattern"


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_text("I1,I2\n1,2\n")
    said = refused(DataError, lambda: opened(tmp_path))
    assert said.startswith(f"input: {tmp_path}/a.parquet is not a whole Parquet file (")


def test_a_wrong_type_is_named_with_column_and_file(tmp_path):
    table = numbered_table(0, 3).drop(["one"]).append_column("one", pa.array([{"a": 1}] * 3))
    pq.write_table(table, tmp_path / "a.parquet")
    said = refused(DataError, lambda: opened(tmp_path))
    assert f"{tmp_path}/a.parquet: column one (sparse feature one) has type struct" in said


def test_a_value_that_cannot_be_read_is_named_with_its_row(tmp_path):
    table = numbered_table(0, 9).drop(["row"])
    table = table.append_column("row", pa.array(["1"] * 7 + ["x", "1"]))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    found = opened(tmp_path, rows_per_batch=2)
    said = refused(DataError, lambda: list(found.batches(range(9))))
    assert f"{tmp_path}/a.parquet: column row, row 7" in said


def test_files_without_rows_have_an_empty_batch(tmp_path):
    pq.write_table(numbered_table(0, 0), tmp_path / "a.parquet")
    found = opened(tmp_path, columns=["one"])
    assert found.rows == 0 and found.kept.names == ["one"]
    (batch,) = RankInput(found)
    assert batch.rows == 0 and batch.kept.num_rows == 0


# ---- Criteo's files by position


def positional(path, columns):
    dense = columns - 26
    numbers = {f"x{n}": ["1"] for n in range(dense)}
    write(path, **numbers, **{f"y{n}": [f"{n:x}"] for n in range(26)})
    return path


def test_39_columns_of_other_names_are_read_by_position(tmp_path):
    found = opened(positional(tmp_path / "a.parquet", 39), criteo_schema())
    assert found.source.files[0].columns["I1"] == "x0"
    assert found.source.files[0].columns["C26"] == "y25"


def test_of_40_columns_the_first_is_the_label_as_in_training_and_not_read(tmp_path):
    found = opened(positional(tmp_path / "a.parquet", 40), criteo_schema())
    columns = found.source.files[0].columns
    assert columns["I1"] == "x1" and columns["C1"] == "y0" and "x0" not in columns.values()
    (batch,) = found.batches(range(1))
    assert torch.isnan(batch.labels_B).all()


def test_38_columns_of_other_names_are_refused(tmp_path):
    said = refused(
        DataError, lambda: opened(positional(tmp_path / "a.parquet", 38), criteo_schema())
    )
    assert "no column for I1" in said
