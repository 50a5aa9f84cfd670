"""Lightning's own waits for other ranks end as all waits do, and a bar makes no step wait."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector import result

from recapp.trainer import lightnings_parts
from recapp.trainer.lightnings_parts import limit_waits, read_when_shown


class Group:
    """A process group whose barrier waits in vain."""

    def monitored_barrier(self):
        raise RuntimeError("Timed out waiting 5000ms")


class Rows(LightningDataModule):
    prepared = False

    def prepare_data(self):
        self.prepared = True


def test_a_rank_waits_no_longer_for_the_one_that_prepares_data_than_for_others(monkeypatch):
    monkeypatch.setattr(lightnings_parts, "_distributed_is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.datamodule = Rows()
    limit_waits(trainer, Group)
    with pytest.raises(RuntimeError, match="Timed out waiting"):
        trainer._data_connector.prepare_data()
    assert trainer.datamodule.prepared


class Shown(LightningModule):
    """A module whose loss the bar shows."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        loss = self.weight * (batch_idx + 1)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


class Bar(Callback):
    """A bar that shows its values at the second step alone."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.shown = dict(trainer.progress_bar_metrics)


@pytest.mark.parametrize("late", [True, False])
def test_values_of_the_bar_are_read_when_it_shows_them(monkeypatch, late):
    reads = []
    read = result.convert_tensors_to_scalars
    monkeypatch.setattr(
        result, "convert_tensors_to_scalars", lambda value: reads.append(value) or read(value)
    )
    bar = Bar()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=6,
        logger=False,
        callbacks=[bar],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if late:
        read_when_shown(trainer)
        read_when_shown(trainer)  # as for a second fit
    trainer.fit(Shown(), torch.utils.data.DataLoader(range(9), batch_size=1))
    assert bar.shown == {"loss": 2.0}
    assert len(reads) == (1 if late else 1 + 6)
    assert float(trainer.callback_metrics["loss"]) == 6.0
