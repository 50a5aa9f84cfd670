"""The validation of a last step whose run was stopped before it.

    last.ckpt, at trainer.max_steps, not validated  ->  validated  ->  best and last checkpoint

A signal saves and ends a run without validating. Where that was the last step, nothing is left to
train, and Lightning would end at once. So its loop is replaced by what follows a last step in the
unbroken run: a validation, whose callbacks keep the best of both runs and save.
"""

from lightning.pytorch import Trainer


def validate_only(trainer: Trainer) -> None:
    """Have a trainer whose `fit` resumes at the last step validate it, and train nothing.

    Args:
        trainer: The trainer, before `fit`.
    """
    trainer.fit_loop.run = lambda: _run(trainer)  # type: ignore[method-assign]


def _run(trainer: Trainer) -> None:
    fit = trainer.fit_loop
    fit.setup_data()
    epoch = fit.epoch_loop
    batches = epoch.batch_progress
    if batches.current.completed < batches.current.processed:  # type: ignore[attr-defined]
        # the checkpoint was written before its step counted as completed
        batches.increment_completed()
    fit.on_run_start()
    if epoch._should_check_val_epoch():
        epoch.val_loop.restarting = False
        trainer.validating = True
        epoch.val_loop.run()
        trainer.training = True
    fit.on_run_end()
