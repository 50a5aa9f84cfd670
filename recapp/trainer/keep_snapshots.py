"""Keep the models of the last epochs: the mean of their outputs predicts better than the last one.

    checkpoints/snapshot_000206.ckpt     the end of epoch 2
    checkpoints/snapshot_000309.ckpt     the end of epoch 3
    checkpoints/snapshots.ckpt           recapp/stored/joined_checkpoint.py joins them

One run gives several models (Huang et al., "Snapshot Ensembles: Train 1, Get M for Free", arXiv
1704.00109). They differ most where tables begin anew at each epoch (`optimizer.restart_tables`):
each epoch then ends with rows of its own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from recapp import console
from recapp.stored.checkpoint import remove_checkpoint
from recapp.stored.meta_file import check_form, state_must_fit
from recapp.stored.run_files import KEPT, find_named, folder_of
from recapp.trainer.strategy import strategy_of

JOINED_FILE = "snapshots.ckpt"


class KeepSnapshots(Callback):
    """Saves a checkpoint at the end of each epoch, and keeps the latest ones.

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

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints that are kept, and their greatest number."""
        return {KEPT: [str(path.absolute()) for path in self.kept], "count": self.count}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take over the checkpoints of an earlier run."""
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
        if path.name in {kept.name for kept in self.kept}:
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
        check_form(state, {KEPT: [""] * len(state[KEPT])}, "KeepSnapshots")
        found = {path: find_named(path, beside, run) for path in state[KEPT][-count:]}
    gone = [Path(path).name for path, here in found.items() if here is None]
    if gone and noted:
        console.note(
            f"snapshots={count}: the run of ckpt_path has deleted {', '.join(gone)}; the epochs "
            "that end from here on take their place"
        )
    return [here for here in found.values() if here is not None]
