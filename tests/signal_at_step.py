"""A callback that ends a run as a person or a scheduler does, at a step that is known."""

import os

from lightning.pytorch import Callback


class SignalAtStep(Callback):
    """Sends this process a signal after a training step, or in a batch of its validation."""

    def __init__(self, step, number, batch=None):
        self.step = step
        self.number = number
        self.batch = batch
        self.reached = False  # the step; a run that goes on from there sends nothing

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.reached = trainer.global_step == self.step
        if self.reached and self.batch is None:
            os.kill(os.getpid(), self.number)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if self.reached and self.batch == batch_idx:
            os.kill(os.getpid(), self.number)
