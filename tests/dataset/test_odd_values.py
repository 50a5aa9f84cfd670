"""What looks odd about values is said before training: dates, texts of numbers, separators."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recapp.dataset.data_settings import DataSettings, ScoringSettings
from recapp.dataset.schema import schema_of
from recapp.dataset.sequential_rows import remarks
from recapp.dataset.source import open_source
from recapp.tables.table_settings import TablesOfDataset
from recapp.trainer.datamodule import ClickData


def said(tmp_path, id_rule="hash", **columns):
    """Return the remarks on two rows with the columns given; `t` is a column of times."""
    separator = columns.pop("separator", None)
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"label": [0, 1], "x": [1, 2], **columns}), path)
    sparse = ("x", *(name for name in columns if name != "t"))
    settings = DataSettings(
        path=str(path),
        sparse=sparse,
        times={"t": "s"} if "t" in columns else None,
        id_rule=id_rule,
        separator=separator,
    )
    schema = schema_of(settings, TablesOfDataset(source="from_dataset"))
    return list(remarks(open_source(str(path), schema), schema))


def test_oddities_are_noted_before_training_and_before_predicting(tmp_path, capsys):
    path = str(tmp_path / "f.parquet")
    pq.write_table(pa.table({"label": [0, 1] * 8, "x": ["7.0", "8"] * 8}), path)
    settings = DataSettings(path=path, sparse=("x",), lanes=1, batch_size=2, val_batch_size=2)
    schema = schema_of(settings, TablesOfDataset(source="from_dataset"))
    data = ClickData(settings, schema, scoring=ScoringSettings(input=path))
    for stage in ("fit", "validate", "predict"):
        data.setup(stage)
        noted = capsys.readouterr().err.count("column x holds the text '7.0'")
        assert noted == (stage != "validate")


def test_dates_have_no_hour(tmp_path):
    (found,) = said(tmp_path, t=pa.array([20_000, 20_001], pa.date32()))
    assert found == (
        "column t holds dates, which have no time of day: t_hour, t_day_sin, t_day_cos say "
        "nothing; leave them out, dataset.time_features=[weekday,week]"
    )


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "7.0"]),
        pa.array(["5", "-7.00"]).dictionary_encode(),
        pa.array([["5"], ["5", "7.0"]]),
        pa.array([b"7.0", b"\xff"]),
    ],
    ids=lambda column: str(column.type),
)
def test_text_of_a_whole_decimal_is_another_id_than_the_number(tmp_path, column):
    (found,) = said(tmp_path, user=column)
    assert found.startswith("column user holds the text '")
    assert "which is another id than the number: write whole numbers" in found


def test_text_of_a_missing_value_is_an_id(tmp_path):
    (found,) = said(tmp_path, user=["nan", ""])
    assert found == (
        "column user holds the text 'nan', which is an id like other text: write null or empty "
        "text where an id is missing"
    )
    assert said(tmp_path, user=["7", None], other=["1.5", "1.0.0"], more=["07.0", "NA"]) == []


@pytest.mark.parametrize("text", ["[3, 17]", "[]", "[7]", "(3,)", "{3,17}"])
def test_text_of_a_list_is_one_id(tmp_path, text):
    (found,) = said(tmp_path, user=["3", text])
    assert found == (
        f"column user holds the text '{text}', which is no list, as its brackets are part of an "
        "id: write a column of lists, or texts such as 3|17 and dataset.separator"
    )
    assert said(tmp_path, user=["(US)", "[a"], other=["{guid-1}", "a]"]) == []


@pytest.mark.parametrize("text", ["3|17", "3,17,4", "3;17"])
def test_text_of_numbers_with_signs_between_is_one_id_without_a_separator(tmp_path, text):
    (remark,) = said(tmp_path, seen=["5", text])
    assert remark.startswith(f"column seen holds the text '{text}', which is one id: if it is")
    assert said(tmp_path, seen=["5", text], separator={"seen": text[1]}) == []


@pytest.mark.parametrize("values", [[[3, 17], [5]], [["3|17"], ["5"]], [3, 5]], ids=str)
def test_a_separator_for_what_is_no_text_has_no_effect(tmp_path, values):
    (remark,) = said(tmp_path, seen=values, separator={"seen": "|"})
    assert remark.startswith("dataset.separator={seen: '|'} has no effect, because column seen")


def test_times_of_another_unit_are_noted(tmp_path):
    (remark,) = said(tmp_path, t=[1_767_225_600_000, 1_767_225_600])  # one in milliseconds
    assert remark == (
        "column t holds times such as 57971-02-25T00:00:00: is dataset.times={t: s} the unit of "
        "its numbers?"
    )
    assert said(tmp_path, t=[1_767_225_600, None]) == []
