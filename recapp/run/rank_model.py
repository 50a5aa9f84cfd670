"""A trained model for ranks to evaluate or to predict with under Lightning."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from recapp.run.artefact_model import check_outputs
from recapp.run.lightning_trainer import build_trainer
from recapp.run.recipe import Train
from recapp.sparse.batch import Batch
from recapp.stored.manifest import Manifest
from recapp.trainer.module import TaskModule
from recapp.trainer.strategy import EmbeddingShardingStrategy


@dataclass(frozen=True)
class RankModel:
    """A model that a rank evaluates or predicts with.

    Args:
        module: The module; its tables are sharded when the trainer starts.
        strategy: The Strategy that shards the tables.
        ckpt_path: The checkpoint that Lightning restores; None if the model is already filled.
        callbacks: Callbacks that the trainer needs for this model.
    """

    module: TaskModule
    strategy: EmbeddingShardingStrategy
    ckpt_path: str | None
    callbacks: tuple[Callback, ...] = ()

    def trainer(self, recipe: Train, callbacks: Sequence[Callback]) -> Trainer:
        """Return the Trainer of this rank, without loggers.

        Args:
            recipe: The recipe of the command.
            callbacks: The callbacks of the command.
        """
        return build_trainer(recipe, self.strategy, [*self.callbacks, *callbacks], [])

    def facts(self) -> dict[str, Any]:
        """Return the end of `metrics.json`: the number of ranks, the plan and the status."""
        assert self.strategy.plan is not None
        return {
            "ranks": self.strategy.comm.world,
            "plan": self.strategy.plan.name,
            "status": "ok",
        }


class CheckExample(Callback):
    """Compare the outputs of an artefact's example with the exported ones before its first batch.
    Every rank scores the example.

    Args:
        artefact: The artefact.
        batch: The batch of its example.
    """

    def __init__(self, artefact: Manifest, batch: Batch) -> None:
        self.artefact = artefact
        self.batch = batch

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score the example and compare its outputs.

        Raises:
            ArtefactError: The outputs differ.
        """
        assert isinstance(pl_module, TaskModule)
        # TF32, which ranks compute with on a GPU, is too coarse for a comparison of files
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.no_grad():
                outputs = pl_module.outputs(self.batch.to(pl_module.device))
        finally:
            torch.set_float32_matmul_precision(precision)
        check_outputs(self.artefact, outputs)

    on_validation_start = on_test_start = on_predict_start
