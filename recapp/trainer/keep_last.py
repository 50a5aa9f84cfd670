"""`last.ckpt`, from which training resumes, and which checkpoint is the best over all runs of a
model.

    checkpoints/step_000020.ckpt                 the best, of Lightning's ModelCheckpoint
    checkpoints/last.ckpt -> step_000020.ckpt    where it is the last one, too
    checkpoints/last.ckpt -> last.ckpt.000027    else a directory of its own

`last.ckpt` is always a link, so it is replaced in one rename: at every moment it leads to a whole
checkpoint.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from recapp.console import note
from recapp.stored.checkpoint import link_checkpoint
from recapp.stored.directories import is_checkpoint
from recapp.stored.local_files import files_at
from recapp.stored.training_state import state_must_fit
from recapp.trainer.batch_callback import BatchCallback


class KeepLast(BatchCallback, Checkpoint):
    """Validates at the last step of a run, however it ends, and leaves `last.ckpt`, from which
    training resumes.

    Lightning validates after a stop, but not where max_steps ends an epoch early or where
    validation goes by steps: so the last step becomes a stop. All of it happens inside the epoch,
    because a checkpoint written after it would say that the epoch is over. Where a
    `ModelCheckpoint` has just written the same state, `last.ckpt` is a link to it.

    Args:
        folder: The directory of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "last.ckpt"
        self._step = -1

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Give every `ModelCheckpoint` the best checkpoints of the run that is resumed, wherever
        they are.

        Lightning forgets the scores of checkpoints in another directory, and calls the next one the
        best.
        """
        states = checkpoint["callbacks"]
        beside = Path(trainer.ckpt_path or "").absolute().parent
        for callback in trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint) or callback.state_key not in states:
                continue
            state = states.pop(callback.state_key)
            with state_must_fit("the list of best checkpoints", "callbacks"):
                known = _known_best(callback, state, beside)
                lost = bool(state["best_k_models"]) and not known
            if known:
                states[callback.state_key] = known
            if lost and trainer.is_global_zero:
                note(
                    f"the earlier run's best checkpoint {state.get('best_model_path')} is gone: "
                    "the best from here on counts"
                )

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Make the last step a stop, and save after it where nothing validates."""
        epochs = trainer.max_epochs
        last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
        over = last_epoch and trainer.is_last_batch
        if over or 0 <= trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True
        if trainer.should_stop and not trainer.limit_val_batches:
            self._keep(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the state that was validated, which is the last one until the next validation."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._keep(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the state at the end of an epoch that ended without validation."""
        self._keep(trainer)

    def _keep(self, trainer: Trainer) -> None:
        if self._step == trainer.global_step:
            return
        self._step = trainer.global_step
        saved = _just_saved(trainer)
        if saved is None:
            saved = files_at(self.path).new_version(self.path, trainer.global_step)
            trainer.save_checkpoint(saved)
        if trainer.is_global_zero:
            link_checkpoint(self.path, saved)
            files_at(self.path).clean_up(self.path.parent)
        trainer.strategy.barrier()

    def best_or_last(self, trainer: Trainer) -> str:
        """Return the path of the best checkpoint; where nothing chooses a best, of the last."""
        callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        best = [c.best_model_path for c in callbacks if c.best_model_path and c.monitor]
        return best[0] if best else str(self.path)


def _just_saved(trainer: Trainer) -> Path | None:
    """Return what a `ModelCheckpoint` has written in this step, if training can resume from it.

    One that monitors nothing writes before this step's validation, so it has an earlier one's
    metrics.
    """
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback.save_weights_only:
            continue
        if callback.monitor is None:
            continue
        path = callback._last_checkpoint_saved
        step = callback._last_global_step_saved
        if path and step == trainer.global_step:
            return Path(path)
    return None


def best_known(path: str | Path, meta: Mapping[str, Any]) -> Path | None:
    """Return the best checkpoint of all runs of a model, where it still exists.

    Args:
        path: The last checkpoint of these runs.
        meta: Its plain part, which has the states of callbacks.
    """
    with state_must_fit("the list of best checkpoints", "callbacks"):
        for key, state in dict(meta["callbacks"]).items():
            if key.startswith(ModelCheckpoint.__name__) and state["monitor"] is not None:
                name = state["best_model_path"]
                return _found(name, Path(path).absolute().parent) if name else None
    return None


def _found(name: str, beside: Path) -> Path | None:
    """Return where a checkpoint of an earlier run is: where it was, or beside the run's last."""
    path = Path(os.path.normpath(Path(name).absolute()))
    return next((p for p in (path, beside / path.name) if is_checkpoint(p)), None)


def _known_best(
    callback: ModelCheckpoint, state: Mapping[str, Any], beside: Path
) -> dict[str, Any]:
    """Return the state of a `ModelCheckpoint`, with those of its best checkpoints that still exist.

    Args:
        callback: The `ModelCheckpoint` of the new run.
        state: The state of the earlier run's, as its checkpoint holds it.
        beside: The directory of that checkpoint; a run's directory may have been moved with all it
            holds.

    Returns:
        An empty mapping where none of them exists. Paths are absolute and normalised, so that
        Lightning recognises those of another directory, which this run must not delete.
    """
    if callback.monitor is None:  # the newest is the best, so another directory's say nothing
        return dict(state) if state["dirpath"] == callback.dirpath else {}
    scores = {}
    for name, score in dict(state["best_k_models"]).items():
        found = _found(name, beside)
        if found is not None:
            # in its own precision: another one would make another score
            scores[str(found)] = torch.as_tensor(score)
    ranked = sorted(scores, key=lambda path: float(scores[path]), reverse=callback.mode == "max")
    most = callback.save_top_k
    ranked = ranked[:most] if most > 0 else ranked
    if not ranked:
        return {}
    best = ranked[0]
    worst = ranked[-1]
    full = len(ranked) == most
    return {
        **state,
        "dirpath": callback.dirpath,
        "best_k_models": {path: scores[path] for path in ranked},
        "best_model_path": best,
        "best_model_score": scores[best],
        "kth_best_model_path": worst if full else "",
        "kth_value": scores[worst] if full else callback.kth_value,
    }
