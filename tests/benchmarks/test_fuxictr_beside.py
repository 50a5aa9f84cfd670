"""FuxiCTR beside the models: the rows and ids that it gets, and errors. A stand-in for FuxiCTR
scores every row alike.
"""

import sys
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recapp.benchmarks import fuxictr_beside
from recapp.cli.job import Job
from recapp.cli.recipe_of_job import recipe_under
from recapp.cli.result_runs import FuxiCTRRun, runs_of
from recapp.errors import ConfigError, LaunchError

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


def test_a_run_has_the_quality_of_the_scores(overrides, tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(fuxictr_beside, "WORKER", worker)
    facts = {"model": "fuxictr_deepfm"}
    versions = {"fuxictr": "2"}
    run = FuxiCTRRun("one", overrides, facts, python=sys.executable, versions=versions)
    found = run.train(tmp_path, Job(tmp_path, (), {}))
    assert found["val_auc"] == 0.5 and found["samples_per_cpu_second"] == 7
    assert (found["rows_train"], found["rows_val"], found["seed"]) == (600, 100, 3)
    assert found["version_fuxictr"] == "2" and found["model"] == "fuxictr_deepfm"
    assert run.result(tmp_path) == found
    assert "said by a library" in (tmp_path / "one/log.txt").read_text()


def test_models_with_a_form_of_fuxictr_run_beside_theirs():
    given = ["logs={avazu: /a}", "models=[deepfm,fm]", "seeds=1", "fuxictr_python=/python"]
    runs = runs_of(recipe_under("results", given), Job(".", (), {}), {"fuxictr": "2"})
    assert [(run.threads, run.versions) for run in runs[:2]] == [(1, None), (1, {"fuxictr": "2"})]
    assert [run.name for run in runs] == [
        "avazu/deepfm/seed_1",
        "avazu/fuxictr_deepfm/seed_1",
        "avazu/fm/seed_1",
    ]
    assert runs[0].overrides == runs[1].overrides
    assert not {*fuxictr_beside.MODELS} - {*runs_models()}


def runs_models():
    given = ["logs={criteo_kaggle: /a}", "seeds=1"]
    return [run.facts["model"] for run in runs_of(recipe_under("results", given), Job(".", (), {}))]


def test_what_fuxictr_cannot_have_is_one_line(overrides, tmp_path):
    fuxictr_beside.check_python(None)
    with pytest.raises(ConfigError, match="fuxictr_python=/none: there is no such program; name"):
        fuxictr_beside.check_python("/none")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module of that name >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"cannot import fuxictr\.pytorch\.models \(no module"):
        fuxictr_beside.check_python(str(python))
    recipe = recipe_under("train", overrides)
    with pytest.raises(LaunchError, match="fuxictr_deepfm: failed: no module of that name"):
        fuxictr_beside.measure(str(python), "deepfm", recipe)
    listed = recipe_under("train", ["tables=sample", "dataset=sample"])
    with pytest.raises(ConfigError, match="settings must not list tables"):
        fuxictr_beside.check_settings(listed, listed)


@pytest.mark.parametrize(
    ("model", "setting", "followed"),
    [
        ("deepfm", "ensemble=2", False),
        ("deepfm", "trainer.max_epochs=2", False),
        ("deepfm", "trainer.max_epochs=1", True),
        ("deepfm", "tables.pooling=mean", False),
        ("deepfm", "dataset.table_dims={item: 8}", False),
        ("deepfm", "model.dropout=.1", False),
        ("xdeepfm", "model.batch_norm=true", False),
        ("dcn", "tables.dim=8 & model.layers=[8] & model.batch_norm=false", True),
        ("dcnv2", "model.structure=stacked", False),
    ],
)
def test_settings_that_fuxictr_would_ignore_are_refused(model, setting, followed):
    usual = recipe_under("train", [f"model={model}"])
    data = ["dataset=custom", "dataset.path=/a", "dataset.sparse=[item]", f"model={model}"]
    recipe = recipe_under("train", [*data, *setting.split(" & ")])
    name = setting.partition("=")[0]
    refused = pytest.raises(ConfigError, match=f"{name}=.*: FuxiCTR's form .*: leave {name}=")
    with nullcontext() if followed else refused:
        fuxictr_beside.check_settings(recipe, usual)
