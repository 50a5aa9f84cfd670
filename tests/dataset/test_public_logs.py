"""Public logs train as they come, each by one command."""

import pytest

MODEL = ("tables.dim=4", "model.bottom_layers=[8,4]", "model.top_layers=[8,1]")
AVAZU = "avazu_10k/train.part-10000.csv"
BANDIT = "open_bandit_20k/{0}/all.csv.gz"
LOGS = {  # the files, more settings, the numbers of rows that train and validate
    "criteo_kaggle": (["criteo_kaggle_tsv_8k/train.csv"], (), (6171, 1029)),
    "criteo_1tb": (["criteo_1tb_day0_5k/day_0.rows00001-05000.tsv"], (), (4285, 715)),
    "avazu_csv": ([AVAZU], (), (8570, 1429)),
    "movielens": (["movielens_1m/ml-1m.test.rating"], (), (5177, 863)),
    "open_bandit_csv": ([BANDIT.format("bts"), BANDIT.format("random")], (), (17142, 2858)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LOGS)
def test_public_logs_train_by_one_command(jobs, real_data, tmp_path, name):
    files, more, rows = LOGS[name]
    option = "criteo_kaggle" if name == "criteo_1tb" else name
    path = ",".join(str(real_data / file) for file in files)
    found = jobs.train(
        tmp_path,
        f"dataset={option}",
        f"dataset.path=[{path}]",
        "dataset.batch_size=512",
        "trainer.max_steps=4",
        *MODEL,
        *more,
    )
    splits = found["rows_read"]["splits"]
    assert (splits["train"]["rows"], splits["val"]["rows"]) == rows
    assert 0.2 < found["val_auc"] < 0.8
