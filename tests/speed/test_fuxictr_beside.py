"""FuxiCTR beside the models: the rows and ids that it gets. A stand-in for FuxiCTR scores every row
alike.
"""

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recapp.cli.command import recipe_under
from speed import fuxictr_beside, other_python

WORKER = """
import json, sys
import numpy as np
spec = json.loads(sys.argv[2])
with np.load(sys.argv[1]) as rows:
    count = len(rows["label"]) - spec["rows_train"]
np.save(sys.argv[1].replace(".npz", ".npy"), np.full(count, .25))
print("said by a library")
print(json.dumps({"samples_per_cpu_second": 7.0}))
"""


@pytest.fixture
def overrides(tmp_path):
    draw = np.random.default_rng(3)
    item = draw.integers(0, 9, 700)
    item[650] = 1000  # validates: no training row has it
    columns = {
        "age": pa.array(draw.random(700)),
        "item": pa.array(item),
        "history": pa.array([[int(k) for k in item[max(0, r - r % 4) : r]] for r in range(700)]),
        "label": pa.array((item % 2).astype(np.int8)),
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    return (
        "dataset=custom",
        f"dataset.path={tmp_path}",
        "dataset.dense=[age]",
        "dataset.sparse=[item,history]",
        "dataset.batch_size=64",
        "tables.shared={history: item}",
        "model=deepfm",
        "seed=3",
    )


def arrays_of(overrides):
    recipe = recipe_under("train", overrides)
    rows = fuxictr_beside.rows_of(recipe).fitted()
    return fuxictr_beside.rows_in_order(recipe, rows)


def test_rows_have_the_order_and_the_ids_of_training(overrides):
    arrays, features, rows_train = arrays_of(overrides)
    assert rows_train == 576 and len(arrays["label"]) == 576 + 100  # nine whole batches of 600 rows
    assert features == {
        "item": {"rows": 10, "table": "item", "list": False},
        "history": {"rows": 10, "table": "item", "list": True},
    }
    item = arrays["ids"][:, 0]
    assert (item[:576] > 0).all() and set(item[:576]) == set(range(1, 10))
    assert item[576 + 50] == 0  # of no training row
    known = item > 0
    assert ((item - 1) % 2 == arrays["label"])[known].all()  # ids stay with their labels
    lists = arrays["list_history"]
    assert lists.shape == (676, 3) and lists.max() == 9 and (lists[:, 0] == 0).any()
    other, *_ = arrays_of([*overrides, "seed=4"])
    assert (other["ids"][576:] == arrays["ids"][576:]).all()
    assert (other["ids"][:576] != arrays["ids"][:576]).any()


def test_labels_are_those_of_the_task(overrides, tmp_path):
    table = pq.read_table(tmp_path / "log.parquet")
    liked = pa.array(np.ones(700, dtype=np.int8))
    pq.write_table(table.append_column("liked", liked), tmp_path / "log.parquet")
    two = ["dataset.label=[label,liked]", "task.label=liked"]
    assert (arrays_of([*overrides, *two])[0]["label"] == 1).all()


def test_rare_ids_are_unknown(overrides):
    _, features, _ = arrays_of([*overrides, "dataset.min_frequency=1000"])
    assert features["item"]["rows"] == 1


def test_a_run_has_the_quality_of_the_scores(overrides, tmp_path, monkeypatch, capfd):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(fuxictr_beside, "WORKER", worker)
    monkeypatch.setattr(other_python, "versions", lambda *_: {"fuxictr": "2"})
    monkeypatch.chdir(tmp_path)
    fuxictr_beside.main([sys.executable, *overrides])
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["val_auc"] == 0.5 and metrics["samples_per_cpu_second"] == 7
    assert (metrics["rows_train"], metrics["rows_val"], metrics["seed"]) == (600, 100, 3)
    assert metrics["version_fuxictr"] == "2" and metrics["overrides"] == list(overrides)
    assert "said by a library" in capfd.readouterr().out
