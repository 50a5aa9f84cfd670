"""Checks of the part of a checkpoint that Lightning restores, made first because Lightning's own
errors there are tracebacks.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from recapp.errors import CheckpointError

STATE = {
    "state_dict": dict,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
}
OF_MODEL = "model."  # in front of the dense parameters' names, as Lightning saves them
NEEDED = ("state_dict", "pytorch-lightning_version")
VERSION = re.compile(r"\d+\.\d+(\.\w+)*(\+[\w.]+)?")


def check_state(meta: Mapping[str, Any], path: object) -> None:
    """Check that what a checkpoint keeps beside its tables was written by Lightning.

    Args:
        meta: What the checkpoint keeps beside its tables.
        path: The checkpoint, for messages.

    Raises:
        CheckpointError: An entry is missing or of another type.
    """
    for name, kind in STATE.items():
        if name not in meta and name not in NEEDED:
            continue
        found = meta.get(name)
        if type(found) is not kind and not (kind is dict and isinstance(found, dict)):
            raise CheckpointError(
                f"checkpoint {path} holds no state of a training run: {name} is a "
                f"{type(found).__name__}; use another checkpoint"
            )
    if not VERSION.fullmatch(meta["pytorch-lightning_version"]):
        raise CheckpointError(
            f"checkpoint {path} names no version of Lightning; use another checkpoint"
        )


@contextmanager
def state_must_fit(what: str, setting: str) -> Iterator[None]:
    """Turn what torch raises for a state that does not fit into an error of one line.

    Args:
        what: The name of the state, for the message.
        setting: The group of settings that decides what the state has to fit.

    Raises:
        CheckpointError: The state does not fit.
    """
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        text = " ".join(str(error).split())
        text = re.sub(r"^Error\(s\) in loading state_dict for \w+: ", "", text)
        raise CheckpointError(
            f"{what} of the checkpoint does not fit: set {setting} as it was when it was saved "
            f"({type(error).__name__}: {text[:200]})"
        ) from error


def dense_state(meta: Mapping[str, Any], of_model: str = OF_MODEL) -> dict[str, Tensor]:
    """Return the dense part's state by the names that it has in the model."""
    stored: Mapping[str, Tensor] = meta["state_dict"]
    return {
        name.removeprefix(of_model): values
        for name, values in stored.items()
        if name.startswith(of_model)
    }
