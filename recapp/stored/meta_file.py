"""Read and write `meta.pt`: the dense part of the model and Lightning's state, as plain types in
torch's zip format.

A pickle is a program. `torch.load(weights_only=True)` runs no code from it. Before that call, this
file compares the names in the pickle with a short list, so that the pickle makes only plain values
and dense tensors. The size of the file bounds the memory: entries are not compressed and not larger
than the file, storages are parts of it, and a tensor has no more values than its storage.
"""

import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from recapp.errors import CheckpointError
from recapp.stored.files import Pinned, bytes_of, crc32_of, files_at, path_of
from recapp.stored.kinds import CHECKPOINT
from recapp.stored.plain_types import plain

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
        meta: Any values that `recapp.stored.plain_types.plain` can convert.

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
            held = tensor.untyped_storage().nbytes()
            if tensor.numel() * tensor.element_size() > held:
                raise ValueError(f"a tensor of {tensor.numel():,} values in {held:,} bytes")
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
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                _check_names(archive.read(entry))


def _check_names(program: bytes) -> None:
    """Refuse a pickle with names beyond those of plain values and dense tensors."""
    for code, name, _ in pickletools.genops(program):
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
