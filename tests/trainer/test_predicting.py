"""Lightning's own `Trainer.predict` with recapp's parts: scores of rows, returned or written."""

import os
from functools import partial
from pathlib import Path

import lightning
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import LightningModule
from trainer.runs import compose, fit, make_logs

import recapp
from recapp import ScoreWriter, ScoringSettings
from recapp.errors import ConfigError
from recapp.run import training
from recapp.run.model import build_model
from recapp.run.training import build_strategy

SCORING = {"columns": ["C1"], "rows_per_batch": 256}
ROWS = 2100


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A trained checkpoint in `run`, and its logs without labels in `input`."""
    base = tmp_path_factory.mktemp("predicting")
    logs = make_logs(base / "logs")
    fit(compose(logs, "trainer.max_steps=4"), base / "run")
    (base / "input").mkdir()
    for file in sorted(logs.glob("*.parquet")):
        pq.write_table(pq.read_table(file).drop(["label"]), base / "input" / file.name)
    return base


def last(base):
    return base / "run/checkpoints/last.ckpt"


def of_load_model(base):
    model = recapp.load_model(last(base))
    rows = pq.read_table(base / "input")
    return torch.cat([model.predict(rows.slice(n, 256)) for n in range(0, ROWS, 256)])


def predict(base, *callbacks, module=None, ckpt_path="last", scoring=SCORING, **options):
    settings = compose(base / "nowhere")
    wanted = scoring and ScoringSettings(input=str(base / "input"), **scoring)
    trainer = lightning.Trainer(
        strategy=build_strategy(settings, training=False),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    module = module or training.build_module(settings, partial(build_model, settings))
    path = last(base) if ckpt_path == "last" else ckpt_path
    data = training.build_data(settings, scoring=wanted)
    return trainer.predict(module, data, ckpt_path=path, **options)


def test_predictions_are_returned_in_the_order_of_the_input(base, reference_kernels):
    found = predict(base)
    assert torch.equal(torch.cat(found), of_load_model(base))


def test_predictions_are_written_with_the_columns_that_are_kept(base, tmp_path, reference_kernels):
    writer = ScoreWriter(tmp_path / "scores.parquet")
    assert predict(base, writer, return_predictions=False) is None
    table = pq.read_table(tmp_path / "scores.parquet")
    assert table["C1"].equals(pq.read_table(base / "input")["C1"])
    assert torch.equal(torch.tensor(table["score"].to_numpy()), of_load_model(base))
    assert writer.joined["rows"] == ROWS


class Interrupted(LightningModule):
    """Another's module, which scores rows by their numbers and is ended after some batches."""

    def __init__(self, batches):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches = batches
        self.scored = 0

    def predict_step(self, batch, batch_idx):
        if batch_idx == self.batches:
            raise RuntimeError("ended")
        self.scored += batch.rows
        return batch.first_row / 4096 + torch.arange(batch.rows) / 4096


def test_a_module_of_anothers_that_was_ended_leaves_nothing_and_starts_again(base, tmp_path):
    output = tmp_path / "scores.parquet"
    with pytest.raises(RuntimeError, match="ended"):
        predict(base, ScoreWriter(output), module=Interrupted(5), ckpt_path=None)
    assert not list(tmp_path.iterdir())
    still_open = map(os.path.realpath, Path("/proc/self/fd").iterdir())
    assert not [name for name in still_open if name.startswith(str(tmp_path))]
    module = Interrupted(99)
    predict(base, ScoreWriter(output), module=module, ckpt_path=None)
    assert module.scored == ROWS
    assert pq.read_table(output)["score"].to_pylist() == [n / 4096 for n in range(ROWS)]
    assert list(tmp_path.iterdir()) == [output]


def test_what_is_no_score_per_row_is_refused(base, tmp_path):
    module = Interrupted(99)
    module.predict_step = lambda batch, batch_idx: torch.zeros(batch.rows, 1)
    with pytest.raises(ConfigError, match="must return a score for each of the 256 rows"):
        predict(base, ScoreWriter(tmp_path / "s.parquet"), module=module, ckpt_path=None)


def test_data_that_do_not_know_what_to_score_say_what_is_missing(base):
    with pytest.raises(ConfigError, match=r"scoring=ScoringSettings\(input=\.\.\.\)"):
        predict(base, scoring=None)


def test_rows_of_another_data_module_cannot_be_written(base, tmp_path):
    class Other(lightning.LightningDataModule):
        def predict_dataloader(self):
            return torch.utils.data.DataLoader(torch.zeros(3, 1))

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ScoreWriter(tmp_path / "s.parquet")],
    )
    with pytest.raises(ConfigError, match="must come from a ClickData with scoring"):
        trainer.predict(Interrupted(9), Other())


def test_generated_training_data_are_not_written_for_a_prediction(base, tmp_path):
    data = training.build_data(
        compose(base / "nowhere"), scoring=ScoringSettings(input=str(base / "input"))
    )
    data._prepare = lambda: pytest.fail("written")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False
    )
    trainer.predict(Interrupted(99), data)
    assert pa.schema([]) == data.prediction_input.kept
