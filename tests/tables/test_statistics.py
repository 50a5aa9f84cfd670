"""Id statistics: measured as they are, assumed as Zipf, kept beside the data."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from recapp.benchmarks.workloads import Workload
from recapp.errors import ConfigError
from recapp.settings import user_cache
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.missing_ids import MISSING
from recapp.tables.config import EmbeddingBagConfig, PoolingType, TableLookup
from recapp.tables.statistics import (
    TableStatistics,
    default_statistics,
    measured_statistics,
    read_cached,
    write_cached,
)


def table(name="t", rows=100, features=("f",), **more):
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=4, feature_names=list(features), **more
    )


def batch(**bags):
    """Return the features of a batch, given a list of ids for each sample."""
    ids = [i for samples in bags.values() for bag in samples for i in bag]
    return KeyedJaggedTensor(
        list(bags),
        torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor([len(bag) for samples in bags.values() for bag in samples]),
    )


def test_ids_and_bags_of_a_sample_are_counted_over_all_features_of_a_table():
    found = measured_statistics(
        [table(features=("a", "b")), table("u", features=("a",))],
        [batch(a=[[1], [2, 3]], b=[[], [4]]), batch(a=[[1], []], b=[[], []])],
    )
    assert (found["t"].ids_per_sample, found["t"].bags_per_sample) == (5 / 4, 4 / 4)
    assert (found["u"].ids_per_sample, found["u"].bags_per_sample) == (4 / 4, 3 / 4)


def test_the_curve_counts_distinct_rows_of_consecutive_samples():
    found = measured_statistics([table()], [batch(f=[[1], [1], [2], [2], [3], [3], [4], [4]])])["t"]
    # pairs and fours that begin at even places
    assert dict(found.distinct) == {1: 1, 2: 1.0, 4: 2, 8: 4}
    assert found.distinct_rows(8) == pytest.approx(4) and found.distinct_rows(0.5) == 0.5


def test_samples_are_consecutive_although_features_lie_one_behind_the_other():
    rows = batch(a=[[1], [2], [3], [4]], b=[[1], [2], [3], [4]])
    assert dict(measured_statistics([table(features=("a", "b"))], [rows])["t"].distinct)[2] == 1


def test_raw_ids_count_as_the_rows_that_the_tables_rule_makes_of_them():
    found = measured_statistics(
        [table(rows=11, id_rule="hash")], [batch(f=[[0], [10], [20], [MISSING]])]
    )["t"]
    assert found.distinct_rows(4) == pytest.approx(2)  # 1 + id mod 10, and row 0


def test_beyond_the_sample_the_last_slope_goes_on_but_never_beyond_rows_or_ids():
    known = TableStatistics(1000, 1, 1, ((1, 1), (10, 10), (100, 40)))
    assert known.distinct_rows(1000) == pytest.approx(40 * 4) and known.distinct_rows(10**9) == 1000
    # halfway between 10 and 40 in the logarithm
    assert known.distinct_rows(31.622776) == pytest.approx(20)
    assert TableStatistics(1000, 1, 1, ((1, 1),)).distinct_rows(50) == pytest.approx(50)


def test_the_load_follows_the_rows_that_are_asked_for():
    asked = [batch(f=[[i] for i in [*range(192), *range(1900, 1964)]])]
    found = measured_statistics([table(rows=2000)], asked)["t"]
    assert len(found.load) == 8 and sum(found.load) == pytest.approx(1)  # 32 requests a range
    assert (
        found.share(range(250)) == pytest.approx(192 / 256) and found.share(range(250, 1750)) == 0
    )
    assert found.share(range(125)) == pytest.approx(192 / 512) and found.share(
        range(2000)
    ) == pytest.approx(1)
    assert found.share(range(7, 7)) == 0


def test_mixed_rows_are_asked_for_evenly_wherever_they_crowd():
    known = TableStatistics(100, 1, 1, ((1, 1),), load=(0.75, 0.25))
    halves = np.array([[0, 50], [50, 100], [0, 10]])
    assert known.shares(halves).tolist() == pytest.approx([0.75, 0.25, 0.15])
    assert known.shares(halves, "mixed").tolist() == pytest.approx([0.5, 0.5, 0.1])


def test_hot_rows_are_the_most_frequent_ones():
    found = measured_statistics([table()], [batch(f=[[7]] * 6 + [[1], [2], [3], [4]])])["t"]
    assert found.hot == ((1, pytest.approx(0.6)), (4, pytest.approx(0.9)), (5, 1))


@pytest.mark.parametrize("rows", [1, 3, 70, 5000, 204515])
def test_the_assumed_curve_is_that_of_zipf_draws(rows):
    workload = Workload("w", 4096, (rows,), (4,), (1,))
    found = measured_statistics(workload.tables(), workload.features_of(workload.draw(0, 4)))["C1"]
    assumed = default_statistics(workload.tables()[0])
    for n in (1, 16, 256, 4096, 16384):
        assert assumed.distinct_rows(n) == pytest.approx(found.distinct_rows(n), rel=0.08)
    assert assumed.load == (1.0,) and assumed.distinct_rows(1e12) == pytest.approx(rows, rel=0.01)


def test_an_assumed_table_has_as_many_bags_as_features():
    assumed = default_statistics(table(features=("a", "b")), 3.0)
    assert (assumed.ids_per_sample, assumed.bags_per_sample) == (6, 2)
    assert default_statistics(table(features=("a", "b")), 0.5).bags_per_sample == 1


def test_a_table_without_ids_costs_nothing():
    found = measured_statistics([table()], [batch(f=[[], []])])["t"]
    assert (found.ids_per_sample, found.bags_per_sample, found.distinct_rows(0)) == (0, 0, 0)


def test_statistics_survive_json():
    found = measured_statistics([table(rows=2000)], [batch(f=[[i % 700] for i in range(1000)])])[
        "t"
    ]
    assert TableStatistics.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loads": [1.0]}, "unknown entry loads; did you mean load"),
        ({"rows": None}, "rows=None: must be a number"),
        ({"load": [0.5]}, "load sums to 0.5"),
        ({"load": [-1.0, 2.0]}, "must not be negative"),
        ({"distinct": []}, "distinct is empty"),
        ({"distinct": [[2, 1], [1, 2]]}, "must be above 0 and rise"),
        ({"ids_per_sample": -1}, "must not be negative"),
        ({"distinct": 3}, "distinct=3: must be pairs"),
    ],
)
def test_wrong_entries_are_refused_in_one_line(change, message):
    entries = default_statistics(table()).to_dict() | change
    with pytest.raises(ConfigError, match=r"^plan\.yaml: ") as error:
        TableStatistics.from_dict(entries, "plan.yaml")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_entry_is_named():
    with pytest.raises(ConfigError, match="distinct is missing"):
        TableStatistics.from_dict({"rows": 3, "ids_per_sample": 1, "bags_per_sample": 1})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache of a user who has none yet."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path, cache):
    """Write a data set of two files."""
    (tmp_path / "data").mkdir()
    files = [tmp_path / "data" / f"{i}.parquet" for i in range(2)]
    for file in files:
        file.write_bytes(b"rows")
    return files


def test_what_was_measured_is_found_again_in_the_users_cache(data, cache):
    known = {"t": default_statistics(table())}
    assert read_cached(data, [table()]) is None
    kept = write_cached(data, [table()], known, 64)
    assert kept.parent == cache / "recapp" / "statistics"
    assert read_cached(data, [table()], 64) == known
    assert sorted(data[0].parent.iterdir()) == data
    assert [path for path in cache.rglob("*") if path.is_file()] == [kept]


@pytest.mark.parametrize(
    ("platform", "variable", "below"),
    [
        ("linux", "HOME", ".cache"),
        ("darwin", "HOME", "Library/Caches"),
        ("win32", "LOCALAPPDATA", ""),
    ],
)
def test_the_cache_is_that_of_the_system(tmp_path, monkeypatch, data, platform, variable, below):
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv(variable, str(tmp_path / "me"))
    kept = write_cached(data, [table()], {"t": default_statistics(table())}, 64)
    assert kept.parent == tmp_path / "me" / below / "recapp" / "statistics"


def test_each_measurement_has_a_file_and_old_ones_are_forgotten(monkeypatch, data):
    monkeypatch.setattr(user_cache, "KEPT", 3)
    first = write_cached(data, [table()], {"t": default_statistics(table())}, 64)
    os.utime(first, (1, 1))
    for rows in range(2, 5):
        of_rows = table(rows=rows)
        assert write_cached(data, [of_rows], {"t": default_statistics(of_rows)}, 64) != first
    assert len(list(first.parent.iterdir())) == 3
    assert read_cached(data, [table()]) is None and read_cached(data, [of_rows]) is not None


def test_what_other_lookups_measured_is_not_read(data):
    twice = [TableLookup(table(), "f", name, PoolingType.SUM) for name in ("f", "again")]
    known = {"t": default_statistics(table(), lookups=2)}
    write_cached(data, [table()], known, 64, twice)
    assert read_cached(data, [table()]) is None
    assert read_cached(data, [table()], lookups=twice) == known
    rules = {"derived": [{"name": "b", "kind": "buckets", "reads": ["a"], "setting": 8}]}
    assert read_cached(data, [table()], lookups=twice, rules=rules) is None
    write_cached(data, [table()], known, 64, twice, rules)
    assert read_cached(data, [table()], lookups=twice, rules=rules) == known
    assert read_cached(data, [table()], lookups=twice, rules=rules | {"padding": 0}) is None


@pytest.mark.parametrize(
    "change", ["table", "rule", "size", "time", "files", "samples", "gone", "broken"]
)
def test_nothing_stale_is_read(data, cache, change):
    write_cached(data, [table()], {"t": default_statistics(table())}, 64)
    files = list(data)
    tables = [table()]
    samples = 64
    if change == "table":
        tables = [table(rows=101)]
    elif change == "rule":
        tables = [table(id_rule="hash")]
    elif change == "size":
        data[1].write_bytes(b"more rows")
    elif change == "time":
        os.utime(data[1], (time.time() + 5, time.time() + 5))
    elif change == "files":
        files = files[:1]
    elif change == "samples":
        samples = 65
    elif change == "gone":
        data[1].unlink()
    else:
        (kept,) = cache.rglob("*.json")
        kept.write_text("[]")
    assert read_cached(files, tables, samples) is None


@pytest.mark.parametrize("cache_is", ["a file", "read only", "nowhere"])
def test_a_cache_that_cannot_be_written_is_no_error(data, cache, monkeypatch, cache_is):
    if cache_is == "a file":
        cache.write_text("")
    elif cache_is == "nowhere":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", refuse(RuntimeError))
    else:
        monkeypatch.setattr(Path, "write_text", refuse(PermissionError))
    assert write_cached(data, [table()], {"t": default_statistics(table())}, 1) is None
    assert read_cached(data, [table()]) is None


def refuse(kind):
    def raises(*_, **__):
        raise kind

    return raises
