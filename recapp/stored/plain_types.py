"""Convert values to plain types: a checkpoint holds only these, so that reading it runs no code.

`torch.load(weights_only=True)` refuses numpy scalars, paths, enums, OmegaConf's containers, ranges
and dataclasses, and training states are full of them. `plain` turns these into built-in types of
equal value. Any other type is an error at the save, not at the later load.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recapp.errors import CheckpointError

_AS_THEY_ARE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
)
_BUILTIN_BASES: tuple[Any, ...] = (int, float, str, bytes)


def plain(value: Any, where: str = "meta") -> Any:
    """Return a copy of a value in plain types.

    Numpy scalars and arrays become numbers and lists; enums their values; paths text; any mapping a
    dict; any sequence a list, named tuples tuples; subclasses of a built-in that built-in. Tensors
    are detached and moved to the CPU, with only their own part of a larger storage.

    Args:
        value: Any value.
        where: The dotted path to the value, for messages.

    Raises:
        CheckpointError: A part of the value has another type; the text names its dotted path.
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, Tensor):
        return _own(value)
    if isinstance(value, Enum):
        return plain(value.value, where)
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist(), where)
    if isinstance(value, PurePath):
        return str(value)
    for base in _BUILTIN_BASES:
        if isinstance(value, base):
            return base(value)
    return _container(value, where)


def _container(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        items = ((plain(k, where), plain(v, f"{where}.{k}")) for k, v in value.items())
        if type(value) is not OrderedDict:
            return dict(items)
        made = OrderedDict(items)
        made.__dict__.update(plain(value.__dict__, where))  # a state_dict's version numbers
        return made
    if isinstance(value, Set):
        return {plain(v, where) for v in value}
    if isinstance(value, Sequence):
        items = (plain(v, f"{where}.{i}") for i, v in enumerate(value))
        return tuple(items) if isinstance(value, tuple) else list(items)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(f"{where} is a {kind}: a checkpoint keeps plain types and tensors only")


def _own(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, with a storage that holds only its own values."""
    here = tensor.detach().cpu()
    return (
        here.clone()
        if here.untyped_storage().nbytes() > here.numel() * here.element_size()
        else here
    )
