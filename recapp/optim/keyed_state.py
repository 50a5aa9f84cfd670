"""The state of a keyed optimiser, and how stored values are copied into it.

The state of a parameter is a dict whose values are numbers, tensors, sharded tensors, dicts of
these, or objects that have a `state_dict` of their own. Loading copies values into the existing
tensors, so every holder of such a tensor sees the loaded values.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from recapp.errors import ConfigError


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with objects replaced by their state dicts, at any depth.

    Args:
        state: The state of one parameter: its values by name.
    """
    plain: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            plain[name] = plain_state(value)
        elif _has(value, "state_dict"):
            plain[name] = value.state_dict()
        else:
            plain[name] = value
    return plain


@torch.no_grad()
def load_values(held: dict[str, Any], stored: Mapping[str, Any], path: str) -> None:
    """Copy stored values into a parameter's state.

    Args:
        held: The state, changed in place.
        stored: The result of `plain_state` for an equal state.
        path: The parameter's name, for errors.

    Raises:
        ConfigError: The state has other values, or tensors of other shapes.
    """
    if not isinstance(stored, Mapping):
        raise ConfigError(f"state of {path} is a {type(stored).__name__}: give a dict")
    if held.keys() != stored.keys():
        raise ConfigError(
            f"state of {path} has {', '.join(map(str, stored)) or 'nothing'}, this optimiser "
            f"{', '.join(map(str, held)) or 'nothing'}: the two optimisers differ"
        )
    for name, value in held.items():
        held[name] = _loaded(value, stored[name], f"{path}, {name}")


def copied(stored: Any, device: torch.device | None) -> Any:
    """Return a copy of a stored value for a parameter that has no state yet.

    Args:
        stored: A value, or a dict of values.
        device: The device of the copied tensors. Step counts, which have no dimensions, stay on
            their device.
    """
    if isinstance(stored, Mapping):
        return {name: copied(value, device) for name, value in stored.items()}
    if isinstance(stored, Tensor):
        return stored.detach().clone().to(device if stored.dim() else stored.device)
    return deepcopy(stored)


def _loaded(held: Any, stored: Any, path: str) -> Any:
    """Return the loaded value: the held object with the stored content where possible, else a new
    one.
    """
    if isinstance(held, dict):
        load_values(held, stored, path)
    elif _has(held, "load_state_dict"):
        held.load_state_dict(stored)
    elif _has(held, "local_shards"):
        _load_shards(held, stored, path)
    elif isinstance(held, Tensor):
        _copy(held, stored, path)
    else:
        return deepcopy(stored)
    return held


def _load_shards(held: Any, stored: Any, path: str) -> None:
    """Copy the shards of a sharded tensor that lie on this rank."""
    if not _has(stored, "local_shards"):
        raise ConfigError(f"state of {path} is a {type(stored).__name__}: give a sharded tensor")
    own = held.local_shards()
    given = stored.local_shards()
    if len(own) != len(given):
        raise ConfigError(
            f"state of {path} has {len(given)} shards on this rank, this optimiser {len(own)}: "
            "load it under the plan that it was saved under"
        )
    for number, (mine, other) in enumerate(zip(own, given, strict=True)):
        _copy(mine.tensor, other.tensor, f"{path}, shard {number}")


def _copy(held: Tensor, stored: Any, path: str) -> None:
    if not isinstance(stored, Tensor):
        raise ConfigError(f"state of {path} is a {type(stored).__name__}: give a tensor")
    if held.shape != stored.shape:
        raise ConfigError(
            f"state of {path} has shape {tuple(stored.shape)}, this optimiser {tuple(held.shape)}"
        )
    if held.layout != stored.layout:
        raise ConfigError(f"state of {path} is {stored.layout}, this optimiser's {held.layout}")
    held.detach().copy_(stored)


def _has(value: Any, method: str) -> bool:
    found: Callable[..., Any] | None = getattr(value, method, None)
    return callable(found)
