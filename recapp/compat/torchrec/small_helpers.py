"""Small functions and modules of TorchRec, for jagged tensors, keyed tensors and state dicts.

`recapp.gathered_state_dict(model)` does in one call the work of `state_dict_gather` and
`state_dict_to_device`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recapp.engine.gathered_state import gathered_tables
from recapp.engine.table_strips import TableStrips, strips_in
from recapp.errors import ConfigError, DataError
from recapp.parallel import (
    CollectionSharder,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    own_device,
)
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.transport.choose_transport import make_comm


def get_module_to_default_sharders() -> dict[type[nn.Module], CollectionSharder]:
    """Return the default sharders, by the class that they shard."""
    made = (EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder())
    return {sharder.module_type: sharder for sharder in made}


def state_dict_to_device(
    state_dict: Mapping[str, Any], pg: "dist.ProcessGroup | None", device: torch.device
) -> dict[str, Any]:
    """Return a copy of a state dict with its tensors on a device.

    Args:
        state_dict: The part of a sharded model's state dict that this rank holds.
        pg: Ignored, because nothing is sent.
        device: The device of the copies.

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
    """Gather the state dicts of all ranks into that of an unsharded model on rank 0, in place.
    Every rank of the default group calls this; on ranks other than 0, only the names in `dst`
    matter.

    Args:
        src: The state dict of the sharded model on this rank.
        dst: The state dict of the unsharded model; only its names are gathered.

    Raises:
        ConfigError: `src` lacks a name, or sizes differ.
    """
    missing = [name for name in dst if name not in src]
    if missing:
        raise ConfigError(
            f"state_dict_gather: dst has {missing[0]}, and src does not: give src "
            "every tensor of dst"
        )
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
    """Return the strips of a table from its entry in a state dict."""
    strips = strips_in(value)
    if strips is None:
        raise ConfigError(
            f"state dict: {name} is a {type(value).__name__}: must be a tensor, or the strips of a "
            "table as a sharded model has them"
        )
    return strips


class ComputeKJTToJTDict(nn.Module):
    """A module that splits a KeyedJaggedTensor by key."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return a jagged tensor for each key, as a view."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """A module that joins jagged tensors into a KeyedJaggedTensor."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Return the entries as keys of one tensor, in order.

        Raises:
            DataError: Some entries have weights and others have none.
        """
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


def regroup_kts(
    keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]
) -> list[Tensor]:
    """Concatenate the vectors of keys in groups, as `KeyedTensor.regroup` does."""
    return KeyedTensor.regroup(keyed_tensors, groups)


def jt_is_equal(jt_1: object, jt_2: object) -> bool:
    """Return whether two jagged tensors hold the same bags. As in TorchRec, values and weights are
    compared by `torch.allclose` and lengths exactly. An object of another class is never equal.
    """
    if not isinstance(jt_1, JaggedTensor) or not isinstance(jt_2, JaggedTensor):
        return False
    return _same_parts(jt_1, jt_2)


def kjt_is_equal(kjt_1: object, kjt_2: object) -> bool:
    """Return whether two keyed jagged tensors hold the same keys in the same order with the same
    bags, by the comparison of `jt_is_equal`.
    """
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    if kjt_1.keys() != kjt_2.keys() or kjt_1.stride() != kjt_2.stride():
        return False
    return kjt_1.stride_per_key() == kjt_2.stride_per_key() and _same_parts(kjt_1, kjt_2)


def validate_keyed_jagged_tensor(kjt: KeyedJaggedTensor) -> None:
    """Check a keyed jagged tensor as its constructor does, and that all its values and weights
    belong to a bag. For a tensor on an accelerator this waits for the device.

    Raises:
        DataError: A check fails; the error is a ValueError, as in TorchRec.
    """
    if not isinstance(kjt, KeyedJaggedTensor):
        raise DataError(f"kjt is a {type(kjt).__name__}: give a KeyedJaggedTensor")
    weights = kjt.weights_or_none()
    KeyedJaggedTensor(
        kjt.keys(),
        kjt.values().cpu(),
        None if weights is None else weights.cpu(),
        kjt.lengths().cpu(),
        None if (offsets := kjt.offsets_or_none()) is None else offsets.cpu(),
        stride_per_key_per_rank=(
            kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
        ),
    )
    held = kjt.without_slack()
    for name, tensor in (("values", kjt.values()), ("weights", weights)):
        if tensor is not None and len(tensor) != len(held.values()):
            raise DataError(
                f"there are {len(tensor)} {name}, but lengths sum to {len(held.values())}: the "
                "last values belong to no bag: give one entry for each value of a bag"
            )


def _same_parts(
    one: JaggedTensor | KeyedJaggedTensor, other: JaggedTensor | KeyedJaggedTensor
) -> bool:
    """Return whether two tensors have the same values, weights and lengths."""
    if not torch.equal(one.lengths().long(), other.lengths().long()):
        return False
    return _close(one.values(), other.values()) and _close(
        one.weights_or_none(), other.weights_or_none()
    )


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other)
