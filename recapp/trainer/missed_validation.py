"""The validation that a signal has cut off.

    last.ckpt of a step that the unbroken run validates, saved by a signal
        -> validated, best and last checkpoint -> training goes on, or is over

A signal saves and ends a run without validating. The unbroken run validates that step, keeps the
best and asks the schedule that waits for gains; so does a run that goes on from there, before
anything else. What it has then is what the unbroken run had after its validation.
"""

from collections.abc import Callable

from lightning.pytorch import Trainer
from lightning.pytorch.loops.progress import _BatchProgress as BatchProgress


def validate_first(trainer: Trainer, *, over: bool) -> None:
    """Have a trainer whose `fit` resumes at a step that was not validated validate it first, where
    the unbroken run does.

    Args:
        trainer: The trainer, before `fit`.
        over: Whether it was the last step, after which nothing is trained.
    """
    go_on = trainer.fit_loop.run
    run = _end if over else _begin
    trainer.fit_loop.run = lambda: run(trainer, go_on)  # type: ignore[method-assign]


def _begin(trainer: Trainer, go_on: Callable[[], None]) -> None:
    """Validate where a validation was due at this step, and train on."""
    fit = trainer.fit_loop
    fit.setup_data()
    assert fit._data_fetcher is not None
    if fit.epoch_loop._should_check_val_fx(fit._data_fetcher):
        _validate(trainer)
        # Lightning goes on as from a checkpoint that was validated
        fit.epoch_loop.val_loop._has_run = False
    go_on()


def _end(trainer: Trainer, go_on: Callable[[], None]) -> None:
    """Validate, which every run does after its last step, and train nothing."""
    fit = trainer.fit_loop
    fit.setup_data()
    fit.on_run_start()
    trainer.should_stop = True
    if fit.epoch_loop._should_check_val_epoch():
        _validate(trainer)
    fit.on_run_end()


def _forget_begun(progress: BatchProgress) -> None:
    """Take the batches of the validation that was cut off out of those of all validations, as it
    begins again.
    """
    begun = progress.current
    total = progress.total
    is_over = progress.is_last_batch and begun.completed == begun.ready
    for name in vars(begun) if not is_over else ():
        setattr(total, name, getattr(total, name) - getattr(begun, name))


def _validate(trainer: Trainer) -> None:
    epoch = trainer.fit_loop.epoch_loop
    batches = epoch.batch_progress
    if batches.current.completed < batches.current.processed:  # type: ignore[attr-defined]
        # the checkpoint was written before its step counted as completed
        batches.increment_completed()
    _forget_begun(epoch.val_loop.batch_progress)
    epoch.val_loop.restarting = False
    trainer.validating = True
    epoch.val_loop.run()
    trainer.training = True
