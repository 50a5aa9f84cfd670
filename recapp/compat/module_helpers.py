"""Small functions of TorchRec about modules, their names and sizes that programs call."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from recapp.engine.sharded_collection import ShardedCollection
from recapp.engine.sharder import (
    CollectionSharder,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
)
from recapp.tables.config import DataType

T = TypeVar("T")
GB = 1024**3


def get_device_type() -> str:
    """Return the type of the device that ranks of this machine use: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def get_module_to_default_sharders() -> dict[type[nn.Module], CollectionSharder]:
    """Return the sharders that are used where none are given, by the class that they shard."""
    made = (EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder())
    return {sharder.module_type: sharder for sharder in made}


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Return the paths of the largest parts of a model without a sharded collection in them, next
    to those with one; none where nothing is sharded.

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
    """Return a value that must be there.

    Raises:
        AssertionError: It is None.
    """
    if optional is None:
        raise AssertionError(message)
    return optional


def append_prefix(prefix: str, name: str) -> str:
    """Return two parts of a module's path with a dot between them, unless one is empty."""
    return ".".join(part for part in (prefix, name) if part)


def filter_state_dict(state_dict: Mapping[str, T], name: str) -> "OrderedDict[str, T]":
    """Return the entries of a state dict that belong to a module, by their names in it.

    Args:
        state_dict: Of a model.
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
        prefix: The path of the module and the dot behind it.
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
    """Return torch's dtype of a data type; of quantised rows, one that only names them.

    Args:
        data_type: As of a table: `DataType.BF16`, or "bf16".

    Raises:
        ValueError: There is none of that name.
    """
    return DataType(data_type).dtype
