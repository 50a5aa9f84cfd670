"""A trained model on its way to the ranks, as Lightning takes it."""

from dataclasses import dataclass

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from recapp.app.artefact_model import check_logits
from recapp.sparse.batch import Batch
from recapp.stored.manifest import Manifest
from recapp.trainer.module import TaskModule
from recapp.trainer.strategy import EmbeddingShardingStrategy


@dataclass(frozen=True)
class RankModel:
    """A model as a rank predicts with it.

    Args:
        module: The module; its tables are sharded when prediction starts.
        strategy: What shards them.
        ckpt_path: What Lightning restores into them; None where nothing is left to restore.
        callbacks: Callbacks that the trainer needs for it.
    """

    module: TaskModule
    strategy: EmbeddingShardingStrategy
    ckpt_path: str | None
    callbacks: tuple[Callback, ...] = ()


class CheckExample(Callback):
    """Compares the scores of an artefact's example with the exported ones before any other row is
    scored; every rank scores it.

    Args:
        artefact: The artefact.
        batch: Its example.
    """

    def __init__(self, artefact: Manifest, batch: Batch) -> None:
        self.artefact = artefact
        self.batch = batch

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score the example.

        Raises:
            ArtefactError: Its scores are others.
        """
        with torch.no_grad():
            logits = pl_module(self.batch.to(pl_module.device))
        check_logits(self.artefact, logits)
