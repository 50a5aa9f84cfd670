"""Check the part of a checkpoint that Lightning restores, before Lightning does: its own errors are
tracebacks.
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
OF_MODEL = "model."  # the prefix of dense parameters' names in Lightning's state
NEEDED = ("state_dict", "pytorch-lightning_version")
VERSION = re.compile(r"\d+\.\d+(\.\w+)*(\+[\w.]+)?")


def check_state(meta: Mapping[str, Any], path: object) -> None:
    """Check that Lightning wrote the plain part of a checkpoint.

    Args:
        meta: The plain part of the checkpoint.
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
    """Turn torch's exception for a state that does not fit into an error of one line.

    Args:
        what: The name of the state, for the message.
        setting: The group of settings that the state must fit.

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
    """Return the dense part's state, by the names of parameters in the model."""
    stored: Mapping[str, Tensor] = meta["state_dict"]
    return {
        name.removeprefix(of_model): values
        for name, values in stored.items()
        if name.startswith(of_model)
    }
