"""Tables are sized by the ids of the first rows; text that cannot be ids is found there, too."""

import numpy as np
import pyarrow as pa
import pytest
from dataset_files import write_columns

from recapp.dataset import sequential_rows
from recapp.dataset.schema import Schema
from recapp.dataset.sequential_rows import check_first_rows, rows_for, table_rows
from recapp.dataset.source import open_source
from recapp.errors import DataError

MOST = 200_000


@pytest.mark.parametrize(
    ("distinct", "rows"),
    [(0, 2), (1, 4), (2, 8), (3, 16), (4, 16), (5, 32), (1024, 4096), (1025, 8192)],
)
def test_a_table_has_the_next_power_of_two_of_four_rows_an_id(distinct, rows):
    assert rows_for(distinct) == rows


def counted(tmp_path, monkeypatch, rows=None, most=MOST, cut=None, **columns):
    """Return the table rows of the columns, of which the first `rows` are counted."""
    if rows:
        monkeypatch.setattr(sequential_rows, "COUNTED_ROWS", rows)
    length = len(next(iter(columns.values())))
    path = write_columns(tmp_path / "f.parquet", label=[0] * length, **columns)
    schema = Schema("label", (), tuple(columns))
    source = open_source(str(path), schema)
    return dict(
        zip(columns, table_rows(source.slice(*cut) if cut else source, schema, most), strict=True)
    )


def test_tables_have_room_for_the_ids_of_all_rows(tmp_path, monkeypatch):
    some = np.arange(1000)
    text = [f"t{n % 3}" for n in some]
    found = counted(tmp_path, monkeypatch, two=some % 2, text=text, all=some, hundred=some % 100)
    assert found == {"two": 8, "text": 16, "all": 4096, "hundred": 512}


def test_ten_thousand_ids_of_a_power_law_do_not_get_the_largest_table(tmp_path, monkeypatch):
    ids = np.minimum(np.random.default_rng(1).zipf(1.2, 400_000), 10_000)
    found = counted(tmp_path, monkeypatch, ids=ids, few=ids % 10, all=np.arange(len(ids)))
    assert found == {"ids": 65_536, "few": 64, "all": MOST}


def test_a_table_that_grows_expects_as_many_ids_as_all_rows_would_bring(tmp_path, monkeypatch):
    some = np.arange(4000)
    found = counted(tmp_path, monkeypatch, rows=1000, most=None, all=some, hundred=some % 100)
    assert found == {"all": rows_for(4000), "hundred": 512}
    found = counted(tmp_path, monkeypatch, most=None, all=some, none=pa.nulls(4000, pa.int64()))
    assert found == {"all": rows_for(4000), "none": 2}


def test_a_table_is_never_larger_than_the_most_and_has_room_where_nothing_was_seen(
    tmp_path, monkeypatch
):
    ids = [n % 100 for n in range(1000)]
    assert counted(tmp_path, monkeypatch, most=64, ids=ids, none=pa.nulls(1000, pa.int64())) == {
        "ids": 64,
        "none": 2,
    }


def test_only_the_first_rows_count_wherever_row_groups_and_cuts_are(tmp_path, monkeypatch):
    ids = [7] * 30 + [n % 4 for n in range(100)] + list(range(10, 1000))
    assert counted(tmp_path, monkeypatch, rows=100, cut=(30, 900), ids=ids) == {"ids": 16}


def test_ids_in_bags_count_and_empty_bags_do_not(tmp_path, monkeypatch):
    bags = [[n % 3, 5] if n % 2 else [] for n in range(200)]
    assert counted(tmp_path, monkeypatch, bags=bags, single=[n % 2 for n in range(200)]) == {
        "bags": 16,
        "single": 8,
    }


@pytest.mark.parametrize(
    "bad",
    [
        ["1", "x"],
        [["1"], ["2", "x"]],
        pa.array(["1", "x"]).dictionary_encode(),
        pa.array([b"1", b"x"]),
    ],
)
def test_text_that_is_no_integer_is_found_in_the_first_rows(tmp_path, bad):
    path = write_columns(tmp_path / "f.parquet", label=[0, 1], number=[1, 2], id=bad)
    schema = Schema("label", (), ("number", "id"), integers=("number", "id"))
    with pytest.raises(DataError, match=f"{path}: column id, row 1 holds 'x', which is no integer"):
        check_first_rows(open_source(str(path), schema), schema)
    hashed = Schema("label", (), ("number", "id"), integers=("number",))
    check_first_rows(open_source(str(path), hashed), hashed)
