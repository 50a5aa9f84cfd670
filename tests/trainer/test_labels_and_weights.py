"""Jobs on one of several labels and with weights of rows, from the settings to the metrics."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 640


@pytest.fixture
def logs(tmp_path):
    """Ids that say what is bought."""
    ids = np.arange(ROWS) * 7919 % 40
    columns = {
        "clicked": 1 - ids % 2,
        "bought": ids % 2,
        "one": np.ones(ROWS),
        "nothing": np.arange(ROWS) >= ROWS * 6 // 7,  # of the rows that train
        "user": ids,
        "item": ids // 2,
    }
    pq.write_table(pa.table(columns), tmp_path / "logs.parquet")
    return tmp_path / "logs.parquet"


def validated(jobs, folder, logs, *settings):
    found = jobs.train(
        folder,
        "dataset=custom",
        f"dataset.path={logs}",
        "dataset.sparse=[user,item]",
        "dataset.table_rows=[64,64]",
        "dataset.batch_size=32",
        "dataset.val_batch_size=32",
        *settings,
        world=1,
    )
    return {name: value for name, value in found.items() if name.startswith("val_")}


@pytest.mark.full
def test_one_of_several_labels_trains_as_if_it_were_the_only_one(jobs, logs, tmp_path):
    alone = validated(jobs, tmp_path / "alone", logs, "dataset.label=bought")
    both = ["dataset.label=[clicked,bought]", "task.label=bought"]
    assert validated(jobs, tmp_path / "both", logs, *both, "dataset.weight=one") == alone


def test_rows_of_weight_0_teach_nothing(jobs, logs, tmp_path):
    nothing = ["dataset.label=bought", "dataset.weight={bought: nothing}"]
    untaught = validated(jobs, tmp_path / "a", logs, *nothing)
    assert validated(jobs, tmp_path / "b", logs, *nothing, "trainer.max_steps=1") == untaught
    taught = validated(jobs, tmp_path / "c", logs, "dataset.label=bought")
    assert taught["val_log_loss"] < untaught["val_log_loss"]
