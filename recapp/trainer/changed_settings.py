"""Changes of the settings of optimiser and callbacks when a run resumes from a checkpoint.

    checkpoint   optimizer.dense.lr .01, which a schedule has reduced to .004 by now
    settings     optimizer.dense.lr .001
    resumed      at .0004, on the same schedule

Lightning restores an optimiser with its rates and all other hyper-parameters, and a schedule with
its initial rates. It would silently ignore new values in the settings.

    settings of the checkpoint -> a fresh callback's state   {patience: 2, wait_count: 0}
    settings of this run       -> a fresh callback's state   {patience: 5, wait_count: 0}
    checkpoint                    {patience: 2, wait_count: 1} -> {patience: 5, wait_count: 1}

Some callbacks keep settings in their state, and Lightning would restore them over the new ones. No
callback says which entries of its state are settings. But these are the entries that differ between
two fresh callbacks.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from recapp.console import note
from recapp.errors import ConfigError
from recapp.optim.named_rules import settings_of_table
from recapp.optim.optimizer import groups_of_tables
from recapp.settings.check_settings import find_constructor
from recapp.settings.values import shown
from recapp.stored.meta_file import in_words, state_must_fit

Settings = Mapping[str, Any]
MakeSchedule = Callable[[Settings, Optimizer, Any], LRScheduler]
TOTAL = "total_steps"
"""The argument of a schedule that is the number of steps of the run."""
PARTS = ("dense", "sparse", "schedule")
NEW_SCHEDULE = {"_target_", "monitor", "mode"}  # a change of one of them restarts the schedule


class ChangedOptimizer(Callback):
    """Writes changed settings into the optimiser state of a checkpoint, before Lightning restores
    the state.

    Args:
        before: The group `optimizer` of the settings in the checkpoint. A damaged file may hold
            any value there.
        now: The group `optimizer` of this run's settings.
        make_schedule: Makes a schedule of an optimiser from its settings; the third argument is
            the number of steps of the run.
    """

    def __init__(self, before: Any, now: Settings, make_schedule: MakeSchedule) -> None:
        stored = before if isinstance(before, Mapping) else {}  # a damaged file may hold any value
        self.changed = {part: _changed(stored.get(part), now.get(part)) for part in PARTS}
        self.before = stored
        self.now = now
        self.make_schedule = make_schedule

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Edit the optimiser's state before it is restored, and note every change on rank 0.

        Raises:
            ConfigError: Training cannot go on with a changed setting.
        """
        if not trainer.optimizers:
            return
        with state_must_fit("the optimizer's state", "optimizer"):
            fresh: Any = trainer.optimizers[0]
            (stored,) = checkpoint["optimizer_states"]
            # tables that are frozen, or are not any more, may take a group away or bring one
            stored["sparse"] = groups_of_tables(stored["sparse"], fresh.sparse_groups)
            self._edit(fresh, stored, trainer, checkpoint)
        if trainer.is_global_zero:
            for part, keys in self.changed.items():
                self._note(part, keys)

    def _edit(
        self, fresh: Any, stored: dict[str, Any], trainer: Trainer, checkpoint: dict[str, Any]
    ) -> None:
        dense = list(self.changed["dense"])
        if "_target_" in self.changed["dense"]:
            stored["dense"] = fresh.dense.state_dict()
        elif dense:
            dense += _changed_in_groups(self.before["dense"], self.now["dense"])
        groups = [*stored["dense"]["param_groups"], *stored["sparse"]]
        keys = [dense] * len(fresh.dense.param_groups)
        keys += [self._changed_of(group) for group in fresh.sparse_groups]
        # a schedule cannot use the history of another metric
        new_schedule = not NEW_SCHEDULE.isdisjoint(self.changed["schedule"])
        for group, new, own in zip(groups, fresh.param_groups, keys, strict=True):
            _take(group, new, [*own, "lr"] if new_schedule else own, in_proportion=not new_schedule)
        if new_schedule:
            checkpoint["lr_schedulers"] = []
        for number, config in enumerate(trainer.lr_scheduler_configs):
            if not new_schedule:
                states = checkpoint["lr_schedulers"]
                states[number] = self._edit_schedule(
                    states[number], config.scheduler, fresh, groups
                )

    def _edit_schedule(
        self, state: dict[str, Any], schedule: Any, fresh: Optimizer, groups: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the state of a schedule with its changed settings, which it may also keep in param
        groups. The number of steps of the run is such a setting.
        """
        now = schedule.state_dict()
        same = now.get(TOTAL) == state.get(TOTAL) and len(state["_last_lr"]) == len(groups)
        if same and not any(self.changed.values()):
            return state
        optimizer = copy(fresh)
        optimizer.param_groups = [
            {**group, "params": [], "lr": group.get("initial_lr", group["lr"])}
            for group in fresh.param_groups
        ]
        for group in optimizer.param_groups:
            group.pop("initial_lr", None)
        arguments = dict(self.before["schedule"])
        if isinstance(schedule, ReduceLROnPlateau):
            arguments["mode"] = now["mode"]  # which its metric says
        made = self.make_schedule(arguments, optimizer, state.get(TOTAL))
        pairs = zip(groups, optimizer.param_groups, fresh.param_groups, strict=True)
        for group, first, other in pairs:
            odd = [key for key in first if key != "lr" and first[key] != other[key]]
            group.update({key: other[key] for key in odd if key != "params"})
        of_groups = {
            "base_lrs": [group.get("initial_lr", group["lr"]) for group in groups],
            "_last_lr": [group["lr"] for group in groups],
        }
        stored, before, new = (
            {key: value for key, value in each.items() if key not in of_groups}
            for each in (state, made.state_dict(), now)
        )
        edited: dict[str, Any] = with_changes(stored, before, new, "optimizer.schedule")
        others = {
            key: value
            for key, value in new.items()
            if isinstance(value, list) and len(value) == len(groups) != len(edited.get(key, value))
        }
        return {**edited, **others, **of_groups}  # others: of another number of param groups

    def _changed_of(self, group: Mapping[str, Any]) -> list[str]:
        """Return the changed settings of the row rule of a param group. All tables of a group have
        the same rule now, so the first table stands for all.
        """
        before, now = (
            settings_of_table(group["tables"][0], settings)
            for settings in (self.before.get("sparse"), self.now["sparse"])
        )
        return _changed(before, now)

    def _note(self, part: str, keys: list[str]) -> None:
        new = self.now.get(part) or {}
        for key in keys:
            if key == "_target_":
                begins = "" if part == "sparse" else "; it begins anew"
                note(f"optimizer.{part} is another one than the checkpoint's{begins}")
            elif "_target_" not in keys:
                note(f"optimizer.{part}.{key}={new.get(key)} takes the place of the checkpoint's")


def _changed_in_groups(before: Settings, now: Settings) -> list[str]:
    """Return the hyper-parameters that changed settings of the dense optimiser give its param
    groups; their names need not be those of the settings. Check with one parameter that the
    optimiser can go on with the state of the checkpoint's: a setting may need more state.

    Raises:
        ConfigError: It cannot.
    """
    stored, new = (_tried(settings) for settings in (before, now))
    groups = new.state_dict()["param_groups"]
    one = stored.param_groups[0]
    other = new.param_groups[0]
    changed = [key for key in other if key != "params" and one.get(key) != other[key]]
    try:
        stored.step()
        new.load_state_dict({**stored.state_dict(), "param_groups": groups})
        new.step()
    except LookupError as error:
        names = ", ".join(f"optimizer.dense.{key}" for key in _changed(before, now))
        raise ConfigError(
            f"{names}: the state of the checkpoint's optimizer lacks what this one needs "
            f"({in_words(error)}): leave it as it was, or choose another class of optimizer, which "
            "begins anew"
        ) from error
    except Exception:  # nothing is known: some optimisers step on GPUs alone
        pass
    return changed


def _tried(given: Settings) -> Optimizer:
    """Return an optimiser of one parameter that has a gradient."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    arguments = {key: value for key, value in given.items() if key != "_target_"}
    made: Optimizer = find_constructor(given["_target_"], "optimizer.dense")(
        [parameter], **arguments
    )
    return made


def _changed(before: Any, now: Settings | None) -> list[str]:
    old = before if isinstance(before, Mapping) else {}
    new = now or {}
    return sorted(
        key for key in {*old, *new} if key not in old or key not in new or old[key] != new[key]
    )


def _take(
    stored: dict[str, Any], new: Mapping[str, Any], keys: list[str], *, in_proportion: bool
) -> None:
    """Copy some hyper-parameters of a new param group into a stored param group.

    Args:
        stored: The param group of the checkpoint; changed in place.
        new: The param group that the settings make.
        keys: The hyper-parameters to copy.
        in_proportion: Whether to scale a new learning rate by the factor by which the schedule has
            scaled the old rate.
    """
    before = stored.get("initial_lr")
    for key in keys:
        if key in new and key != "lr":
            stored[key] = new[key]
    if "lr" not in keys:
        return
    stored["lr"] = (
        stored["lr"] / before * new["initial_lr"] if in_proportion and before else new["lr"]
    )
    stored.pop("initial_lr", None)
    if "initial_lr" in new:
        stored["initial_lr"] = new["initial_lr"]


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
            # the best checkpoints have a reader of their own (`recapp/trainer/keep_checkpoints.py`)
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
