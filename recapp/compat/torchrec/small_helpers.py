"""Small functions and modules of TorchRec: for jagged tensors, keyed tensors, modules, state dicts,
names and sizes, and an activation.

`recapp.gathered_state_dict(model)` does in one call the work of `state_dict_gather` and
`state_dict_to_device`.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recapp.engine.gathered_state import gathered_tables
from recapp.engine.sharded_collection import ShardedCollection
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
from recapp.tables.config import DataType
from recapp.transport.choose_transport import make_comm

T = TypeVar("T")
GB = 1024**3


def get_device_type() -> str:
    """Return the type of the device that ranks of this machine use: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def get_module_to_default_sharders() -> dict[type[nn.Module], CollectionSharder]:
    """Return the default sharders, by the class that they shard."""
    made = (EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder())
    return {sharder.module_type: sharder for sharder in made}


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Return the paths of the largest submodules that contain no sharded collection; an empty list
    for a model without sharded collections.

    Args:
        model: The model, sharded or not.
    """
    sharded = [path for path, part in model.named_modules() if isinstance(part, ShardedCollection)]
    above = {
        ".".join(parts[:count])
        for parts in (path.split(".") if path else [] for path in sharded)
        for count in range(len(parts) + 1)
    }
    return [
        path
        for path, _ in model.named_modules()
        if path and path not in above and path.rpartition(".")[0] in above - {*sharded}
    ]


def none_throws(optional: T | None, message: str = "Unexpected `None`") -> T:
    """Return a value that must not be None.

    Raises:
        AssertionError: The value is None.
    """
    if optional is None:
        raise AssertionError(message)
    return optional


def append_prefix(prefix: str, name: str) -> str:
    """Return two parts of a module's path with a dot between them, unless one is empty."""
    return ".".join(part for part in (prefix, name) if part)


def filter_state_dict(state_dict: Mapping[str, T], name: str) -> "OrderedDict[str, T]":
    """Return the entries of a module in a state dict, by their names in the module.

    Args:
        state_dict: The state dict of a model.
        name: The path of the module in the model.
    """
    start = f"{name}."
    return OrderedDict(
        (key.removeprefix(start), value)
        for key, value in state_dict.items()
        if key.startswith(start)
    )


def add_prefix_to_state_dict(state_dict: dict[str, Any], prefix: str) -> None:
    """Put a text in front of every name of a state dict, in place.

    Args:
        state_dict: The state dict.
        prefix: The path of the module with a dot at the end.
    """
    for key in list(state_dict):
        state_dict[f"{prefix}{key}"] = state_dict.pop(key)


def bytes_to_gb(num_bytes: int) -> float:
    """Return bytes as GiB, which TorchRec calls GB."""
    return num_bytes / GB


def gb_to_bytes(gb: float) -> int:
    """Return GiB, which TorchRec calls GB, as whole bytes."""
    return int(gb * GB)


def data_type_to_dtype(data_type: DataType | str) -> torch.dtype:
    """Return torch's dtype of a data type; for quantised rows a dtype that only names them.

    Args:
        data_type: The data type of a table: `DataType.BF16`, or "bf16".

    Raises:
        ValueError: No data type has this name.
    """
    return DataType(data_type).dtype


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


class SwishLayerNorm(nn.Module):
    """x * sigmoid(LayerNorm(x)).

    Args:
        input_dims: The sizes of the last dimensions, over which to normalise; a number is one size.
        device: The device of the parameters.
    """

    def __init__(
        self,
        input_dims: int | list[int] | torch.Size,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(input_dims, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """Return the activations in the shape of the input."""
        gate: Tensor = self.norm(input)
        return input * gate


class KTRegroupAsDict(nn.Module):
    """Concatenates the vectors of keys in named groups: `KeyedTensor.regroup_as_dict` as a module.

    Args:
        groups: The keys of each group; a key may be in several.
        keys: A name for each group.
        emb_dtype: The type of the results; None keeps the type.
        multi_device: Ignored, because the module keeps no tensor on a device.

    Raises:
        ConfigError: The number of names differs from the number of groups.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
        emb_dtype: DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise ConfigError(
                f"there are {len(groups)} groups and {len(keys)} keys: name each group once"
            )
        self._groups = [list(group) for group in groups]
        self._keys = list(keys)
        self._dtype = None if emb_dtype is None else DataType(emb_dtype).dtype

    def forward(self, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
        """Return the groups by name, with the errors of `KeyedTensor.regroup_as_dict`."""
        found = KeyedTensor.regroup_as_dict(keyed_tensors, self._groups, self._keys)
        if self._dtype is None:
            return found
        return {key: group.to(self._dtype) for key, group in found.items()}
