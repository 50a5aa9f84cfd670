"""Lightning's restoration of a training run: each state is judged before it is restored, and an
error is one line that names the checkpoint, the part and what to do.

    callbacks, loops, schedules, position    stored state -> the form of this run's own -> restored
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from traceback import walk_tb
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Timer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recapp.console import short_path
from recapp.errors import CheckpointError, RecappError
from recapp.optim.optimizer import HybridOptimizer, groups_of_tables
from recapp.optim.rules import WITHOUT_RATE
from recapp.stored.meta_file import (
    WRONG_STATE,
    check_form,
    in_words,
    numbers_in,
    state_must_fit,
)
from recapp.trainer.data_protocols import KeepsPosition, datamodule_of

OWN = ("recapp.", "lightning.")
NO_NUMBERS = ("params", "name", "tables")  # of a param group
OTHER_SHAPES = ("torch.optim._adafactor", "torch.optim.lbfgs", "torch.optim._muon")
"""Optimisers whose state has other shapes than the parameters."""
State = Mapping[str, Any]


def restore_in_one_line(trainer: Trainer) -> None:
    """Make Lightning judge the states of a checkpoint before it restores them, and turn exceptions
    of the restoration into a CheckpointError.

    The exceptions of a callback of the user's own are such errors, too: they name the callback.
    """
    connector = trainer._checkpoint_connector
    for part, (setting, judge) in {
        "datamodule": ("dataset", _judge_position),
        "callbacks": ("callbacks", _judge_callbacks),
        "loops": ("trainer", _judge_loops),
        "optimizers": ("optimizer", _judge_optimizers),
        "lr_schedulers": ("optimizer.schedule", _judge_schedules),
    }.items():
        of_lightning = getattr(type(connector), f"restore_{part}").__get__(connector)
        restore = partial(_restore, trainer, of_lightning, part, setting, judge)
        setattr(connector, f"restore_{part}", restore)


def check_groups(optimizers: Iterable[Optimizer], found: State, rules: Mapping[str, str]) -> None:
    """Check that a checkpoint has param groups of tables, unless its tables were frozen.

    Args:
        optimizers: The optimisers of this run.
        found: The plain part of the checkpoint.
        rules: The name of the row rule of each table in the checkpoint.

    Raises:
        CheckpointError: It has none, and a table of this run was trained.
    """
    fixed = {rule.name for rule in WITHOUT_RATE}
    with state_must_fit("the optimizer's state", "optimizer"):
        for optimizer, state in zip(optimizers, found["optimizer_states"], strict=False):
            if not isinstance(optimizer, HybridOptimizer) or state["sparse"]:
                continue
            tables = [t for group in optimizer.sparse_groups for t in group.get("tables", ())]
            for table in (t for t in tables if t in rules and rules[t] not in fixed):
                raise ValueError(f"it has no param group of table {table}, which it has trained")


def _restore(
    trainer: Trainer,
    restore: Callable[[], None],
    part: str,
    setting: str,
    judge: Callable[[Trainer, State], None],
) -> None:
    try:
        if found := trainer._checkpoint_connector._loaded_checkpoint:
            judge(trainer, found)
        restore()
    except WRONG_STATE as error:
        if isinstance(error, RecappError):
            raise
        frames = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
        owner = next((each for each in frames if isinstance(each, Callback)), None)
        of_owner = "" if owner is None else f" ({type(owner).__module__}.{type(owner).__name__})"
        raise CheckpointError(
            f"checkpoint {short_path(trainer.ckpt_path or '')}: the state of {part}{of_owner} does "
            f"not fit: set {setting} as it was when it was saved, or use another checkpoint "
            f"({in_words(error)})"
        ) from error


def _judge_position(trainer: Trainer, found: State) -> None:
    data = datamodule_of(trainer)
    if isinstance(data, KeepsPosition) and type(data).__module__.startswith(OWN):
        name = type(data).__qualname__
        counts = {key: n for key, n in data.state_dict().items() if type(n) is int}
        check_form(found.get(name, counts), counts, name)


def _judge_callbacks(trainer: Trainer, found: State) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = found["callbacks"].get(callback.state_key)
        if state is not None and type(callback).__module__.startswith(OWN):
            form = callback.state_dict()
            if form and not state:
                raise ValueError(f"{callback.state_key} is empty")
            form = numbers_in(form) if isinstance(callback, Timer) else form
            check_form(state, form, callback.state_key)


def _judge_loops(trainer: Trainer, found: State) -> None:
    if trainer.training:
        form = trainer.fit_loop.state_dict()
        check_form(found["loops"]["fit_loop"], form, "fit_loop", whole=True)


def _judge_schedules(trainer: Trainer, found: State) -> None:
    """Judge the states of torch's schedules, and leave out what is no state of theirs. What a
    schedule of the user's own keeps is known to itself alone: it may begin with less.
    """
    states = found["lr_schedulers"]
    configs = trainer.lr_scheduler_configs
    if states and len(states) != len(configs):
        raise ValueError(f"there are {len(states)} states and {len(configs)} schedules")
    for number, (config, state) in enumerate(zip(configs, states, strict=False)):
        if type(config.scheduler).__module__.startswith((*OWN, "torch.optim.")):
            states[number] = _judged(config.scheduler, state)


def _judged(schedule: LRScheduler, state: Any) -> dict[str, Any]:
    form = {k: numbers_in(v) if "lr" in k else v for k, v in schedule.state_dict().items()}
    name = type(schedule).__name__
    check_form(state, form, name)
    for key in form:
        if key not in state and not key.startswith("_"):
            raise ValueError(f"{name} has no {key}")
    return {key: value for key, value in state.items() if key in form}


def _judge_optimizers(trainer: Trainer, found: State) -> None:
    """Judge hyper-parameters and the shapes of states, and add hyper-parameters that an older torch
    did not write.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):  # again: it has its state since then
            callback.on_fit_start(trainer, trainer.lightning_module)
    for optimizer, state in zip(trainer.optimizers, found["optimizer_states"], strict=True):
        if not isinstance(optimizer, HybridOptimizer):
            continue
        optimizer.take_groups()
        fresh = optimizer.state_dict()
        # tables that are frozen now, or were, may take a group away or bring one
        state["sparse"] = groups_of_tables(state["sparse"], fresh["sparse"])
        for stored, own in (
            (state["dense"]["param_groups"], fresh["dense"]["param_groups"]),
            (state["sparse"], fresh["sparse"]),
        ):
            for one, form in zip(stored, own, strict=True):
                numbers = {key: value for key, value in form.items() if key not in NO_NUMBERS}
                check_form(one, numbers_in(numbers), f"group {form.get('name', '')}")
                one.update({**numbers, **one, "lr": one["lr"]})
        home = type(optimizer.dense).__module__
        if home.startswith("torch.optim.") and home not in OTHER_SHAPES:
            _judge_shapes(optimizer.dense, state["dense"]["state"])


def _judge_shapes(dense: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    parameters = [p for group in dense.param_groups for p in group["params"]]
    for number, values in state.items():
        shapes = {(), (1,), tuple(parameters[number].shape)}
        for name, value in values.items():
            known = value is None or (name == "step" and isinstance(value, int | float))
            if not known and tuple(value.shape) not in shapes:
                raise ValueError(f"{name} of parameter {number} is no number for each weight")
