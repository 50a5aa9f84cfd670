"""LightGBM beside the models: features without the own label, the grid. LightGBM itself is a
stand-in.
"""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recapp.cli.command import recipe_under
from recapp.errors import ConfigError, LaunchError
from speed import boosted_trees, other_python
from speed.target_statistics import PRIOR_ROWS, target_statistics


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
    from speed import lightgbm_worker

    monkeypatch.setattr(lightgbm_worker, "lightgbm", stub)
    arrays = boosted_trees.arrays_of(*boosted_trees.read_rows(log))
    file = tmp_path / "rows.npz"
    np.savez(file, **arrays)
    found = lightgbm_worker.main(str(file), 2)
    assert [row[2] for row in seen[:3]] == [540] * 3 and len(arrays["y_last"]) == 60
    rounds = lightgbm_worker.MOST_ROUNDS // 31
    assert seen[3:] == [(31, 2, 600, rounds)]
    assert found["peak_bytes"] > 1e7
    assert found["leaves"] == 31 and found["rounds"] == rounds
    assert np.load(tmp_path / "rows.npy").shape == arrays["y_val"].shape == (100,)


def test_the_versions_of_another_python_are_known_and_what_it_lacks_is_told():
    known = other_python.versions(sys.executable, ("json",), ("numpy", "torch"))
    assert known == {"numpy": np.__version__, "torch": torch.__version__}
    with pytest.raises(ConfigError, match=r"/none: cannot be run"):
        other_python.versions("/none", ("json",), ())
    with pytest.raises(ConfigError, match=r"cannot import nothing_here .*: pip install nothing"):
        other_python.versions(sys.executable, ("nothing_here",), ("nothing",))


@pytest.mark.parametrize(("line", "said"), [("", "nothing was printed"), ("7", "7")])
def test_a_worker_without_a_result_is_one_line(tmp_path, line, said):
    worker = tmp_path / "worker.py"
    worker.write_text(f"print({line!r})\n")
    with pytest.raises(LaunchError, match=f"one: ended without a result.* is: {re.escape(said)}"):
        other_python.run_worker("one", sys.executable, worker, [])


def test_a_worker_that_fails_is_one_line(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import sys\nsys.exit('out of memory')\n")
    with pytest.raises(LaunchError, match="lightgbm: failed: out of memory"):
        other_python.run_worker("lightgbm", sys.executable, worker, [])


def test_memory_is_that_of_the_worker_alone(tmp_path):
    large = np.ones(30_000_000)  # of this process
    worker = tmp_path / "worker.py"
    text = boosted_trees.WORKER.read_text()
    own = text[text.index("def peak_bytes") : text.index("def main(")]
    worker.write_text(f"import json\n{own}\nprint(json.dumps({{'peak': peak_bytes()}}))\n")
    measured = other_python.run_worker("one", sys.executable, worker, [])
    assert 1e6 < measured["peak"] < large.nbytes / 4
