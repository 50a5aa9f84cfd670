"""A user's own script gives columns and rows, and Lightning the checkpoint: rows are read as the
checkpoint's training read its own.
"""

from types import SimpleNamespace

import lightning
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recapp import (
    ClickData,
    DataSettings,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingShardingStrategy,
    HybridOptimizer,
    ScoringSettings,
    load_model,
)
from recapp.dataset.schema import Schema, schema_of
from recapp.errors import CheckpointError, ConfigError
from recapp.stored.stored_model import read_manifest
from recapp.tables.table_settings import TablesOfDataset

ROWS = 300


class Clicks(lightning.LightningModule):
    def configure_model(self):
        if hasattr(self, "bags"):
            return
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=40, embedding_dim=4, feature_names=[name])
            for name in ("user", "tags")
        ]
        torch.manual_seed(0)
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"), seed=1)
        self.score = torch.nn.Linear(8, 1)

    def forward(self, batch):
        return self.score(self.bags(batch.sparse).values()).squeeze(1)

    def training_step(self, batch, index):
        labels = batch.labels["label"]
        return torch.nn.functional.binary_cross_entropy_with_logits(self(batch), labels)

    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index), batch_size=batch.rows)

    def predict_step(self, batch, index):
        return self(batch)

    def configure_optimizers(self):
        dense = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.05)
        return HybridOptimizer(dense, self.trainer.strategy.sparse_groups())


def trainer(**options):
    return lightning.Trainer(
        strategy=EmbeddingShardingStrategy(),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )


def data(folder, file, **more):
    """The rows of a file, with nothing that only a checkpoint knows."""
    path = str(folder / f"{file}.parquet")
    given = {"sparse": ("user", "tags"), "path": path, "batch_size": 64, **more}
    settings = DataSettings(naming="custom", dense=(), **given)
    scoring = ScoringSettings(input=path)
    return ClickData(settings, schema_of(settings, TablesOfDataset()), scoring=scoring)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Logs with lists of tags, the same without any, and a model of each kind of columns."""
    base = tmp_path_factory.mktemp("own")
    columns = {
        "label": [n % 3 == 0 for n in range(ROWS)],
        "user": [n % 17 if n % 5 else None for n in range(ROWS)],
        "tags": [[n % 3, 7] if n % 4 else None for n in range(ROWS)],
    }
    pq.write_table(pa.table(columns), base / "lists.parquet")
    for name, tags in (("nulls", None), ("empty", [])):
        kind = pa.list_(pa.int64()) if name == "empty" else pa.int64()
        without = pa.array([tags] * ROWS, kind)
        pq.write_table(pa.table({**columns, "tags": without}), base / f"{name}.parquet")
    for name, more in (("plain", {}), ("rare", {"min_frequency": 15})):
        trained = trainer(max_epochs=2)
        trained.fit(Clicks(), data(base, "lists", **more))
        trained.save_checkpoint(base / f"{name}.ckpt")
    return base


def scores(base, file, name="plain", **more):
    own = data(base, file, **more)
    return torch.cat(trainer().predict(Clicks(), own, ckpt_path=base / f"{name}.ckpt"))


def test_a_null_is_an_empty_list_in_a_prediction(base):
    nulls = scores(base, "nulls")
    assert torch.equal(nulls, scores(base, "empty")) and len(nulls.unique()) > 3
    model = load_model(base / "plain.ckpt", module=Clicks(), data=data(base, "lists"))
    found = model.predict(pq.read_table(base / "nulls.parquet"))
    torch.testing.assert_close(torch.as_tensor(found), nulls.sigmoid())


@pytest.mark.parametrize("train", ["lists", "nulls"])
def test_a_null_is_an_empty_list_in_a_validation(base, train):
    def measured(file):
        own = data(base, train, val_path=str(base / f"{file}.parquet"))
        (found,) = trainer().validate(Clicks(), own, ckpt_path=base / "plain.ckpt", verbose=False)
        return found["loss"]

    assert measured("nulls") == measured("empty") != measured("lists")


def test_a_run_that_resumes_on_other_rows_keeps_the_lists(base, tmp_path):
    own = data(base, "nulls")
    resumed = trainer(max_epochs=3)
    resumed.fit(Clicks(), own, ckpt_path=base / "plain.ckpt")
    resumed.save_checkpoint(tmp_path / "on.ckpt")
    assert own.schema.lists == {"tags"}
    assert read_manifest(tmp_path / "on.ckpt").info["ids"]["lists"] == ["tags"]
    batch = next(iter(own.val_dataloader()))
    assert batch.rows and not batch.sparse["tags"].lengths().any()


def test_fitted_values_are_those_of_the_checkpoint(base):
    """Of ids that are rare in its rows, whatever the rows at hand are."""
    found = scores(base, "lists", "rare", min_frequency=15)
    own = data(base, "lists", min_frequency=15)
    model = load_model(base / "rare.ckpt", module=Clicks(), data=own)
    wanted = model.predict(pq.read_table(base / "lists.parquet"))
    torch.testing.assert_close(found.sigmoid(), torch.as_tensor(wanted))
    own = data(base, "nulls", min_frequency=15)
    trainer().validate(Clicks(), own, ckpt_path=base / "rare.ckpt", verbose=False)
    stored = data(base, "lists", min_frequency=15)
    stored.setup("fit")
    assert own.schema.values.keys() == stored.schema.values.keys()
    for key, values in stored.schema.values.items():
        assert (own.schema.values[key] == values).all()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ids_have_half_the_bytes_on_their_way_to_a_gpu_alone(base, device):
    """The loaders of a run on a GPU, which only its batches would reach."""
    own = data(base, "lists")
    own.setup("fit")
    strategy = SimpleNamespace(root_device=torch.device(device))
    own.trainer = SimpleNamespace(
        strategy=strategy, global_rank=0, world_size=1, current_epoch=0, num_training_batches=1
    )
    for loader in (own.train_dataloader(), own.val_dataloader()):
        values = next(iter(loader)).sparse["user"].values()
        assert values.dtype == (torch.int64 if device == "cpu" else torch.int32)
        assert values.min() == torch.iinfo(values.dtype).min  # a missing id


def test_without_a_checkpoint_there_are_no_fitted_values(base):
    with pytest.raises(ConfigError, match=r"belong to a trained model: name it, ckpt_path="):
        trainer().predict(Clicks(), data(base, "lists", min_frequency=15))
    with pytest.raises(CheckpointError, match="trained without"):
        scores(base, "lists", "plain", min_frequency=15)


def test_the_columns_of_a_schema_stand_without_a_checkpoint(base):
    own = ClickData(DataSettings(path=str(base / "lists.parquet")), Schema("label", (), ("user",)))
    own.setup("validate")
    assert own.schema.lists is None
    own = ClickData(DataSettings(path=str(base / "lists.parquet")), Schema("label", (), ("tags",)))
    own.setup("fit")
    assert own.schema.lists == {"tags"}
