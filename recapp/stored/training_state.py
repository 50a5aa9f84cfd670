"""Check the part of a checkpoint that Lightning restores, before Lightning does: its own errors are
tracebacks.

An object of the run, such as a callback or a schedule, has a state of its own at its start. This is
the form that its stored state must have: the same types, with counts and finite numbers.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from recapp.errors import CheckpointError, RecappError
from recapp.settings.values import shown

STATE: dict[str, Any] = {
    "state_dict": {},
    "loops": {},
    "callbacks": {},
    "optimizer_states": [],
    "lr_schedulers": [],
    "epoch": 0,
    "global_step": 0,
    "pytorch-lightning_version": "",
}
"""The form of Lightning's state."""
OF_MODEL = "model."  # the prefix of dense parameters' names in Lightning's state
NEEDED = ("state_dict", "pytorch-lightning_version")
WRONG_STATE = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    OSError,
)
"""The exceptions of a reader that gets another state than it wrote."""
MOST = 2**48  # steps and the like; no run counts so far
VERSION = re.compile(r"\d+\.\d+(\.\w+)*(\+[\w.]+)?")


def check_state(meta: Mapping[str, Any], path: object, *, trains: bool = False) -> None:
    """Check that Lightning wrote the plain part of a checkpoint.

    Args:
        meta: The plain part of the checkpoint.
        path: The checkpoint, for messages.
        trains: Whether training goes on from it, which needs all entries.

    Raises:
        CheckpointError: An entry is missing or of another type.
    """
    for name, form in STATE.items():
        if name not in meta and name not in NEEDED and not trains:
            continue
        if name not in meta:
            fault = f"it has no {name}"
        else:
            fault = _fault(meta[name], form, name)
        if fault:
            raise CheckpointError(
                f"checkpoint {path} holds no state of a training run: {fault}; use another "
                "checkpoint"
            )
    if not VERSION.fullmatch(meta["pytorch-lightning_version"]):
        raise CheckpointError(
            f"checkpoint {path} names no version of Lightning; use another checkpoint"
        )


def check_form(state: Any, form: Any, where: str, *, whole: bool = False) -> None:
    """Check that a stored state has the form of the state that an object of this run has.

    Args:
        state: The stored state.
        form: The state of the object at its start.
        where: The name of the state, for the error.
        whole: Whether it must have all entries; if not, its reader knows which ones it needs.

    Raises:
        ValueError: A part of the state has another type, is no finite number, or is a negative
            count.
    """
    if fault := _fault(state, form, where, whole):
        raise ValueError(fault)


def numbers_in(form: Any) -> Any:
    """Return a form in which whole numbers are numbers, such as a learning rate of 1."""
    if isinstance(form, Mapping):
        return {key: numbers_in(value) for key, value in form.items()}
    if isinstance(form, list | tuple):
        return [numbers_in(value) for value in form]
    return float(form) if type(form) is int else form


def _fault(state: Any, form: Any, where: str, whole: bool = False) -> str:
    """Return the first part of a state that has not its form; an empty text if all have."""
    pairs: Iterator[tuple[Any, Any, str]] = iter(())
    if isinstance(form, Mapping):
        fits = isinstance(state, Mapping)
        if fits and whole and (missing := form.keys() - state.keys()):
            return f"{where} has no {min(missing)}"
        shared = state.keys() & form.keys() if fits else ()
        pairs = ((state[key], form[key], f"{where}.{key}") for key in sorted(shared, key=str))
    elif isinstance(form, list | tuple):
        fits = isinstance(state, list | tuple) and len(state) == (len(form) or len(state))
        if fits and form:
            names = (f"{where}[{number}]" for number in range(len(form)))
            pairs = zip(state, form, names, strict=True)
    else:
        fits = _is_alike(state, form)
    if not fits:
        return f"{where}={shown(state)} is a {type(state).__name__}, such as {shown(form)} is right"
    return next((fault for pair in pairs if (fault := _fault(*pair, whole))), "")


def _is_alike(state: Any, form: Any) -> bool:
    """Return whether a single value may stand where another one does at the start."""
    if type(form) is int:
        return type(state) is int and min(form, 0) <= state < MOST
    if isinstance(form, float):
        is_number = isinstance(state, int | float) and not isinstance(state, bool)
        return is_number and (math.isfinite(state) or (not math.isfinite(form) and state == state))
    if isinstance(form, Tensor):
        return isinstance(state, Tensor) and (state.shape, state.dtype.is_floating_point) == (
            form.shape,
            form.dtype.is_floating_point,
        )
    if form is None:  # nothing yet
        return not isinstance(state, Mapping | list | tuple | set)
    return type(state) is type(form)


@contextmanager
def state_must_fit(what: str, setting: str) -> Iterator[None]:
    """Turn torch's exception for a state that does not fit into an error of one line.

    Args:
        what: The name of the state, for the message.
        setting: The group of settings that the state must fit.

    Raises:
        CheckpointError: The state does not fit.
    """
    try:
        yield
    except WRONG_STATE as error:
        if isinstance(error, RecappError):
            raise
        raise CheckpointError(
            f"{what} of the checkpoint does not fit: set {setting} as it was when it was saved, or "
            f"use another checkpoint ({in_words(error)})"
        ) from error


def in_words(error: Exception) -> str:
    """Return the exception of a reader of states in one line."""
    text = " ".join(str(error).split())
    text = re.sub(r"^Error\(s\) in loading state_dict for \w+: ", "", text)
    return f"{type(error).__name__}: {text[:200]}"


def dense_state(meta: Mapping[str, Any], of_model: str = OF_MODEL) -> dict[str, Tensor]:
    """Return the dense part's state, by the names of parameters in the model."""
    stored: Mapping[str, Tensor] = meta["state_dict"]
    return {
        name.removeprefix(of_model): values
        for name, values in stored.items()
        if name.startswith(of_model)
    }
