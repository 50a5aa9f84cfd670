"""The base class of callbacks that run after every batch.

It has two methods: one for training steps, one for batches that are validated, tested or scored.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class BatchCallback(Callback):
    """Calls `on_step` or `on_batch` after every batch.

    Lightning has one hook for each stage, with arguments that most callbacks do not need. Each
    stage of recapp has one loader, so the methods get no index of the loader.
    """

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Act on the end of a training step.

        Args:
            trainer: The trainer of the run.
            done: The number of batches of the epoch so far, this one included.
        """

    def on_batch(self, trainer: Trainer, done: int) -> None:
        """Act on the end of a batch that was validated, tested or scored.

        Args:
            trainer: The trainer of the run.
            done: The number of batches of the stage so far, this one included.
        """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Call `on_step`."""
        self.on_step(trainer, batch_idx + 1)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Call `on_batch`."""
        self.on_batch(trainer, batch_idx + 1)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end
