"""What users of Lightning do every day works under the Strategy, or is refused in one line.

| habit                                                | test                                      |
|------------------------------------------------------|-------------------------------------------|
| tables made in __init__                              | test_own_optimizers.py: where_and_when    |
| tables made in configure_model                       | test_own_lightning.py, whole file         |
| save_hyperparameters                                 | test_own_lightning.py: load_from_check    |
| ModelCheckpoint: monitor, top-k, last, weights only  | here: a_usual_run                         |
| EarlyStopping                                        | here: a_usual_run                         |
| LearningRateMonitor                                  | here: a_usual_run                         |
| StepLR                                               | here: a_usual_run; test_own_optimizers.py |
| validate, test, predict by "best"                    | here: the_best_checkpoint                 |
| load_from_checkpoint with overrides                  | here: the_best_checkpoint                 |
| resume                                               | test_own_optimizers.py: a_resumed_run     |
| own callbacks with state                             | here: a_resume_restores                   |
| accumulate_grad_batches, gradient_clip_val           | test_own_optimizers.py: accumulated_and   |
| bf16-mixed                                           | here: a_usual_run                         |
| profiler                                             | here: a_usual_run                         |
| fast_dev_run, overfit_batches                        | here: short_runs                          |
| manual optimisation                                  | test_own_optimizers.py: of_two_optimisers |
| LightningDataModule, workers                         | here: a_usual_run                         |
| trainer.save_checkpoint                              | test_own_optimizers.py: a_resumed_run     |
| load_model(module=)                                  | test_own_lightning.py: load_model_takes   |
| values set before sharding                           | here: values_that_are_set                 |
| strategy="auto", unsharded                           | test_own_optimizers.py, the oracle        |
| StochasticWeightAveraging                            | test_own_lightning.py: callbacks_that     |
| lr_find                                              | here: a_search_of_the_rate                |
| LightningCLI                                         | needs jsonargparse, which is not required |
| Adam(self.parameters())                              | test_own_optimizers.py: an_optimiser_over |
| a param group of a table, a rate of 0                | test_own_optimizers.py: a_rate_of_0       |
| requires_grad_(False) of tables                      | test_frozen_runs.py: a_lightning_module   |
| two optimisers                                       | test_own_optimizers.py: of_two_optimisers |
| torch.compile(module)                                | here: a_compiled_module                   |
| a checkpoint in a plain Trainer                      | here: a_plain_trainer                     |
| strategy="recapp"                                    | here: a_usual_run                         |
"""

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from trainer.own_lightning import BATCHES, ITEMS, SEEN, Clicks

from recapp import EmbeddingBagCollection, EmbeddingCollection, EmbeddingShardingStrategy
from recapp.errors import CheckpointError, ConfigError

pytestmark = [
    pytest.mark.usefixtures("reference_kernels"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Consider setting `persistent_workers=True`"),
    pytest.mark.filterwarnings("ignore:.*multiple `ModelCheckpoint` callbacks"),
    pytest.mark.filterwarnings("ignore:.*use of fork.* may lead to deadlocks:DeprecationWarning"),
]


class Usual(Clicks):
    """As users write it: one optimiser of all parameters, a schedule, all steps."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def validation_step(self, batch, index):
        self.log("val_loss", self.training_step(batch, index), batch_size=2)

    def test_step(self, batch, index):
        self.log("test_loss", self.training_step(batch, index), batch_size=2)

    def predict_step(self, batch, index):
        return self(batch[0])


class Unsharded(Usual):
    def configure_model(self):
        if not hasattr(self, "bags"):
            super().configure_model()
            self.bags = EmbeddingBagCollection(tables=[ITEMS])
            self.sequences = EmbeddingCollection(tables=[SEEN])


class Batches(LightningDataModule):
    def train_dataloader(self, workers=2):
        return torch.utils.data.DataLoader(BATCHES[:6], batch_size=None, num_workers=workers)

    def val_dataloader(self):
        return self.train_dataloader(0)

    test_dataloader = predict_dataloader = val_dataloader


class Counted(Callback):
    def __init__(self):
        self.epochs = 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs += 1

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def trainer(strategy="recapp", **settings):
    torch.set_num_threads(1)
    off = {"logger": False, "enable_checkpointing": False}
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        **(off | settings),
    )


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """One run with everything that users hang onto a Trainer."""
    folder = tmp_path_factory.mktemp("usual")
    best = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    callbacks = [
        best,
        ModelCheckpoint(folder / "weights", "weights", save_weights_only=True),
        EarlyStopping("val_loss", min_delta=1e9, patience=3),
        LearningRateMonitor("epoch"),
        Counted(),
    ]
    found = trainer(
        max_epochs=9,
        logger=CSVLogger(folder, "log"),
        enable_checkpointing=True,
        callbacks=callbacks,
        precision="bf16-mixed",
        profiler="simple",
    )
    found.fit(Usual(), datamodule=Batches())
    found.logged = dict(found.callback_metrics)  # a validation makes others
    return found


def test_a_usual_run_trains_with_all_that_lightning_brings(usual):
    assert isinstance(usual.strategy, EmbeddingShardingStrategy)
    assert usual.strategy.rule.name == "adam" and usual.strategy.rule.all_rows
    assert usual.current_epoch == 4  # it stopped early
    best, weights = usual.checkpoint_callbacks
    assert len(best.best_k_models) == 2
    assert best.best_model_path in best.best_k_models and "last.ckpt" in best.last_model_path
    rates = {n: float(v) for n, v in usual.logged.items() if n.startswith("lr-")}
    assert rates == {"lr-Adam": pytest.approx(0.02 / 2**3)}
    assert "run_training_batch" in usual.profiler.summary()
    assert "weights" in weights.best_model_path


def test_the_best_checkpoint_is_validated_tested_and_predicted_with(usual):
    data = Batches()
    (validated,) = usual.validate(Usual(), datamodule=data, ckpt_path="best", verbose=False)
    (tested,) = usual.test(Usual(), datamodule=data, ckpt_path="best", verbose=False)
    scores = usual.predict(Usual(), datamodule=data, ckpt_path="best")
    assert validated["val_loss"] == tested["test_loss"] and len(scores) == 6
    best, weights = usual.checkpoint_callbacks
    module = Usual.load_from_checkpoint(best.best_model_path, strict=False, width=3)
    torch.testing.assert_close(
        module(BATCHES[0][0]).detach(), scores[0].float(), rtol=0.02, atol=0.02
    )
    assert Usual.load_from_checkpoint(weights.best_model_path).hparams.width == 3
    with pytest.raises(RuntimeError, match="size mismatch"):
        Usual.load_from_checkpoint(best.best_model_path, width=5)


def test_a_plain_trainer_reads_the_weights_and_says_what_trains_on(usual):
    path = usual.checkpoint_callback.best_model_path
    (expected,) = usual.validate(Usual(), datamodule=Batches(), ckpt_path=path, verbose=False)
    plain = trainer("auto", precision="bf16-mixed")
    (found,) = plain.validate(Unsharded(), datamodule=Batches(), ckpt_path=path, verbose=False)
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=0.02)
    with pytest.raises(CheckpointError) as refused:
        trainer("auto", max_epochs=9).fit(Unsharded(), datamodule=Batches(), ckpt_path=path)
    (line,) = str(refused.value).splitlines()
    assert "go on training with Trainer(strategy=EmbeddingShardingStrategy())" in line


def test_a_resume_restores_the_state_of_own_callbacks_and_the_schedule(usual):
    counted = Counted()
    again = trainer(max_epochs=5, callbacks=[counted])
    again.fit(Usual(), datamodule=Batches(), ckpt_path=usual.checkpoint_callback.last_model_path)
    assert counted.epochs == 5 and again.global_step == 30
    assert again.optimizers[0].param_groups[0]["lr"] == 0.02 / 2**5


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"fast_dev_run": True}, 1), ({"overfit_batches": 2, "max_epochs": 2}, 4)],
    ids=str,
)
def test_short_runs_are_as_short_as_they_say(settings, steps):
    found = trainer(**settings)
    found.fit(Usual(), datamodule=Batches())
    assert found.global_step == steps


def test_values_that_are_set_before_sharding_are_trained_from():
    module = Unsharded()
    module.configure_model()
    with torch.no_grad():
        module.bags.weight("items").fill_(0.25)
    found = trainer(max_epochs=1, limit_train_batches=1)
    found.fit(module, datamodule=Batches())
    rows = module.state_dict()["bags.embedding_bags.items.weight"][0][2]
    assert bool((rows[100:] == 0.25).all()) and not bool((rows[:10] == 0.25).all())


def test_a_search_of_the_rate_is_refused_in_one_line():
    found = trainer(max_epochs=1)
    with pytest.raises(ConfigError, match=r"LearningRateFinder") as refused:
        Tuner(found).lr_find(Usual(), datamodule=Batches())
    assert len(str(refused.value).splitlines()) == 1


class BagsAlone(Clicks):
    """A small graph, which compiles in a second."""

    def training_step(self, batch, index):
        return self.bags(batch[0].permute([0])).values().square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.full
def test_a_compiled_module_trains_with_tables_outside_of_its_graphs():
    def trained(module, given):
        trainer(max_epochs=1).fit(given, Batches().train_dataloader(0))
        return module.state_dict()["bags.embedding_bags.items.weight"][0][2]

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain, compiled = BagsAlone(), BagsAlone()
    expected = trained(plain, plain)
    assert torch.equal(trained(compiled, torch.compile(compiled, backend=backend)), expected)
    assert len(graphs) <= 3  # of six batches: the same after the first
