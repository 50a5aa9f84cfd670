"""Generated logs: the same bytes for the same seed, Criteo's shape, and a best score that is
known.
"""

import json
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataset_files import lengths_of, values_of

from recapp.dataset.counter_hash import normal, uniform
from recapp.dataset.data_settings import Generate
from recapp.dataset.schema import Schema, criteo_schema
from recapp.dataset.source import open_source, split
from recapp.dataset.stream import BatchStream
from recapp.dataset.synthetic import CRITEO_SIZES, write_clicks
from recapp.errors import ConfigError, DataError
from recapp.sparse.missing_ids import MISSING

ROWS = 30_000


def write_criteo(path, *, sizes=CRITEO_SIZES, progress=None, **drawn):
    return write_clicks(path, Generate(**drawn), sizes, progress)


def read_truth(path):
    return json.loads((path / "_truth.json").read_text())


def write_sample(path, **drawn):
    return write_clicks(path, Generate(kind="sample", **drawn))


@pytest.fixture(scope="module")
def criteo(tmp_path_factory):
    return write_criteo(tmp_path_factory.mktemp("generated") / "criteo", rows=ROWS)


@pytest.fixture(scope="module")
def table(criteo):
    return pq.read_table(sorted(criteo.glob("part-*.parquet")))


def bytes_of(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def test_the_same_seed_rows_and_settings_give_the_same_bytes(tmp_path):
    first, again = (write_criteo(tmp_path / name, rows=900) for name in "ab")
    assert bytes_of(first) == bytes_of(again)
    first, again = (write_sample(tmp_path / name, rows=300) for name in "cd")
    assert bytes_of(first) == bytes_of(again)


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"separability": 2.0}, {"positives": 0.03}, {"sizes": (9,) * 26}]
)
def test_another_seed_or_setting_gives_other_data(tmp_path, change):
    first = write_criteo(tmp_path / "a", rows=900)
    other = write_criteo(tmp_path / "b", rows=900, **change)
    assert not pq.read_table(first / "part-00000.parquet").equals(
        pq.read_table(other / "part-00000.parquet")
    )


def test_there_are_several_files_of_several_row_groups(criteo):
    files = [pq.ParquetFile(file).metadata for file in criteo.glob("*.parquet")]
    assert len(files) == 8
    assert min(file.num_row_groups for file in files) >= 4
    assert sum(file.num_rows for file in files) == ROWS


def test_columns_are_those_of_criteo(table):
    names = [
        "label",
        *(f"I{number}" for number in range(1, 14)),
        *(f"C{number}" for number in range(1, 27)),
    ]
    assert table.column_names == names
    assert {table.schema.field(name).type for name in names[14:]} == {pa.int64()}


def test_ids_lie_in_their_tables_and_none_is_that_of_missing(table):
    for number, rows in enumerate(CRITEO_SIZES, start=1):
        ids = table[f"C{number}"].drop_null().to_numpy()
        assert ids.min() >= 1
        assert ids.max() <= rows - 1
        if rows < 100:
            assert set(ids) == set(range(1, rows))


def test_ids_are_skewed_as_in_real_logs(table):
    ids = table["C1"].drop_null().to_numpy()
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    assert 0.25 < counts[0] / len(ids) < 0.4
    assert counts[:100].sum() / len(ids) > 0.45
    assert (counts == 1).sum() > 2_000
    hottest = np.unique(ids, return_counts=True)[0][
        np.argsort(-np.unique(ids, return_counts=True)[1])
    ][:20]
    assert np.ptp(hottest) > 100_000, "popular ids must be scattered over the table"


def test_columns_go_missing_together(table):
    gaps = {name: table[name].is_null().to_numpy() for name in table.column_names}
    assert gaps["C14"].mean() == pytest.approx(0.467, abs=0.01)
    for other in ("C16", "C17", "C23"):
        assert (gaps["C14"] == gaps[other]).all()
    assert (gaps["I5"] == gaps["I11"]).all()
    assert gaps["I1"].mean() == pytest.approx(0.238, abs=0.01)
    assert 0.1 < (gaps["C14"] & gaps["I1"]).mean() < 0.125, "blocks are independent of each other"
    assert not gaps["label"].any()
    assert not gaps["C9"].any()


def test_numbers_are_integers_with_negatives_and_a_long_tail(table):
    negative = [
        number for number in range(1, 14) if (table[f"I{number}"].drop_null().to_numpy() < 0).any()
    ]
    assert negative == [8]
    assert table["I5"].drop_null().to_numpy().max() > 30_000


def test_the_popular_ids_drift(table):
    ids = table["C3"].to_numpy()
    first, last = (set(np.unique(part)) for part in (ids[: ROWS // 10], ids[-ROWS // 10 :]))
    nearby = set(np.unique(ids[ROWS // 10 : ROWS // 5]))
    assert len(first & last) < len(first & nearby)


@pytest.mark.parametrize("positives", [0.257, 0.03])
def test_the_wanted_share_is_clicked(tmp_path, positives):
    truth = read_truth(write_criteo(tmp_path / "data", rows=20_000, positives=positives))
    assert truth["positives"] == pytest.approx(positives, abs=0.012)


def test_the_truth_is_that_of_the_rows_written(criteo, table):
    truth = read_truth(criteo)
    labels = table["label"].to_numpy()
    validated = split(open_source(str(criteo), criteo_schema()), Fraction(1, 7))[1].rows
    assert (truth["rows"], truth["validation"]["rows"]) == (ROWS, validated)
    assert truth["positives"] == pytest.approx(labels.mean())
    assert truth["validation"]["positives"] == pytest.approx(labels[-validated:].mean())
    assert 0.76 < truth["auc"] < 0.86
    assert 0.6 < truth["normalized_entropy"] < 0.9


@pytest.mark.parametrize("separability", [0.0, 4.0])
def test_separability_decides_how_easy_the_clicks_are(tmp_path, separability):
    auc = read_truth(
        write_criteo(tmp_path / "data", rows=8_000, sizes=(30,) * 26, separability=separability)
    )["auc"]
    assert 0.48 < auc < 0.52 if separability == 0 else auc > 0.96


def test_the_known_answer_is_reached_by_an_additive_model_on_an_easy_set(tmp_path):
    path = write_criteo(tmp_path / "easy", rows=20_000, sizes=(12,) * 26, separability=3.0)
    schema = criteo_schema()
    train, val = split(open_source(str(path), schema), Fraction(1, 7))
    features = [_one_hot(source, schema) for source in (train, val)]
    weights = torch.zeros(features[0][0].shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=60, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(
            features[0][0] @ weights, features[0][1]
        )
        value = value + 1e-5 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    logits = (features[1][0] @ weights).detach()
    labels = features[1][1]
    auc = (logits[labels == 1][:, None] > logits[labels == 0][None, :]).float().mean().item()
    best = read_truth(path)["validation"]["auc"]
    assert best > 0.9
    assert best - 0.02 < auc < best + 0.005


def _one_hot(source, schema):
    batch = next(iter(BatchStream(source, schema, batch_size=source.rows, lanes=1, training=False)))
    ids = batch.sparse.values().clamp(min=0).view(26, -1).T
    hot = torch.nn.functional.one_hot(ids, 12).flatten(1).float()
    return torch.cat([hot, batch.dense_BI, torch.ones(len(hot), 1)], dim=1), batch.labels_B


def test_sample_data_has_ten_ids_a_row_of_each_table(tmp_path):
    path = write_sample(tmp_path / "sample", rows=2_000)
    dense = tuple(f"I{i}" for i in range(1, 14))
    schema = Schema("label", dense, ("large_table", "wide_table", "small_table"))
    batch = next(
        iter(BatchStream(open_source(str(path), schema), schema, batch_size=2_000, lanes=4))
    )
    for table, rows in (
        ("large_table", 1_000_000),
        ("wide_table", 100_000),
        ("small_table", 10_000),
    ):
        ids = values_of(batch, table)
        assert lengths_of(batch, table) == [10] * 2_000
        assert min(ids) >= 0
        assert rows * 0.9 < max(ids) < rows
    assert batch.dense_BI.shape == (2_000, 13)
    assert read_truth(path)["auc"] > 0.75


def test_progress_is_reported_up_to_the_last_row(tmp_path):
    reported = []
    write_criteo(
        tmp_path / "data", rows=500, progress=lambda done, total: reported.append((done, total))
    )
    assert reported == sorted(set(reported))
    assert reported[-1] == (500, 500)
    assert len(reported) >= 8


def test_a_complete_set_is_not_written_again(tmp_path):
    path = write_criteo(tmp_path / "data", rows=200)
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    reported = []
    assert write_criteo(path, rows=200, progress=lambda *numbers: reported.append(numbers)) == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert reported == []


def test_data_of_other_settings_is_never_overwritten(tmp_path):
    path = write_criteo(tmp_path / "data", rows=200)
    before = bytes_of(path)
    with pytest.raises(
        DataError,
        match=(
            r"data: holds generated data of other settings \(rows=200 "
            r"instead of 300\); remove it"
        ),
    ):
        write_criteo(path, rows=300)
    with pytest.raises(DataError, match="kind=criteo instead of sample"):
        write_sample(path, rows=200)
    with pytest.raises(DataError, match="other tables"):
        write_criteo(path, rows=200, sizes=(5,) * 26)
    assert bytes_of(path) == before


def test_a_directory_of_something_else_is_never_overwritten(tmp_path):
    (tmp_path / "part-00000.parquet").write_text("mine")
    with pytest.raises(DataError, match="holds something that was not generated here"):
        write_criteo(tmp_path, rows=200)
    assert bytes_of(tmp_path) == {"part-00000.parquet": b"mine"}
    (tmp_path / "_generated.json").write_text("{")
    with pytest.raises(DataError, match=r"_generated\.json: is not readable"):
        write_criteo(tmp_path, rows=200)


def test_an_interrupted_generation_leaves_nothing_behind(tmp_path):
    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_criteo(tmp_path / "data", rows=200, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    assert read_truth(write_criteo(tmp_path / "data", rows=200))["rows"] == 200


def test_two_processes_may_make_the_same_set(tmp_path):
    def meanwhile(done, total):
        if done == total and not (tmp_path / "data").exists():
            write_criteo(tmp_path / "data", rows=200)

    write_criteo(tmp_path / "data", rows=200, progress=meanwhile)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    with pytest.raises(DataError, match="other settings"):
        write_criteo(tmp_path / "data", rows=300)


def test_an_empty_directory_is_filled(tmp_path):
    assert read_truth(write_criteo(tmp_path, rows=50))["rows"] == 50


def test_the_manifest_says_what_was_made(criteo):
    manifest = json.loads((criteo / "_generated.json").read_text())
    assert (manifest["kind"], manifest["rows"], manifest["seed"]) == ("criteo", ROWS, 1)
    assert tuple(manifest["tables"].values()) == CRITEO_SIZES


def test_impossible_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset.table_rows=\[5, 1\]"):
        write_criteo(tmp_path / "data", rows=9, sizes=(5, 1))


def test_tables_of_any_number_and_the_smallest_size_can_be_made(tmp_path):
    path = write_criteo(tmp_path / "data", rows=50, sizes=(2, 3, 5000))
    schema = Schema("label", ("I1",), ("C1", "C2", "C3"))
    batch = next(iter(BatchStream(open_source(str(path), schema), schema, batch_size=50, lanes=1)))
    assert set(values_of(batch, "C1")) - {MISSING} == {1}
    assert set(values_of(batch, "C2")) == {1, 2}


def test_random_numbers_are_uniform_normal_and_the_same_everywhere():
    counters = np.arange(50_000)
    assert uniform((3, 1), counters).mean() == pytest.approx(0.5, abs=0.01)
    assert np.quantile(uniform((3, 1), counters), [0.1, 0.9]) == pytest.approx([0.1, 0.9], abs=0.01)
    numbers = normal((3, 2), counters)
    assert (numbers.mean(), numbers.std()) == pytest.approx((0, 1), abs=0.02)
    assert abs(np.corrcoef(uniform((3, 1), counters), uniform((3, 2), counters))[0, 1]) < 0.02
    assert uniform((1, 2, 3), np.arange(3)).tolist() == [
        0.1300857085561754,
        0.4373184320319292,
        0.9549255112847241,
    ]
