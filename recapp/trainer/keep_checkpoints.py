"""Ends runs on all ranks at the same step, writes `last.ckpt`, from which training resumes, finds
the best checkpoint over all runs of a model, and keeps the models of the last epochs.

    checkpoints/step_000020.ckpt                 the best, of Lightning's ModelCheckpoint
    checkpoints/last.ckpt -> step_000020.ckpt    if the best is also the last
    checkpoints/last.ckpt -> last.ckpt.000027    else a directory of its own
    checkpoints/snapshot_000206.ckpt             the end of epoch 2
    checkpoints/snapshots.ckpt                   recapp/stored/checkpoint.py joins them

`last.ckpt` is always a link, and one rename replaces it. So it points to a whole checkpoint at
every moment.

A signal saves and ends a run without validation. An unbroken run validates at that step, keeps the
best checkpoint and steps a `ReduceLROnPlateau`. A run that resumes there does the same first
(`validate_first`), so its state then equals the state of the unbroken run after its validation.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loops.progress import _BatchProgress as BatchProgress
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from recapp.console import note
from recapp.errors import CheckpointError, TrainingError
from recapp.processes import stopping
from recapp.settings.uris import path_to
from recapp.stored.checkpoint import (
    KEPT,
    find_named,
    folder_of,
    link_checkpoint,
    remove_checkpoint,
)
from recapp.stored.operations import LAST
from recapp.stored.plain_parts import state_must_fit
from recapp.stored.store import clean_up, new_version
from recapp.stored.stored_model import read_manifest
from recapp.trainer.data_protocols import datamodule_of
from recapp.trainer.lightnings_parts import BatchCallback, ends_epoch, ends_step
from recapp.trainer.strategy import strategy_of


class KeepLast(BatchCallback, Checkpoint):
    """Validates at the last step of a run, whatever limit ends the run, and writes `last.ckpt`,
    from which training resumes.

    Lightning validates after a stop, but not if max_steps ends an epoch early, and not if
    validation counts steps. So this callback turns the last step into a stop. It acts inside the
    epoch, because a checkpoint written after the epoch would record the epoch as complete. If a
    `ModelCheckpoint` has just written the same state, `last.ckpt` is a link to that checkpoint.

    Args:
        folder: The directory of the checkpoints.
        each_epoch: Whether to keep the end of each epoch, also without a validation.
    """

    def __init__(self, folder: Path, each_epoch: bool = False) -> None:
        self.each_epoch = each_epoch
        self.path = folder / LAST
        self._step = -1  # of the state that was saved last
        self._validated = False  # whether that was after its validation

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Give every `ModelCheckpoint` the best checkpoints of the resumed run, in any directory.

        Lightning drops the scores of checkpoints in another directory, and would then take the next
        checkpoint for the best.
        """
        states = checkpoint["callbacks"]
        beside = folder_of(trainer.ckpt_path or "")
        run = strategy_of(trainer).saved.run
        keys = {callback.state_key for callback in _model_checkpoints(trainer)}
        for callback in _model_checkpoints(trainer):
            if callback.state_key not in states:
                continue
            state = states.pop(callback.state_key)
            with state_must_fit("the list of best checkpoints", "callbacks"):
                known = _known_best(callback, state, beside, run)
                lost = bool(state["best_k_models"]) and not known
            if known:
                states[callback.state_key] = known
            if lost and trainer.is_global_zero:
                note(
                    f"the earlier run's best checkpoint {state.get('best_model_path')} is gone: "
                    "the best from here on counts"
                )
        with state_must_fit("the list of best checkpoints", "callbacks"):
            left = [
                key
                for key in states
                if key not in keys
                and key.startswith(ModelCheckpoint.__name__)
                and states[key]["monitor"]
                and states[key]["best_model_path"]
            ]
        if left and trainer.is_global_zero:
            note(
                f"no callback chooses the best checkpoint as {left[0]} has done: the best from "
                "here on counts"
            )

    @override
    def on_step(self, trainer: Trainer, done: int) -> None:
        epochs = trainer.max_epochs
        last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
        over = last_epoch and trainer.is_last_batch
        if over or 0 <= trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True
        if trainer.should_stop or (self.each_epoch and ends_epoch(trainer, done)):
            self.keep_unvalidated(trainer)  # a validation may follow, or none: no row may validate

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._keep(trainer, validated=True)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep(trainer)

    def keep_unvalidated(self, trainer: Trainer) -> None:
        """Save a state that has no validation yet, or never will. Every rank calls it.

        A run that resumes from it validates first.
        """
        for name in [name for name in trainer.callback_metrics if name.startswith("val_")]:
            del trainer.callback_metrics[name]  # of an earlier state
        self._keep(trainer)

    def _keep(self, trainer: Trainer, *, validated: bool = False) -> None:
        if self._step == trainer.global_step and self._validated >= validated:
            return
        self._step = trainer.global_step
        self._validated = validated
        saved = _just_saved(trainer)
        if saved is None:
            saved = new_version(self.path, trainer.global_step)
            trainer.save_checkpoint(saved)
        if trainer.is_global_zero:
            link_checkpoint(self.path, saved)
            clean_up(self.path.parent)
        trainer.strategy.barrier()

    def best_or_last(self, trainer: Trainer) -> str:
        """Return the path of the best checkpoint; the path of the last if no callback chooses a
        best.
        """
        callbacks = _model_checkpoints(trainer)
        best = [c.best_model_path for c in callbacks if c.best_model_path and c.monitor]
        return str(path_to(best[0]) if best else self.path)


def step_of_best(trainer: Trainer) -> int | None:
    """Return the step of the best checkpoint so far; None if there is none."""
    best = [c.best_model_path for c in _model_checkpoints(trainer) if c.monitor]
    with suppress(CheckpointError):  # deleted since
        return read_manifest(best[0]).step if best and best[0] else None
    return None


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]


def _just_saved(trainer: Trainer) -> Path | None:
    """Return the checkpoint that a `ModelCheckpoint` has written in this step, if training can
    resume from it.

    Ignore a `ModelCheckpoint` without monitor: it writes before this step's validation, so its
    checkpoint has the metrics of an earlier validation.
    """
    for callback in _model_checkpoints(trainer):
        resumes = callback.monitor is not None and not callback.save_weights_only
        path = callback._last_checkpoint_saved
        if resumes and path and callback._last_global_step_saved == trainer.global_step:
            return path_to(path)
    return None


def best_known(path: str | Path, meta: Mapping[str, Any], run: str) -> Path | None:
    """Return the best checkpoint of all runs of a model; None if it no longer exists.

    Args:
        path: The last checkpoint of these runs.
        meta: The `meta.pt` of the last checkpoint, with the states of callbacks.
        run: The identity of the run.
    """
    with state_must_fit("the list of best checkpoints", "callbacks"):
        for key, state in dict(meta["callbacks"]).items():
            if key.startswith(ModelCheckpoint.__name__) and state["monitor"] is not None:
                name = state["best_model_path"]
                return find_named(name, folder_of(path), run) if name else None
    return None


def _known_best(
    callback: ModelCheckpoint, state: Mapping[str, Any], beside: Path, run: str
) -> dict[str, Any]:
    """Return the state of a `ModelCheckpoint`, reduced to the best checkpoints that still exist.

    Args:
        callback: The `ModelCheckpoint` of the new run.
        state: The state of the earlier run's `ModelCheckpoint`, from a checkpoint.
        beside: The directory of that checkpoint.
        run: The identity of the run.

    Returns:
        The state; empty if none of the best checkpoints exists. Paths are absolute and normalised,
        so that Lightning recognises the checkpoints of another directory: this run must not delete
        them.
    """
    if callback.monitor is None:  # the newest is the best, so other directories do not matter
        return dict(state) if state["dirpath"] == callback.dirpath else {}
    scores = {  # of the precision that they have, which another precision would change
        os.fspath(path): torch.as_tensor(score)
        for name, score in dict(state["best_k_models"]).items()
        if (path := find_named(name, beside, run)) is not None
    }
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


JOINED_FILE = "snapshots.ckpt"


class KeepSnapshots(Callback):
    """Saves a checkpoint at the end of each epoch, and keeps the latest ones: the mean of their
    outputs predicts better than the last one (Huang et al., "Snapshot Ensembles: Train 1, Get M for
    Free", arXiv 1704.00109). They differ most where tables begin anew at each epoch
    (`optimizer.restart_tables`): each epoch then ends with rows of its own.

    Args:
        folder: The directory of the run's checkpoints.
        count: The number of epochs to keep.

    Attributes:
        kept: The checkpoints, earliest first. A resumed run goes on with those of the run before,
            and deletes none of these unless it writes into the same directory.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count
        self.kept: list[Path] = []

    @override
    def state_dict(self) -> dict[str, Any]:
        return {KEPT: [os.fspath(path.absolute()) for path in self.kept], "count": self.count}

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = checkpoint["callbacks"].get(self.state_key)
        if state is not None:
            beside = folder_of(trainer.ckpt_path or "")
            run = strategy_of(trainer).saved.run
            self.kept = kept_before(state, self.count, beside, run, noted=trainer.is_global_zero)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the state at the end of a whole epoch, and delete the earliest if there are too
        many. A part of an epoch, which `trainer.max_steps` ends, makes no snapshot.
        """
        if trainer.is_last_batch:
            self.keep(trainer)

    def keep(self, trainer: Trainer) -> None:
        """Save the state at the end of an epoch, unless that is done. Every rank calls it."""
        path = self.folder / f"snapshot_{trainer.global_step:06d}.ckpt"
        if path.name in {snapshot.name for snapshot in self.kept}:
            return
        self.kept.append(path)  # before it is saved: a run that resumes from it has it, too
        trainer.save_checkpoint(path)
        for old in self.kept[: -self.count]:
            if trainer.is_global_zero and old.parent == self.folder:
                remove_checkpoint(old)
        self.kept = self.kept[-self.count :]
        trainer.strategy.barrier()


def kept_before(
    state: Mapping[str, Any], count: int, beside: Path, run: str, *, noted: bool = True
) -> list[Path]:
    """Return the latest `count` checkpoints of an earlier run that still exist, earliest first.

    An earlier run deletes its earliest ones while it goes on, also after the checkpoint was written
    that names them. The run that resumes ends these epochs again, and has as many in the end.

    Args:
        state: The state of `KeepSnapshots` in a checkpoint.
        count: The number of epochs to keep.
        beside: The directory of that checkpoint.
        run: The identity of the run that wrote it.
        noted: Whether a note names those that are missing.
    """
    with state_must_fit("the list of snapshots", "snapshots"):
        places = {path: find_named(path, beside, run) for path in state[KEPT][-count:]}
    gone = [path_to(path).name for path, place in places.items() if place is None]
    if gone and noted:
        note(
            f"snapshots={count}: the run of ckpt_path has deleted {', '.join(gone)}; the epochs "
            "that end from here on take their place"
        )
    return [place for place in places.values() if place is not None]


def validate_first(trainer: Trainer, *, over: bool) -> None:
    """Make `fit` of a resumed run validate before it trains, if an unbroken run validates at this
    step.

    Args:
        trainer: The trainer, before `fit`.
        over: Whether the step was the last one, so that no training follows.
    """
    fit = trainer.fit_loop
    fit.run = (  # type: ignore[method-assign]
        partial(_end, trainer) if over else partial(_begin, trainer, fit.run)
    )


def _begin(trainer: Trainer, go_on: Callable[[], None]) -> None:
    fit = trainer.fit_loop
    fit.setup_data()
    assert fit._data_fetcher is not None
    if fit.epoch_loop._should_check_val_fx(fit._data_fetcher):
        _validate(trainer)
        # so Lightning goes on as from a checkpoint whose state was validated
        fit.epoch_loop.val_loop._has_run = False
    go_on()


def _end(trainer: Trainer) -> None:
    fit = trainer.fit_loop
    fit.setup_data()
    fit.on_run_start()
    trainer.should_stop = True
    if fit.epoch_loop._should_check_val_epoch():
        _validate(trainer)
    if not datamodule_of(trainer).position.batches:  # the signal came before the snapshot, too
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


# low bits of a rank's report: the signal; higher bits: the first step whose loss was not finite
SIGNAL_BITS = 8


class LossWatch:
    """A check of the loss of every step of this rank, which makes no GPU wait.

    On the CPU a loss is read when its step ends. On a GPU a loss is copied to the host while queued
    work runs, and is read after the next step has been queued. The host waits for the copy only if
    the host is more than one step ahead, and then the GPU still has one step to run.

    `step` is the first step whose loss is not finite; 0 while all losses are finite.
    """

    def __init__(self) -> None:
        self.step = 0
        # the step, its loss, the event at the end of the copy
        self._under_way: tuple[int, Tensor, Any] | None = None

    def check(self, step: int, loss: Tensor | None) -> None:
        """Check the loss of a step that has just been queued; on a GPU check the loss of the step
        before.

        Args:
            step: The number of the step, from 1 on.
            loss: The scalar loss; None if the step has no loss.
        """
        self.check_pending()  # the step before this one
        if loss is None:
            return
        if loss.device.type != "cuda":
            self._judge(step, float(loss))
            return
        copy = torch.empty((), dtype=loss.dtype, pin_memory=True)
        copy.copy_(loss.detach(), non_blocking=True)
        arrived = torch.cuda.current_stream(loss.device).record_event()
        self._under_way = step, copy, arrived

    def check_pending(self) -> None:
        """Check the loss that is still being copied to the host, if there is one."""
        if self._under_way is not None:
            step, copy, arrived = self._under_way
            self._under_way = None
            arrived.synchronize()
            self._judge(step, float(copy))

    def _judge(self, step: int, loss: float) -> None:
        if not self.step and not math.isfinite(loss):
            self.step = step


class EndTogether(BatchCallback):
    """Ends training early, on all ranks at the same step: after a signal, or when a loss is not
    finite. It must come before callbacks that save.

        a signal, on any rank     checkpoint, then `Stopped` on all ranks; no validation, because a
                                  validation may take longer than the scheduler waits for the end
        a loss that is nan        `TrainingError` on all ranks, with the rank and the step; nothing
                                  is saved

    A rank puts its report (its signal, the step of a loss that is not finite) into the header of
    the counts message of its next batch. All ranks get the report with the counts, without an
    additional message. With look-ahead they get it one step later on the CPU, and two steps later
    on a GPU, because a GPU's loss is read one step late.

    `reason` is a text with the step and the signal that ended training; None if no signal did.

    Args:
        save: Writes a checkpoint of the current state, which has no validation; called on all
            ranks.
        grace: The seconds after a signal in which a checkpoint under way may finish.
    """

    def __init__(
        self, save: Callable[[Trainer], None], grace: float = stopping.GRACE_SECONDS
    ) -> None:
        self.save = save
        self.grace = grace
        self.reason: str | None = None
        self._losses = LossWatch()
        self._report = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report signals to the other ranks from now on.

        An earlier signal ends this rank alone, because there is nothing to save yet.
        """
        self._losses = LossWatch()
        self._report = 0
        self.reason = None
        self._add_to_report(trainer, 0)
        stopping.listen(lambda number: self._add_to_report(trainer, number), self.grace)

    def check(self, trainer: Trainer) -> None:
        """End training after a signal, between two steps. Every rank calls it."""
        self._stop_after_signal(trainer, strategy_of(trainer).comm.all_gather(self._report))

    def _add_to_report(self, trainer: Trainer, bits: int) -> None:
        """Set bits of this rank's report in the headers at once, because look-ahead sends the next
        counts before the next step.
        """
        self._report |= bits
        for shared in strategy_of(trainer).sharded_tables():
            shared.header.wanted = self._report

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        step = trainer.global_step + (not ends_step(trainer, batch_idx + 1))
        judged = strategy_of(trainer).recorded is not None  # by the device itself
        self._losses.check(step, loss if isinstance(loss, Tensor) and not judged else None)
        self._add_to_report(trainer, self._losses.step << SIGNAL_BITS)
        reports_W = self._reports_of_ranks(trainer)
        self._raise_if_not_finite(trainer, reports_W)
        if ends_step(trainer, batch_idx + 1):
            self._stop_after_signal(trainer, reports_W)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the model before a validation, so that whatever goes wrong there, on whichever rank,
        loses no trained step. The save refuses a loss, weights and states that are not finite.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            self.save(trainer)

    @override
    def on_batch(self, trainer: Trainer, done: int) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._stop_after_signal(trainer, self._reports_of_ranks(trainer))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to save a model whose loss was not finite: check on all ranks the losses of the
        last steps, whose reports no counts message has carried yet.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            self._losses.check_pending()
            self._report |= self._losses.step << SIGNAL_BITS
            self._raise_if_not_finite(trainer, strategy_of(trainer).comm.all_gather(self._report))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        stopping.stop_listening()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        stopping.stop_listening()

    def _reports_of_ranks(self, trainer: Trainer) -> list[int]:
        """Return the report of each rank.

        The reports came with the counts. Ranks that exchange none (a model without tables, steps
        that are recorded with their tables) gather the reports.
        """
        strategy = strategy_of(trainer)
        reports_CW = [c.header.wanted_W for c in strategy.sharded_tables() if c.header.wanted_W]
        recorded = strategy.recorded
        if not strategy.sharded_tables() or (recorded is not None and not recorded.exchanges):
            return strategy.comm.all_gather(self._report)
        return [reduce(or_, reports_C) for reports_C in zip(*reports_CW, strict=True)]

    def _raise_if_not_finite(self, trainer: Trainer, reports_W: Sequence[int]) -> None:
        steps = [
            (report >> SIGNAL_BITS, rank)
            for rank, report in enumerate(reports_W)
            if report >> SIGNAL_BITS
        ]
        if steps:
            step, rank = min(steps)
            groups = sorted(trainer.optimizers[0].param_groups, key=lambda group: -group["lr"])
            rates = dict.fromkeys(
                f"optimizer.{str(group.get('name', 'dense')).partition('/')[0]}.lr (now "
                f"{group['lr']:g})"
                for group in groups
            )
            raise TrainingError(
                f"the loss of step {step} is not a finite number on rank {rank}: lower the "
                f"learning rates, {', '.join(rates)}, or look at the numbers of that batch (a "
                "dense column that is huge: dataset.dense_transform=log1p); nothing was saved since"
            )

    def _stop_after_signal(self, trainer: Trainer, reports_W: Sequence[int]) -> None:
        numbers = [(rank, report & (1 << SIGNAL_BITS) - 1) for rank, report in enumerate(reports_W)]
        signals = [(rank, number) for rank, number in numbers if number]
        if not signals:
            return
        strategy = strategy_of(trainer)
        strategy.on_train_end()
        self.save(trainer)
        stopped = stopping.Stopped(signals[0][1])
        ranks = [str(rank) for rank, _ in signals]
        whose = "" if len(ranks) == strategy.comm.world else f" to rank {', '.join(ranks)}"
        self.reason = f"step {trainer.global_step}: {stopped}{whose}"
        raise stopped
