"""Read and write `meta.pt`: the dense part of the model and Lightning's state, as plain types in
torch's zip format.

A pickle is a program. `torch.load(weights_only=True)` runs no code from it. Before that call, this
file compares the names in the pickle with a short list, so that the pickle makes only plain values
and dense tensors. The size of the file bounds the memory: entries are not compressed and not larger
than the file, storages are parts of it, and a tensor has no more values than its storage.

`weights_only=True` also refuses numpy scalars, paths, enums, OmegaConf's containers, ranges and
dataclasses, and training states are full of them: `plain` turns these into built-in types of equal
value. Any other type is an error at the save, not at the later load.
"""

import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from enum import Enum
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, BinaryIO, get_args, get_origin

import numpy as np
import torch
from torch import Tensor

from recapp.errors import CheckpointError, RecappError
from recapp.settings.values import shown
from recapp.stored.store import CHECKPOINT, Pinned, bytes_of, crc32_of, files_at, path_of

LEVELS = 64  # of containers inside of one another
_DTYPES = {str(v).removeprefix("torch.") for v in vars(torch).values() if type(v) is torch.dtype}
_STORAGES = {name for name in vars(torch) if name.endswith("Storage")}
_ASKED_FOR = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch Size",
    "torch device",
    "_codecs encode",
    "builtins set",
    "__builtin__ set",
    "builtins complex",
    "__builtin__ complex",
    *(f"torch {name}" for name in (*_DTYPES, *_STORAGES)),
}
"""The names that a pickle of plain values and dense tensors uses."""


def write_meta(folder: Path, file: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Write values as plain types, and read them back, so that an unreadable file is an error at
    once.

    Return the size and checksum of the file.

    Args:
        folder: The directory.
        file: The name of the file to write.
        meta: Any values that `recapp.stored.meta_file.plain` can convert.

    Raises:
        CheckpointError: A value cannot be converted.
        OSError: The disk is full, or there is no permission.
    """
    with files_at(folder).create(folder / file) as out:
        torch.save(plain(meta), out)
    with closing(Pinned(folder)) as pinned, pinned.open(file, CHECKPOINT) as source:
        read_meta(source, folder / file)
        return {"bytes": bytes_of(source), "crc32": crc32_of(source)}


def read_meta(source: BinaryIO, file: Path) -> dict[str, Any]:
    """Read a file of `write_meta`; tensors are on the CPU.

    Args:
        source: The open file.
        file: The name of the file, for messages.

    Raises:
        CheckpointError: The file is damaged, holds other types than plain ones, or would expand
            beyond its size.
    """
    try:
        _check_archive(source)
        meta = torch.load(path_of(source), map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(meta, dict):
            raise ValueError(f"a {type(meta).__name__} instead of a dict")
        for tensor in _tensors(meta, bytes_of(source)):
            size = tensor.untyped_storage().nbytes()
            if tensor.numel() * tensor.element_size() > size:
                raise ValueError(f"a tensor of {tensor.numel():,} values in {size:,} bytes")
    except Exception as error:  # unpickling a damaged file can raise any exception
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{file} cannot be read as plain types: {reason}") from error
    return meta


def _check_archive(source: BinaryIO) -> None:
    """Refuse an archive that expands beyond its file, or whose pickle uses other names."""
    size = bytes_of(source)
    source.seek(0)
    with zipfile.ZipFile(source) as archive:
        entries = archive.infolist()
        packed = any(e.compress_type != zipfile.ZIP_STORED for e in entries)
        if packed or sum(e.file_size for e in entries) > size:
            raise ValueError("its entries expand to more than the file holds")
        programs = [archive.read(e) for e in entries if e.filename.endswith(".pkl")]
    for code, name, _ in chain.from_iterable(map(pickletools.genops, programs)):
        by_stack = code.name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4")
        if by_stack or (code.name == "GLOBAL" and name not in _ASKED_FOR):
            raise ValueError(f"it names {name or code.name}, which is no plain type")


def _tensors(value: Any, most: int) -> Iterator[Tensor]:
    """Yield every tensor inside plain containers, level by level.

    Args:
        value: The containers.
        most: The largest number of values on a level. A small file may refer to its own containers
            many times, and later readers would visit each of them anew.

    Raises:
        ValueError: There are more values, or more than `LEVELS` levels.
    """
    level = [value]
    for _ in range(LEVELS):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, Tensor):
                yield one
            elif isinstance(one, dict | list | tuple | set):
                inner += [*one.keys(), *one.values()] if isinstance(one, dict) else one
                inner += vars(one).values() if isinstance(one, OrderedDict) else ()
                if len(inner) > most:
                    raise ValueError("values that expand beyond the file")
        level = inner
    if level:
        raise ValueError(f"values inside of one another, more than {LEVELS} levels")


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
        here = value.detach().cpu()
        is_part = here.untyped_storage().nbytes() > here.numel() * here.element_size()
        return here.clone() if is_part else here
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
        container = OrderedDict(items)
        container.__dict__.update(plain(value.__dict__, where))  # a state_dict's version numbers
        return container
    if isinstance(value, Set):
        return {plain(v, where) for v in value}
    if isinstance(value, Sequence):
        items = (plain(v, f"{where}.{i}") for i, v in enumerate(value))
        return tuple(items) if isinstance(value, tuple) else list(items)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(f"{where} is a {kind}: a checkpoint keeps plain types and tensors only")


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
"""The types of Lightning's state."""
OF_MODEL = "model."  # the prefix of dense parameters' names in Lightning's state
NEEDED = ("state_dict", "pytorch-lightning_version")
WRONG_STATE = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    OSError,
)
"""The exceptions of a reader that gets another state than it wrote."""
VERSION = re.compile(r"\d+\.\d+(\.\w+)*(\+[\w.]+)?")


def check_state(meta: Mapping[str, Any], path: object, *, trains: bool = False) -> None:
    """Check that Lightning wrote the plain part of a checkpoint.

    Args:
        meta: The plain part of the checkpoint.
        path: The checkpoint, for messages.
        trains: Whether training goes on from it, which needs all entries.

    Raises:
        CheckpointError: An entry is missing or of another type.
    """
    for name, kind in STATE.items():
        if name not in meta and name not in NEEDED and not trains:
            continue
        fault = "" if name in meta else f"it has no {name}"
        if name in meta and not is_a(meta[name], kind):
            fault = f"{name}={shown(meta[name])} is no {kind.__name__}"
        if fault:
            raise CheckpointError(
                f"checkpoint {path} holds no state of a training run: {fault}; use another "
                "checkpoint"
            )
    if not VERSION.fullmatch(meta["pytorch-lightning_version"]):
        raise CheckpointError(
            f"checkpoint {path} names no version of Lightning; use another checkpoint"
        )


def is_a(value: Any, kind: Any) -> bool:
    """Return whether a value of JSON has a type, such as `dict[str, list[int]]`. Whole numbers are
    counts; True is none.
    """
    if kind is int:
        return type(value) is int and 0 <= value < 2**63
    inner = get_args(kind)
    if kind is Any or not isinstance(value, get_origin(kind) or kind) or isinstance(value, bool):
        return kind is Any
    parts = value.values() if isinstance(value, dict) else value
    return not inner or all(is_a(part, inner[-1]) for part in parts)


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
    except WRONG_STATE as error:
        if isinstance(error, RecappError):
            raise
        raise CheckpointError(
            f"{what} of the checkpoint does not fit: set {setting} as it was when it was saved, or "
            f"use another checkpoint ({in_words(error)})"
        ) from error


def in_words(error: Exception) -> str:
    """Return the exception of a reader of states in one line."""
    text = " ".join(str(error).split())
    text = re.sub(r"^Error\(s\) in loading state_dict for \w+: ", "", text)
    return f"{type(error).__name__}: {text[:200]}"


def dense_state(meta: Mapping[str, Any], of_model: str = OF_MODEL) -> dict[str, Tensor]:
    """Return the dense part's state, by the names of parameters in the model."""
    stored: Mapping[str, Tensor] = meta["state_dict"]
    return {
        name.removeprefix(of_model): values
        for name, values in stored.items()
        if name.startswith(of_model)
    }
