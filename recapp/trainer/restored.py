"""What Lightning takes from a checkpoint's plain part, looked at before Lightning does: its own
errors there are tracebacks.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
NEEDED = ("state_dict", "pytorch-lightning_version")
VERSION = re.compile(r"\d+\.\d+(\.\w+)*(\+[\w.]+)?")


def check_state(meta: Mapping[str, Any], path: object) -> None:
    """Check that a plain part is one that Lightning has written.

    Args:
        meta: what a checkpoint keeps beside its tables.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: an entry is missing or of another type.
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
    """Turn what torch says of a state that does not fit into one line.

    Args:
        what: the state.
        setting: the group of settings that decides what it has to fit.

    Raises:
        CheckpointError: it does not fit.
    """
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        told = " ".join(str(error).split())
        told = told.removeprefix("Error(s) in loading state_dict for ClickModule: ")
        raise CheckpointError(
            f"{what} of the checkpoint does not fit: set {setting} as it was when it was saved "
            f"({type(error).__name__}: {told[:200]})"
        ) from error
