"""Plain types: a checkpoint keeps nothing else, so that reading it runs nobody's code.

`torch.load(weights_only=True)` refuses numpy scalars, paths, enums, OmegaConf's containers, ranges
and dataclasses, and training states are full of them. They are turned into built-in types of equal
value; anything else is refused when it is saved, not when it is needed.
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
    """Return a copy of a value that is made of plain types.

    Numpy scalars and arrays become numbers and lists; enums their values; paths text; any mapping a
    dict; any sequence a list, named tuples tuples; subclasses of a built-in that built-in. Tensors
    are detached, moved to the CPU and take only their own part of a larger storage along.

    Args:
        value: Anything.
        where: The dotted path to the value, for messages.

    Raises:
        CheckpointError: Something in it is none of these; the text names its dotted path.
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
    """Return a tensor on the CPU whose storage holds nothing but its own values."""
    here = tensor.detach().cpu()
    return (
        here.clone()
        if here.untyped_storage().nbytes() > here.numel() * here.element_size()
        else here
    )
