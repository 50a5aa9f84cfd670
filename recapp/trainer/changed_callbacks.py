"""Changes of the settings of callbacks when a run resumes from a checkpoint.

    settings of the checkpoint -> a fresh callback's state   {patience: 2, wait_count: 0}
    settings of this run       -> a fresh callback's state   {patience: 5, wait_count: 0}
    checkpoint                    {patience: 2, wait_count: 1} -> {patience: 5, wait_count: 1}

Some callbacks keep settings in their state, and Lightning would restore them over the new ones. No
callback says which entries of its state are settings. But these are the entries that differ between
two fresh callbacks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from recapp.console import note
from recapp.errors import ConfigError
from recapp.settings.values import shown


class ChangedCallbacks(Callback):
    """Writes changed settings of callbacks into their states in a checkpoint, before Lightning
    restores these.

    Args:
        changed: For each callback with changed settings their dotted name, the callback that the
            checkpoint's settings make, or None if it is of another class, and that of this run's.
    """

    def __init__(self, changed: Sequence[tuple[str, Callback | None, Callback]]) -> None:
        self.changed = changed

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Edit the states. Note on rank 0 that a callback of another class, or one that watches
        another metric, begins anew.

        Raises:
            ConfigError: A changed setting and the training so far have made one value.
        """
        states = checkpoint["callbacks"]
        for setting, before, now in self.changed:
            key = now.state_key
            of_before = key if before is None else before.state_key
            # the best checkpoints have a reader of their own (`recapp/trainer/keep_last.py`)
            other = before is None or (of_before != key and not isinstance(now, ModelCheckpoint))
            if other and states.pop(of_before, None) and trainer.is_global_zero:
                note(f"{setting} is another one than the checkpoint's; it begins anew")
            elif before is not None and key in states and of_before == key:
                states[key] = with_changes(
                    states[key], before.state_dict(), now.state_dict(), setting
                )


def with_changes(stored: Any, before: Any, now: Any, setting: str, where: str = "") -> Any:
    """Return a stored state with the values that changed settings have given.

    Args:
        stored: The state in a checkpoint.
        before: The state of a fresh object that the checkpoint's settings make.
        now: The state of a fresh object that this run's settings make.
        setting: The dotted name of the settings, for the error.
        where: The place in the state, for the error.

    Raises:
        ConfigError: A value that the settings change is not that of a fresh object any more.
    """
    if _same(before, now):
        return stored
    if all(isinstance(each, Mapping) for each in (stored, before, now)):
        return {
            key: with_changes(
                stored.get(key), before.get(key), now.get(key), setting, f"{where}.{key}"
            )
            for key in [*stored, *(now.keys() - stored.keys())]
            if key in now or key not in before
        }
    if not _same(stored, before):
        raise ConfigError(
            f"{setting}: its state{where}={shown(stored)} follows from a changed setting and from "
            f"the training so far: leave {setting} as it was when the checkpoint was saved"
        )
    return now


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)
