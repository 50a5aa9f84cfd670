"""What looks odd about values is said before training: units of times, dates, texts of numbers."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recapp.dataset.data_settings import DataSettings, ScoringSettings
from recapp.dataset.odd_values import remarks
from recapp.dataset.schema import schema_of
from recapp.dataset.source import open_source
from recapp.tables.table_settings import TablesOfDataset
from recapp.trainer.datamodule import ClickData

SECONDS = [1_760_000_000, 1_760_100_000]  # 9 and 10 October 2025
WRONG = "dataset.times={{t: {}}}: the times of t are from {} to {}; with {{t: {}}} they are from "


def said(tmp_path, id_rule="hash", **columns):
    """Return the remarks on two rows with the columns given; `t` is of times in `unit`."""
    unit = columns.pop("unit", None)
    separator = columns.pop("separator", None)
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"label": [0, 1], "x": [1, 2], **columns}), path)
    sparse = ("x", *(name for name in columns if name != "t"))
    settings = DataSettings(
        path=str(path),
        sparse=sparse,
        times={"t": unit} if unit else None,
        id_rule=id_rule,
        separator=separator,
    )
    schema = schema_of(settings, TablesOfDataset(source="from_dataset"))
    return list(remarks(open_source(str(path), schema), schema))


@pytest.mark.parametrize("kind", [int, str], ids=["numbers", "texts"])
@pytest.mark.parametrize(
    ("factor", "unit", "right", "first", "last"),
    [
        (1, "ms", "s", "1970-01-21", "1970-01-21"),
        (1000, "s", "ms", "57742-03-07", "57745-05-07"),
        (10**9, "us", "ns", "57742-03-07", "57745-05-07"),
    ],
)
def test_times_that_another_unit_makes_credible_are_named_with_it(
    tmp_path, kind, factor, unit, right, first, last
):
    times = [kind(second * factor) for second in SECONDS]
    found = said(tmp_path, t=times, unit=unit)
    assert found == [WRONG.format(unit, first, last, right) + "2025-10-09 to 2025-10-10"]
    assert said(tmp_path, t=times, unit=right) == []


def test_times_that_no_unit_or_their_own_type_explains_are_not_odd(tmp_path):
    assert said(tmp_path, t=[0, 2_500_000], unit="s") == []  # seconds since the log began
    assert said(tmp_path, t=pa.array(SECONDS, pa.timestamp("s")), unit="ns") == []
    wrong = pa.array([1_760_000, 1_760_100], pa.timestamp("ms"))  # no unit of ours changes them
    assert said(tmp_path, t=wrong, unit="s") == []
    assert said(tmp_path, t=pa.nulls(2, pa.int64()), unit="s") == []
    assert said(tmp_path, t=["noon", "night"], unit="s") == []  # training refuses it
    assert said(tmp_path, t=[0, SECONDS[0]], unit="s") == []  # 0 for a missing time


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
    (found,) = said(tmp_path, t=pa.array([20_000, 20_001], pa.date32()), unit="s")
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
