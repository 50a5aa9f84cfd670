"""Keep the models of the last epochs: the mean of their outputs predicts better than the last one.

    checkpoints/snapshot_000206.ckpt     the end of epoch 2
    checkpoints/snapshot_000309.ckpt     the end of epoch 3
    ...                                  recapp/stored/joined_checkpoint.py joins them

One run gives several models (Huang et al., "Snapshot Ensembles: Train 1, Get M for Free", arXiv
1704.00109). They differ most where tables begin anew at each epoch (`optimizer.restart_tables`):
each epoch then ends with rows of its own.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from recapp.errors import CheckpointError
from recapp.stored.checkpoint import remove_checkpoint
from recapp.stored.directories import is_checkpoint


class KeepSnapshots(Callback):
    """Saves a checkpoint at the end of each epoch, and keeps the latest ones.

    Args:
        folder: The directory of the run's checkpoints.
        count: The number of epochs to keep.

    Attributes:
        kept: The checkpoints, earliest first. A resumed run goes on with those of the run before,
            and deletes none of these.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count
        self.kept: list[Path] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints that are kept."""
        return {"kept": [str(path.absolute()) for path in self.kept]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the checkpoints of an earlier run.

        Raises:
            CheckpointError: One of them does not exist any more.
        """
        self.kept = [Path(name) for name in state_dict["kept"]]
        for path in self.kept:
            if not is_checkpoint(path):
                raise CheckpointError(
                    f"snapshots={self.count}: {path}, which the run of ckpt_path kept, is gone: "
                    "put it back, or set snapshots=1"
                )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the state at the end of the epoch, and delete the earliest if there are too many."""
        path = self.folder / f"snapshot_{trainer.global_step:06d}.ckpt"
        if path in self.kept:
            return
        trainer.save_checkpoint(path)
        self.kept.append(path)
        for old in self.kept[: -self.count]:
            if trainer.is_global_zero and old.parent == self.folder:
                remove_checkpoint(old)
        self.kept = self.kept[-self.count :]
        trainer.strategy.barrier()
