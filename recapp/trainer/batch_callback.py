"""The base class of callbacks that run after every training step, or after every other batch.

It has two methods: one for training steps, one for batches that are validated, tested or scored. A
step trains one batch, or several with `accumulate_grad_batches`. `skip_idle_hooks` spares the calls
of hooks that do nothing.
"""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


def ends_step(trainer: Trainer, done: int) -> bool:
    """Return whether a training batch ends a step.

    Args:
        trainer: The trainer of the run.
        done: The number of batches of the epoch so far, this one included.
    """
    return done % trainer.accumulate_grad_batches == 0 or ends_epoch(trainer, done)


def ends_epoch(trainer: Trainer, done: int) -> bool:
    """Return whether a training batch ends an epoch. Arguments as for `ends_step`."""
    return bool(trainer.is_last_batch) or done >= trainer.num_training_batches


BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    *(f"on_{s}_batch_{end}" for s in ("validation", "test", "predict") for end in ("start", "end")),
)
"""The hooks that Lightning calls for each batch."""


def skip_idle_hooks(callbacks: Iterable[Callback]) -> None:
    """Make Lightning pass over the hooks of a batch that a callback leaves as `Callback` has them.

    Lightning calls all hooks of all callbacks, each in a section of its profiler: 80 calls a step
    that do nothing, .5 ms. It passes over a hook that is not callable.

    Args:
        callbacks: The callbacks of a trainer.
    """
    for callback in callbacks:
        for name in BATCH_HOOKS:
            if getattr(callback, name) == getattr(Callback, name).__get__(callback):
                setattr(callback, name, None)


class BatchCallback(Callback):
    """Calls `on_step` after every training step, and `on_batch` after every other batch.

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
        """Call `on_step`, if the batch ends a step."""
        if ends_step(trainer, batch_idx + 1):
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
