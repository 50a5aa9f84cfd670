"""How runs end: what their directory and the last line say. Jobs on a pool of ranks; whole commands with signals in the full tier."""

import json

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from jobs import Failed, small

from recapp.checkpoints.directory import find_checkpoints


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("ends")


def test_metrics_that_one_class_leaves_open_are_null_and_the_run_is_not_called_ok(jobs, place):
    jobs.train(place / "first", *small(place / "logs"), "trainer.max_steps=1")
    rows = pq.read_table(sorted((place / "logs").glob("*.parquet"))[-1])
    pq.write_table(rows.filter(pc.field("label") == 0), place / "no_clicks.parquet")
    found = jobs.train(place / "one_class", *small(place / "logs"), f"dataset.val_path={place}/no_clicks.parquet", "trainer.max_steps=2")
    text = (place / "one_class/metrics.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == found
    assert found["status"] == "undefined" and found["val_auc"] is None and 0 < found["val_log_loss"] < 1
    assert set(found["undefined"]) == {"val_auc", "val_normalized_entropy", "val_calibration"}
    (said,) = [line for line in (place / "one_class/rank0.err").read_text().splitlines() if "cannot be computed" in line]
    assert "the validation rows are of one class only" in said and "dataset.val_share" in said
    assert "validation AUC                        undefined" in (place / "one_class/rank0.out").read_text()


def test_a_loss_that_is_not_finite_fails_on_all_ranks_and_leaves_neither_metrics_nor_a_checkpoint(jobs, place):
    with pytest.raises(Failed) as failed:
        jobs.train(place / "nan", *small(place / "logs"), "optimizer.sparse.lr=1e30", "trainer.log_every_n_steps=1")
    said = set(failed.value.errors.values())
    assert len(said) == 1 and len(failed.value.errors) == 2
    ((kind, line),) = said
    assert kind == "TrainingError" and "is not a finite number on rank" in line and "optimizer.sparse.lr (now 1e+30)" in line
    assert not (place / "nan/metrics.json").exists() and find_checkpoints(place / "nan") == []
