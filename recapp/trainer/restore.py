"""Lightning's restoration of a training run: settings that have changed since the checkpoint hold,
and an error is one line that names the part of the checkpoint and what to do.

    checkpoint   optimizer.dense.lr .01, which a schedule has reduced to .004 by now
    settings     optimizer.dense.lr .001
    resumed      at .0004, on the same schedule

Lightning restores an optimiser with its rates and all other hyper-parameters, and a schedule with
its initial rates. It would silently ignore new values in the settings.

Some callbacks keep settings in their state, and Lightning would restore them over the new ones. So
a callback whose settings have changed begins anew, with a note.

The checksum of a checkpoint tells damage, so a state is not judged before it is restored.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recapp.console import note, short_path
from recapp.errors import CheckpointError, ConfigError, RecappError
from recapp.optim.named_rules import settings_of_table
from recapp.optim.optimizer import HybridOptimizer, groups_of_tables
from recapp.settings.records import find_constructor
from recapp.settings.values import shown
from recapp.stored.plain_parts import WRONG_STATE, in_words, state_must_fit

Settings = Mapping[str, Any]
MakeSchedule = Callable[[Settings, Optimizer, Any], LRScheduler]
# The argument of a schedule that is the number of steps of the run.
TOTAL = "total_steps"
NEW_SCHEDULE = {"_target_", "monitor", "mode"}  # a change of one of them restarts the schedule
# The group of settings that each part of Lightning's restoration must fit.
SETTING_OF = {
    "datamodule": "dataset",
    "callbacks": "callbacks",
    "loops": "trainer",
    "optimizers": "optimizer",
    "lr_schedulers": "optimizer.schedule",
}
# The modules of schedules that begin with all that they keep; others may begin with less.
KNOWN_SCHEDULES = ("torch.optim.", "recapp.", "lightning.")


def restore_in_one_line(trainer: Trainer) -> None:
    """Turn exceptions of Lightning's restoration into a CheckpointError that names the part.

    The exceptions of a callback of the user's own are such errors, too: they name the callback.
    """
    connector = trainer._checkpoint_connector
    for part in SETTING_OF:
        of_lightning = getattr(type(connector), f"restore_{part}").__get__(connector)
        setattr(connector, f"restore_{part}", partial(_restore, trainer, of_lightning, part))


def _restore(trainer: Trainer, restore: Callable[[], None], part: str) -> None:
    try:
        checkpoint = trainer._checkpoint_connector._loaded_checkpoint
        if checkpoint and part == "optimizers":
            _complete_groups(trainer, checkpoint["optimizer_states"])
        if checkpoint and part == "lr_schedulers":
            _check_schedules(trainer, checkpoint["lr_schedulers"])
        restore()
    except WRONG_STATE as error:
        if isinstance(error, RecappError):
            raise
        frames = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
        owner = next((each for each in frames if isinstance(each, Callback)), None)
        of_owner = "" if owner is None else f" ({type(owner).__module__}.{type(owner).__name__})"
        raise CheckpointError(
            f"checkpoint {short_path(trainer.ckpt_path or '')}: the state of {part}{of_owner} does "
            f"not fit: set {SETTING_OF[part]} as it was when it was saved, or use another "
            f"checkpoint ({in_words(error)})"
        ) from error


def _complete_groups(trainer: Trainer, states: Sequence[dict[str, Any]]) -> None:
    """Add hyper-parameters that an older torch did not write to the stored param groups."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):  # again: it has its state since then
            callback.on_fit_start(trainer, trainer.lightning_module)
    for optimizer, state in zip(trainer.optimizers, states, strict=True):
        if not isinstance(optimizer, HybridOptimizer):
            continue
        optimizer.take_groups()
        fresh = optimizer.state_dict()
        # tables that are frozen now, or were, may take a group away or bring one
        state["sparse"] = groups_of_tables(state["sparse"], fresh["sparse"])
        groups = [*state["dense"]["param_groups"], *state["sparse"]]
        for group, new in zip(
            groups, [*fresh["dense"]["param_groups"], *fresh["sparse"]], strict=True
        ):
            for key, value in new.items():
                stored = group.get(key, value)
                if isinstance(value, list | tuple) != isinstance(stored, list | tuple):
                    raise ValueError(f"{key}={stored} is of another class of optimizer")
            group.update({**new, **group})


def _check_schedules(trainer: Trainer, states: Sequence[dict[str, Any]]) -> None:
    """Check that there is a state for each schedule, or none if they begin anew, and that it is of
    its class: a schedule takes every state, and goes on by the settings in it.
    """
    configs = trainer.lr_scheduler_configs
    if states and len(states) != len(configs):
        raise ValueError(f"there are {len(states)} states and {len(configs)} schedules")
    for config, state in zip(configs, states, strict=False):
        kind = type(config.scheduler)
        known = kind.__module__.startswith(KNOWN_SCHEDULES)
        for key in config.scheduler.state_dict() if known else ():
            if key not in state and not key.startswith("_"):  # some are of one version of torch
                raise ValueError(f"{kind.__name__} has no {key}")


class ChangedOptimizer(Callback):
    """Writes changed settings into the optimiser state of a checkpoint, before Lightning restores
    the state.

    Args:
        before: The group `optimizer` of the settings in the checkpoint; None if it has none.
        now: The group `optimizer` of this run's settings.
        make_schedule: Makes a schedule of an optimiser from its settings; the third argument is
            the number of steps of the run.
    """

    def __init__(self, before: Settings | None, now: Settings, make_schedule: MakeSchedule) -> None:
        self.before = before or {}
        self.changed = {
            part: _changed(self.before.get(part), now.get(part))
            for part in ("dense", "sparse", "schedule")
        }
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
        for group in fresh.sparse_groups:
            # all tables of a group have the same rule now, so the first one stands for all
            first = group["tables"][0]
            rules = (self.before.get("sparse"), self.now["sparse"])
            keys.append(_changed(*(settings_of_table(first, rule) for rule in rules)))
        # a schedule cannot use the history of another metric
        new_schedule = not NEW_SCHEDULE.isdisjoint(self.changed["schedule"])
        for group, new, names in zip(groups, fresh.param_groups, keys, strict=True):
            _take(
                group,
                new,
                [*names, "lr"] if new_schedule else names,
                in_proportion=not new_schedule,
            )
        configs = [] if new_schedule else trainer.lr_scheduler_configs
        checkpoint["lr_schedulers"] = [
            self._edit_schedule(state, config.scheduler, fresh, groups)
            for state, config in zip(checkpoint["lr_schedulers"], configs, strict=not new_schedule)
        ]

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
        of_before = self.make_schedule(arguments, optimizer, state.get(TOTAL))
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
            for each in (state, of_before.state_dict(), now)
        )
        edited: dict[str, Any] = with_changes(stored, before, new, "optimizer.schedule")
        others = {
            key: value
            for key, value in new.items()
            if isinstance(value, list) and len(value) == len(groups) != len(edited.get(key, value))
        }
        return {**edited, **others, **of_groups}  # others: of another number of param groups

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
    stored, new = (_of_one_parameter(settings) for settings in (before, now))
    one = stored.param_groups[0]
    other = new.param_groups[0]
    changed = [key for key in other if key != "params" and one.get(key) != other[key]]
    try:
        stored.step()
        new.load_state_dict({**new.state_dict(), "state": stored.state_dict()["state"]})
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


def _of_one_parameter(plain: Settings) -> Any:
    """Return an optimiser of one parameter that has a gradient."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    arguments = {key: value for key, value in plain.items() if key != "_target_"}
    return find_constructor(plain["_target_"], "optimizer.dense")([parameter], **arguments)


def _changed(before: Settings | None, now: Settings | None) -> list[str]:
    old = before or {}
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
    stored.update({key: new[key] for key in keys if key in new and key != "lr"})
    if "lr" not in keys:
        return
    stored["lr"] = (
        stored["lr"] / before * new["initial_lr"] if in_proportion and before else new["lr"]
    )
    stored.pop("initial_lr", None)
    if "initial_lr" in new:
        stored["initial_lr"] = new["initial_lr"]


@dataclass(eq=False)
class ChangedCallbacks(Callback):
    """Lets callbacks whose settings have changed begin anew: Lightning would restore the settings
    that are in their states over the new ones.

    Args:
        changed: The dotted name of each such callback's settings, and a callback that they make.
    """

    changed: Sequence[tuple[str, Callback]]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Drop the states, and note that on rank 0."""
        states = checkpoint["callbacks"]
        for setting, now in self.changed:
            # the best checkpoints have a reader of their own (`recapp/trainer/keep_checkpoints.py`)
            if isinstance(now, ModelCheckpoint):
                continue
            known = any(key.startswith(type(now).__qualname__) for key in states)
            states.pop(now.state_key, None)
            if known and trainer.is_global_zero:
                note(f"{setting} is another one than the checkpoint's; it begins anew")


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
