"""Times, periods and vectors: what is computed of them, from any type of column."""

import json
import math
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recapp.dataset.collate import RawRows
from recapp.dataset.data_settings import DataSettings, Derivation
from recapp.dataset.decode import BadValue, decode_times, decode_vectors
from recapp.dataset.rows import circle, date_ids, turns_of_numbers
from recapp.dataset.schema import schema_of
from recapp.dataset.sequential_rows import example_rows, fitted, plain_rows, table_of, table_rows
from recapp.dataset.source import open_source
from recapp.dataset.stream import BatchStream
from recapp.errors import ConfigError, DataError
from recapp.serving.json_rows import read_rows
from recapp.serving.limits import Limits, Refused
from recapp.serving.open_inference import read_tensor
from recapp.serving.open_inference import table_of as table_of_tensors
from recapp.sparse.missing_ids import MISSING
from recapp.stored.plain_parts import read_values, written_values
from recapp.tables.table_settings import TablesOfDataset

MOMENT = 1_413_849_599  # Monday 20 October 2014, 23:59:59
SECONDS = [MOMENT, None, 0, -1, MOMENT + 1]


def schema(**changed):
    given = {"path": "logs", "dense": ("a",), "sparse": ("x",), **changed}
    return schema_of(DataSettings(**given), TablesOfDataset(source="from_dataset"))


# ---- arithmetic


def test_sines_and_cosines_are_those_of_the_angle_and_exact_at_quarters():
    turns = np.linspace(0, 1, 10_007)
    sines, cosines = circle(turns)
    assert np.abs(sines - np.sin(2 * math.pi * turns)).max() < 1e-7
    assert np.abs(cosines - np.cos(2 * math.pi * turns)).max() < 1e-7
    sines, cosines = circle(np.array([0, 0.25, 0.5, 0.75, 1]))
    assert np.abs(sines - [0, 1, 0, -1, 0]).max() < 1e-11
    assert np.abs(cosines - [1, 0, -1, 0, 1]).max() < 1e-11
    assert sines.dtype == np.float32 and sines[0] == 0 and cosines[0] == 1


def test_hours_and_weekdays_are_those_of_the_calendar():
    random = np.random.default_rng(3)
    times = random.integers(-(10**10), 10**10, 500)
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    dates = [epoch + timedelta(seconds=int(time)) for time in times]
    assert date_ids(times, Derivation.HOUR).tolist() == [date.hour + 1 for date in dates]
    assert date_ids(times, Derivation.WEEKDAY).tolist() == [date.isoweekday() for date in dates]
    none = np.array([MISSING])
    assert (
        date_ids(none, Derivation.HOUR).tolist()
        == date_ids(none, Derivation.WEEKDAY).tolist()
        == [MISSING]
    )


def test_a_number_is_in_a_part_of_its_period():
    numbers = np.array([0, 6, -6, 30, np.nan, -1e-30], dtype=np.float32)
    assert turns_of_numbers(numbers, np.float32(24)).tolist() == [0, 0.25, 0.75, 0.25, 0, 1]


# ---- columns


@pytest.mark.parametrize(
    "column",
    [
        pa.array(SECONDS, pa.int64()),
        pa.array([None if s is None else f"{s}" for s in SECONDS]),
        pa.array([None if s is None else float(s) for s in SECONDS]),
        pa.array(SECONDS, pa.timestamp("s")),
        pa.array([None if s is None else s * 10**9 + 999 for s in SECONDS], pa.timestamp("ns")),
        pa.array(SECONDS, pa.timestamp("s", tz="Asia/Tokyo")),
        pa.array(SECONDS, pa.timestamp("s")).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
def test_times_of_any_type_are_seconds(column):
    wanted = [MISSING if s is None else s for s in SECONDS]
    assert decode_times(column, "s").tolist() == wanted


def test_whole_numbers_of_times_have_the_unit_of_the_settings():
    column = pa.array([1_999, -1, None])
    assert decode_times(column, "ms").tolist() == [1, -1, MISSING]
    days = pa.array([2, None, -1], pa.date32())
    assert decode_times(days, "ns").tolist() == [172_800, MISSING, -86_400]
    assert decode_times(days.cast(pa.date64()), "ns").tolist() == [172_800, MISSING, -86_400]
    with pytest.raises(BadValue, match="holds 'noon'; a time must be a whole number of ms since"):
        decode_times(pa.array(["5", "noon"]), "ms")


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float64())])
def test_vectors_are_rows_of_numbers(kind):
    column = pa.array([[1, 2], None, [None, 4]], kind)
    wanted = [[1, 2], [0, 0], [0, 4]]
    assert decode_vectors(column, 2).tolist() == wanted
    assert decode_vectors(column.slice(2), 2).tolist() == wanted[2:]
    fixed = pa.array([[9, 9], [1, 2], None, [None, 4]], pa.list_(pa.float32(), 2))
    assert decode_vectors(fixed.slice(1), 2).tolist() == wanted
    assert decode_vectors(pa.nulls(2), 2).tolist() == [[0, 0]] * 2
    with pytest.raises(BadValue, match=r"a list of 1 values; dataset\.vectors wants 2") as refused:
        decode_vectors(pa.array([[1, 2], None, [3]], kind), 2)
    assert refused.value.index == 2
    with pytest.raises(BadValue, match="holds inf, which is not finite") as refused:
        decode_vectors(pa.array([None, [1, 2], [3, math.inf]], kind), 2)
    assert refused.value.index == 2


# ---- from files to batches


@pytest.fixture
def logs(tmp_path):
    """Five rows with a time in milliseconds and a vector."""
    times = [None if s is None else s * 1000 for s in SECONDS]
    columns = {
        "label": [0, 1, 0, 1, 0],
        "a": [6.0, None, 12.0, -6.0, 30.0],
        "x": [1, 2, 3, 4, 5],
        "t": pa.array(times, pa.timestamp("ms")),
        "v": pa.array([[1, 2], [3, 4], None, [5, 6], [7, 8]], pa.list_(pa.float32(), 2)),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    return str(tmp_path)


ALL = {"times": {"t": "ms"}, "periodic": {"a": 24}, "vectors": {"v": 2}, "missing_flags": True}


def test_times_periods_and_vectors_stand_behind_the_columns_of_the_logs(logs):
    made = fitted(schema(**ALL, min_frequency={"t_hour": 2}), open_source(logs, schema(**ALL)))
    assert made.features == ("x", "t_hour", "t_weekday")
    circles = ("t_day_sin", "t_day_cos", "t_week_sin", "t_week_cos")
    assert made.numbers == ("a", "a_missing", "a_sin", "a_cos", *circles, "v[0]", "v[1]")
    columns = [made.id_column(name) for name in made.features]
    assert [one and one.rows for one in columns] == [None, 3, 8]
    assert table_rows(open_source(logs, made), made, 100)[1:] == [3, 8]
    batch = RawRows(made, "none").batch(pq.read_table(logs + "/rows.parquet"))
    # 23:59:59 is there twice and 00:00:00 twice; a missing time has no place
    assert batch.sparse["t_hour"].values().tolist() == [2, MISSING, 1, 2, 1]
    assert batch.sparse["t_weekday"].values().tolist() == [1, MISSING, 4, 3, 2]
    a, missing, sine, cosine, *of_time, v0, v1 = batch.dense_BI.T.tolist()
    assert a == [6, 0, 12, -6, 30] and missing == [0, 1, 0, 0, 0]
    assert np.allclose(sine, [1, 0, 0, -1, 1], atol=1e-11)
    assert np.allclose(cosine, [0, 0, -1, 0, 0], atol=1e-11)
    near = 2 * math.pi / 86_400
    assert np.allclose(of_time[0], [-near, 0, 0, -near, 0], atol=1e-7)
    assert of_time[1][1] == 0 and of_time[1][2] == of_time[1][4] == 1
    assert (v0, v1) == ([1, 3, 0, 5, 7], [2, 4, 0, 6, 8])
    values = read_values(*written_values(made.derived), made.derived)
    assert values["t_week_sin.sine"].tolist() == [604_800] and values["a_cos.cosine"] == [24]


def test_vectors_need_no_derived_columns_and_batches_have_them_in_any_order(logs):
    made = schema(vectors={"v": 2})
    assert made.numbers == ("a", "v[0]", "v[1]") and not made.fits
    stream = BatchStream(open_source(logs, made), made, batch_size=4, lanes=2, shuffle_rows=4)
    (batch,) = stream
    found = dict(zip(batch.sparse.values().tolist(), batch.dense_BI[:, 1].tolist(), strict=True))
    assert found.items() <= {1: 1, 2: 3, 3: 0, 4: 5, 5: 7}.items()


def test_vectors_beside_one_number_and_derived_ids_are_gathered(logs):
    chosen = schema(vectors={"v": 2}, times={"t": "s"}, time_features=("hour",))
    made = fitted(chosen, open_source(logs, chosen))
    stream = BatchStream(open_source(logs, made), made, batch_size=4, lanes=2, shuffle_rows=4)
    (batch,) = stream
    ids = batch.sparse["x"].values().tolist()
    found = dict(zip(ids, batch.dense_BI[:, 1:].tolist(), strict=True))
    whole = RawRows(made, "none").batch(pq.read_table(logs + "/rows.parquet"))
    rows = zip(whole.sparse["x"].values().tolist(), whole.dense_BI[:, 1:].tolist(), strict=True)
    wanted = dict(rows)
    assert found and found == {x: wanted[x] for x in found}


def test_an_example_row_is_plain_and_read_as_the_row_of_the_log(logs):
    made = fitted(schema(**ALL), open_source(logs, schema(**ALL)))
    rows = plain_rows(example_rows(open_source(logs, made), made, 5))
    assert rows[0]["t"] == MOMENT * 1000 and rows[1]["t"] is None and rows[0]["v"] == [1, 2]
    read = RawRows(made, "none")
    wanted = read.batch(pq.read_table(logs + "/rows.parquet"))
    found = read.batch(table_of(rows, made))
    assert found.dense_BI.equal(wanted.dense_BI)
    assert found.sparse.values().equal(wanted.sparse.values())


def test_times_of_csv_are_text(tmp_path):
    (tmp_path / "rows.csv").write_text(f"label,a,x,t\n0,1,2,{MOMENT}\n1,1,2,\n")
    chosen = {"times": {"t": "s"}, "time_features": ("weekday",)}
    made = fitted(schema(**chosen), open_source(str(tmp_path), schema(**chosen)))
    stream = BatchStream(
        open_source(str(tmp_path), made), made, batch_size=2, lanes=1, shuffle_rows=0
    )
    (batch,) = stream
    assert batch.sparse["t_weekday"].values().tolist() == [1, MISSING]


# ---- bad input


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"periodic": {"x": 24}}, "dataset.periodic names x, which is no dense column"),
        ({"times": {"x": "s"}}, "dataset columns: x named more than once"),
        ({"vectors": {"a": 3}}, "dataset columns: a named more than once"),
        ({"time_features": ("hour",)}, r"dataset.time_features=\[hour\]: there is no column of t"),
        (
            {"times": {"t": "s"}, "label": "t_hour"},
            "the derived column t_hour has the name of a",
        ),
        ({"times": {"t": "s"}, "time_features": ()}, r"dataset.time_features=\[\]: name what"),
        (
            {"times": {"t": "s"}, "time_features": ("hour", "hour")},
            "dataset.time_features=.*: name what dataset.times gives, each once: hour",
        ),
    ],
)
def test_settings_that_fit_no_column_are_refused(changed, said):
    with pytest.raises(ConfigError, match=said):
        schema(**changed)


def test_two_derived_columns_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two settings make a derived column a_day_sin"):
        schema(
            dense=("a_day",),
            periodic={"a_day": 7},
            times={"a": "s"},
            time_features=("day",),
        )


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"times": {"v": "s"}}, r"\(time v\) has type fixed.*; allowed: timestamps, dates, or"),
        ({"vectors": {"t": 2}}, r"\(vector t\) has type timestamp.*; allowed: lists of numbers"),
        ({"vectors": {"w": 2}}, "no column for w"),
    ],
)
def test_columns_of_other_types_are_refused(logs, chosen, said):
    with pytest.raises(DataError, match=said):
        open_source(logs, schema(**chosen))


# ---- requests


def served(**chosen):
    return SimpleNamespace(
        scorer=SimpleNamespace(schema=schema(**chosen)), features=("a", "x", *VT)
    )


VT = ("v", "t")
ASKED = {"times": {"t": "s"}, "vectors": {"v": 2}, "time_features": ("hour",)}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"v": 3}, "feature v: holds a value that is no list of numbers"),
        ({"v": [[1, 2], 3]}, "feature v: holds a value that is no list of numbers: a list ins"),
        ({"v": ["p", 1]}, "feature v: holds a value that is no list of numbers"),
        ({"t": True}, "feature t: holds a value that is no integer"),
    ],
)
def test_requests_with_other_values_are_refused(changed, said):
    row = {"a": 1, "x": 2, "v": [1, 2.5], "t": 7}
    read_rows(memoryview(json.dumps({"rows": [row]}).encode()), {}, served(**ASKED), Limits())
    body = memoryview(json.dumps({"rows": [row, {**row, **changed}]}).encode())
    with pytest.raises(Refused, match=said):
        read_rows(body, {}, served(**ASKED), Limits())


def test_a_tensor_of_a_vector_has_its_columns():
    of = schema(**ASKED)

    def sent(name, datatype, shape, data_):
        given = {"name": name, "datatype": datatype, "shape": shape, "data": data_}
        return read_tensor(given, memoryview(b""), of.vectors)[0]

    usual = [sent("a", "FP32", [2], [1, 2]), sent("x", "INT64", [2, 1], [[1], [2]])]
    usual.append(sent("t", "INT64", [2], [MOMENT, None]))
    for values in ([[1, 2], [3, 4]], [1, 2, 3, 4]):
        table = table_of_tensors([*usual, sent("v", "FP32", [2, 2], values)], of, Limits())
        assert table["v"].to_pylist() == [[1, 2], [3, 4]]
        assert table["t"].to_pylist() == [MOMENT, None]
    with pytest.raises(Refused, match=r"input v: is FP32 of 1 columns, and must be FP32 of shape"):
        table_of_tensors([*usual, sent("v", "FP32", [2], [1, 2])], of, Limits())
    with pytest.raises(Refused, match=r"input a: shape \[1, 2\] must be \[N\] or"):
        sent("a", "FP32", [1, 2], [1, 2])
    flags = [sent("v", "FP32", [2, 2], [1, 2, 3, 4]), sent("v.present", "BOOL", [2], [True] * 2)]
    with pytest.raises(Refused, match=r"input v\.present: write zeros for a missing vector"):
        table_of_tensors([*usual, *flags], of, Limits())
