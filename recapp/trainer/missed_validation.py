"""Makes up for a validation that a signal has prevented.

    last.ckpt of a step that an unbroken run validates, saved after a signal
        -> validation, best and last checkpoint -> training goes on, or is over

A signal saves and ends a run without validation. An unbroken run validates at that step, keeps the
best checkpoint and steps a `ReduceLROnPlateau`. A run that resumes there does the same first, so
its state then equals the state of the unbroken run after its validation.
"""

from collections.abc import Callable

from lightning.pytorch import Trainer
from lightning.pytorch.loops.progress import _BatchProgress as BatchProgress

from recapp.trainer.data_protocols import resumable_data
from recapp.trainer.keep_snapshots import KeepSnapshots


def validate_first(trainer: Trainer, *, over: bool) -> None:
    """Make `fit` of a resumed run validate before it trains, if an unbroken run validates at this
    step.

    Args:
        trainer: The trainer, before `fit`.
        over: Whether the step was the last one, so that no training follows.
    """
    go_on = trainer.fit_loop.run
    run = _end if over else _begin
    trainer.fit_loop.run = lambda: run(trainer, go_on)  # type: ignore[method-assign]


def _begin(trainer: Trainer, go_on: Callable[[], None]) -> None:
    """Validate if a validation is due at this step, then go on with training."""
    fit = trainer.fit_loop
    fit.setup_data()
    assert fit._data_fetcher is not None
    if fit.epoch_loop._should_check_val_fx(fit._data_fetcher):
        _validate(trainer)
        # so Lightning goes on as from a checkpoint whose state was validated
        fit.epoch_loop.val_loop._has_run = False
    go_on()


def _end(trainer: Trainer, go_on: Callable[[], None]) -> None:
    """Validate as every run does after its last step; train no further step."""
    fit = trainer.fit_loop
    fit.setup_data()
    fit.on_run_start()
    trainer.should_stop = True
    if fit.epoch_loop._should_check_val_epoch():
        _validate(trainer)
    if not resumable_data(trainer).position.batches:  # the signal came before the snapshot, too
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, KeepSnapshots):
                callback.keep(trainer)
    fit.on_run_end()


def _forget_begun(progress: BatchProgress) -> None:
    """Subtract the batches of the interrupted validation from the total count, because this
    validation starts again.
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
        # the checkpoint was written before Lightning counted its step as completed
        batches.increment_completed()
    _forget_begun(epoch.val_loop.batch_progress)
    epoch.val_loop.restarting = False
    trainer.validating = True
    epoch.val_loop.run()
    trainer.training = True
