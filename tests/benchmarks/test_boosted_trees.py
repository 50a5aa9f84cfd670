"""LightGBM beside the models: features without the own label, the grid, errors. LightGBM itself is
a stand-in.
"""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recapp.benchmarks import boosted_trees, other_python
from recapp.cli.recipe_of_job import recipe_under
from recapp.dataset.target_statistics import PRIOR_ROWS, target_statistics
from recapp.errors import ConfigError, LaunchError


def slow_statistics(ids, labels):
    """The same, row by row."""
    mean = labels.mean()
    found = np.zeros((len(ids), 2 * ids.shape[1]))
    for row in range(len(ids)):
        for k in range(ids.shape[1]):
            before = [m for m in range(min(row, len(labels))) if ids[m, k] == ids[row, k]]
            found[row, 2 * k] = np.log1p(len(before))
            clicks = sum(labels[m] for m in before) + PRIOR_ROWS * mean
            found[row, 2 * k + 1] = clicks / (len(before) + PRIOR_ROWS)
    return found


def test_statistics_are_of_earlier_training_rows_alone():
    draw = np.random.default_rng(1)
    ids = draw.integers(0, 4, (40, 2))
    labels = draw.integers(0, 2, 30).astype(np.float32)
    np.testing.assert_allclose(target_statistics(ids, labels), slow_statistics(ids, labels), 1e-6)
    other = labels.copy()
    other[7] = 1 - other[7]
    changed = target_statistics(ids, other) - target_statistics(ids, labels)
    # but for the mean label, which is a constant, a row before and the row itself see nothing
    assert np.ptp(changed[:8, 1]) < 0.1 * abs(changed[8:, 1]).max()


def test_quality_is_that_of_recapps_metrics():
    scores = np.array([0.1, 0.5, 0.5, 0.9])
    found = other_python.quality(scores, np.array([0.0, 0, 1, 1]))
    assert found["val_auc"] == 0.875  # ties count half
    assert other_python.quality(scores, np.zeros(4))["val_auc"] is None
    found = other_python.quality(np.array([0.5, 1.0]), np.array([1.0, 1.0]))
    assert found["val_log_loss"] == pytest.approx(np.log(2) / 2, abs=1e-6)


@pytest.fixture
def log(tmp_path):
    draw = np.random.default_rng(2)
    columns = {f"I{k}": pa.array(draw.random(700)) for k in range(1, 14)}
    columns["I2"] = pa.array([None if k % 2 else 3.0 for k in range(700)])
    columns |= {f"C{k}": pa.array([f"{k % 7:x}" for k in range(700)]) for k in range(1, 27)}
    columns["label"] = pa.array((draw.random(700) < 0.3).astype(np.int8))
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    return recipe_under(
        "train",
        ["dataset=criteo_kaggle", f"dataset.path={tmp_path}", "dataset.missing_flags=true"],
    )


def test_rows_are_split_as_training_splits_them_and_missing_numbers_are_missing(log):
    dense, ids, labels, rows_train = boosted_trees.read_rows(log)
    assert dense.shape == (700, 13) and ids.shape == (700, 26) and rows_train == 600
    assert np.isnan(dense[1::2, 1]).all() and not np.isnan(dense[::2, 1]).any()
    assert set(labels) == {0.0, 1.0}


def test_labels_are_those_of_the_task(log):
    path = f"{log.dataset.path}/log.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("liked", pa.array(np.ones(700, dtype=np.int8))), path)
    other = recipe_under(
        "train",
        [
            "dataset=criteo_kaggle",
            f"dataset.path={path}",
            "dataset.label=[label,liked]",
            "task.label=liked",
        ],
    )
    assert (boosted_trees.read_rows(other)[2] == 1).all()


def test_trees_get_the_ids_and_the_rows_of_the_models_settings(log):
    more = ["dataset.min_frequency=2", "dataset.buckets=log", "dataset.val_share=.5"]
    other = recipe_under(
        "train",
        [
            "dataset=criteo_kaggle",
            f"dataset.path={log.dataset.path}",
            "dataset.missing_flags=true",
            "dataset.piecewise=4",
            *more,
        ],
    )
    dense, ids, _, rows_train = boosted_trees.read_rows(other)
    assert dense.shape == (700, 13) and np.isnan(dense[1::2, 1]).all()
    assert ids.shape == (700, 26 + 13) and rows_train == 350
    assert set(ids[:, 0]) == set(range(1, 8))  # places in a vocabulary, not the hexadecimal values


def test_the_grid_is_chosen_on_the_last_tenth_of_the_training_rows(log, tmp_path, monkeypatch):
    seen = []

    class Model:
        def __init__(self, parameters, rounds):
            leaves = parameters["num_leaves"]
            self.best_iteration = rounds // leaves
            self.best_score = {"valid_0": {"auc": 0.9 if leaves == 31 else 0.5}}

        def predict(self, x):
            return np.full(len(x), 0.25)

    def train(parameters, data, rounds, **more):
        seen.append((parameters["num_leaves"], parameters["seed"], len(data), rounds))
        return Model(parameters, rounds)

    stub = SimpleNamespace(
        __version__="4",
        train=train,
        Dataset=lambda x, y, reference=None: x,
        early_stopping=lambda *_, **__: None,
    )
    monkeypatch.setitem(sys.modules, "lightgbm", stub)
    from recapp.benchmarks import lightgbm_worker

    monkeypatch.setattr(lightgbm_worker, "lightgbm", stub)
    arrays = boosted_trees.arrays_of(*boosted_trees.read_rows(log))
    file = tmp_path / "rows.npz"
    np.savez(file, **arrays)
    found = lightgbm_worker.main(str(file), [1, 2])
    assert [row[2] for row in seen[:3]] == [540] * 3 and len(arrays["y_last"]) == 60
    rounds = lightgbm_worker.MOST_ROUNDS // 31
    assert seen[3:] == [(31, 1, 600, rounds), (31, 2, 600, rounds)]
    assert found["peak_bytes"] > 1e7
    assert found["leaves"] == 31 and found["rounds"] == rounds
    assert np.load(tmp_path / "rows_2.npy").shape == arrays["y_val"].shape == (100,)


def test_a_python_without_lightgbm_is_refused(tmp_path):
    boosted_trees.check_python(None)
    with pytest.raises(ConfigError, match=r"lightgbm_python=/none: there is no such program"):
        boosted_trees.check_python("/none")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module of that name >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"cannot import lightgbm \(no module of that name\)"):
        boosted_trees.check_python(str(python))


def test_the_versions_of_another_python_are_known():
    found = other_python.check_python("x", sys.executable, ("json",), ("numpy", "torch"), "fix")
    assert found == {"numpy": np.__version__, "torch": torch.__version__}


@pytest.mark.parametrize(("line", "said"), [("", "nothing was printed"), ("[1", "[1"), ("7", "7")])
def test_a_worker_without_a_result_is_one_line(tmp_path, line, said):
    worker = tmp_path / "worker.py"
    worker.write_text(f"print({line!r})\n")
    with pytest.raises(LaunchError, match=f"one: ended without a result.* is: {re.escape(said)}"):
        other_python.run_worker("one", sys.executable, worker, [])


def test_memory_is_that_of_the_worker_alone(tmp_path):
    large = np.ones(30_000_000)  # of this process
    worker = tmp_path / "worker.py"
    text = boosted_trees.WORKER.read_text()
    start = text.index("def peak_bytes")
    own = text[start : text.index("def main(")]
    worker.write_text(f"import json\n{own}\nprint(json.dumps({{'peak': peak_bytes()}}))\n")
    found = other_python.run_worker("one", sys.executable, worker, [])
    assert 1e6 < found["peak"] < large.nbytes / 4


def test_what_a_worker_prints_is_kept(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import sys\nprint('a note', file=sys.stderr)\nprint('{}')\n")
    other_python.run_worker("one", sys.executable, worker, [], tmp_path / "log.txt")
    assert (tmp_path / "log.txt").read_text() == "{}\na note\n"


def test_a_worker_that_fails_is_one_line(log, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho out of memory >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(LaunchError, match="lightgbm: failed: out of memory"):
        boosted_trees.measure(str(python), log, [1])
