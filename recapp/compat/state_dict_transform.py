"""TorchRec's functions that bring the state dict of a sharded model to another device, and to the
unsharded model on rank 0. `recapp.gathered_state_dict(model)` does both at once.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recapp.engine.gathered_state import gathered_tables
from recapp.engine.sharder import own_device
from recapp.engine.table_strips import TableStrips, strips_in
from recapp.errors import ConfigError
from recapp.transport.choose_transport import make_comm


def state_dict_to_device(
    state_dict: Mapping[str, Any], pg: "dist.ProcessGroup | None", device: torch.device
) -> dict[str, Any]:
    """Return a copy of a state dict whose tensors lie on a device.

    Args:
        state_dict: Of a sharded model: what this rank holds.
        pg: Not needed: nothing is sent.
        device: Where tensors shall lie.

    Raises:
        ConfigError: An entry is neither a tensor nor the strips of a table.
    """
    return {
        name: _moved(value, device)
        if isinstance(value, Tensor | TableStrips)
        else [
            (rows, cols, _moved(tensor, device), *mixed)
            for rows, cols, tensor, *mixed in _strips(name, value)
        ]
        for name, value in state_dict.items()
    }


def state_dict_gather(src: Mapping[str, Any], dst: Mapping[str, Tensor]) -> None:
    """Fill the state dict of an unsharded model on rank 0 from what all ranks hold, in place. Every
    rank of the default group calls it; what another rank gives as `dst` only names the entries.

    Args:
        src: The state dict of the sharded model on this rank.
        dst: That of the unsharded model; names that it lacks are left out.

    Raises:
        ConfigError: `src` lacks a name, or sizes differ.
    """
    missing = [name for name in dst if name not in src]
    if missing:
        raise ConfigError(f"state_dict_gather: src has no {missing[0]}, which dst has")
    there = dist.is_available() and dist.is_initialized()
    group = dist.group.WORLD if there else None
    comm = make_comm(group, own_device(group), transport="gloo")
    held = {name: _strips(name, src[name]) for name in dst if not isinstance(src[name], Tensor)}
    whole: dict[str, Tensor] = gathered_tables(held, comm)
    if comm.rank:
        return
    for name, target in dst.items():
        value = whole.get(name, src[name])
        if value.shape != target.shape:
            raise ConfigError(
                f"state_dict_gather: {name} is {list(value.shape)} in src and "
                f"{list(target.shape)} in dst"
            )
        target.detach().copy_(value)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, TableStrips):
        return value.each(lambda tensor: _moved(tensor, device))
    return value.detach().to(device, copy=True)


def _strips(name: str, value: Any) -> list[Any]:
    """Return the strips of a table of a state dict."""
    strips = strips_in(value)
    if strips is None:
        raise ConfigError(
            f"state dict: {name} is a {type(value).__name__}: must be a tensor, or the strips of a "
            "table as a sharded model has them"
        )
    return strips
