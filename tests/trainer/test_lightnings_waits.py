"""Lightning's own waits for other ranks end as all waits do."""

import pytest
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, Trainer

from recapp.trainer import lightnings_parts
from recapp.trainer.lightnings_parts import limit_waits


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
