"""What stored models have beside the rows of their tables.

    checkpoint   meta.pt             the dense part, fitted values of derived columns and
                                     Lightning's state, as plain types in torch's zip format
    artefact     dense.safetensors   the dense part
                 derived.bin         the fitted values, int64 and float32, one array after the
                                     other; features.derived of the manifest has a line for each

A pickle is a program. `torch.load(weights_only=True)` runs no code from it. Before that call, this
file compares the names in the pickle with a short list, so that the pickle makes only plain values
and dense tensors. The size of the file bounds the memory: entries are not compressed and not larger
than the file, storages are parts of it, and a tensor has no more values than its storage.

`weights_only=True` also refuses numpy scalars, paths, enums, OmegaConf's containers, ranges and
dataclasses, and training states are full of them: `plain` turns these into built-in types of equal
value. Any other type is an error at the save, not at the later load.

Readers never see a part of an artefact, two commands cannot write the same one, and no other file
is deleted:

    served.recapp-export     while an export writes it, under the kernel's lock (flock)
    served                   when it is whole, by one rename
    served.recapp-replaced   the earlier artefact, between two renames; readers look here, too

Users name their own copies served.old, so these suffixes are unlikely names.
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
from typing import Any, BinaryIO, cast, get_args, get_origin

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recapp.dataset.data_settings import LOG, LOG_EDGES, SETTINGS, Derivation, DerivedColumn
from recapp.errors import ArtefactError, CheckpointError, ConfigError, RecappError
from recapp.settings.values import shown
from recapp.stored.operations import EXPORTED, beside
from recapp.stored.store import (
    CHECKPOINT,
    Pinned,
    bytes_of,
    crc32_of,
    entry_of,
    files_at,
    is_artefact,
)

LEVELS = 64  # of containers inside of one another
_DTYPES = {str(v).removeprefix("torch.") for v in vars(torch).values() if type(v) is torch.dtype}
_STORAGES = {name for name in vars(torch) if name.endswith("Storage")}
_ASKED_FOR = {  # by a pickle of plain values and dense tensors
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


def write_meta(folder: Path, file: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Write values as plain types, and read them back, so that an unreadable file is an error at
    once.

    Return the size and checksum of the file.

    Args:
        folder: The directory.
        file: The name of the file to write.
        meta: Any values that `recapp.stored.plain_parts.plain` can convert.

    Raises:
        CheckpointError: A value cannot be converted.
        OSError: The disk is full, or there is no permission.
    """
    with files_at(folder).create(folder / file) as out:
        torch.save(plain(meta), out)
    with closing(Pinned(folder)) as pinned, pinned.open(file, CHECKPOINT) as source:
        meta_of(source, folder / file)
        return {"bytes": bytes_of(source), "crc32": crc32_of(source)}


def meta_of(source: BinaryIO, file: Path) -> dict[str, Any]:
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
        opened = f"/proc/self/fd/{source.fileno()}"  # also when its name leads elsewhere
        meta = torch.load(opened, map_location="cpu", weights_only=True, mmap=True)
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


STATE = {  # of Lightning
    "state_dict": dict,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
}
OF_MODEL = "model."  # the prefix of dense parameters' names in Lightning's state
NEEDED = ("state_dict", "pytorch-lightning_version")
WRONG_STATE = (  # of a reader that gets another state than it wrote
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    OSError,
)
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


# ---- fitted values

DERIVED_VALUES = "derived_values"  # the entry of the plain part of a checkpoint
DERIVED_FILE = "derived.bin"
ITEM_BYTES = 8  # float32 values are written as float64, so that every array begins at a multiple
Values = npt.NDArray[np.generic]


def dense_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Return dense parameters and buffers as a safetensors file."""
    import safetensors.torch  # here, as most commands read a manifest and no dense part

    tensors = {name: values.detach().cpu().contiguous().clone() for name, values in state.items()}
    return safetensors.torch.save(tensors)


def dense_values(raw: bytes) -> dict[str, Tensor]:
    """Read the dense part from the bytes of a safetensors file.

    Raises:
        ValueError: The bytes are not a safetensors file, or a value is not finite.
    """
    import safetensors.torch

    try:
        state: dict[str, Tensor] = safetensors.torch.load(raw)
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise ValueError(str(error)) from error
    for name, values in state.items():
        wide = values.float() if values.element_size() == 1 else values  # isfinite lacks float8
        if values.is_floating_point() and not bool(torch.isfinite(wide).all()):
            raise ValueError(f"{name} has values that are not finite")
    return state


def plain_values(values: Mapping[str, Values]) -> dict[str, Tensor]:
    """Return fitted values as tensors for a checkpoint."""
    return {key: torch.from_numpy(np.array(value)) for key, value in values.items()}


def values_in(
    meta: Mapping[str, Any], columns: Sequence[DerivedColumn], checkpoint: object
) -> Mapping[str, Values]:
    """Return the fitted values of columns from the plain part of a checkpoint, by key.

    Args:
        meta: The plain part.
        columns: The derived columns of the model.
        checkpoint: The checkpoint, for messages.

    Raises:
        CheckpointError: The values are missing or damaged.
    """
    entry = meta.get(DERIVED_VALUES)
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"checkpoint {checkpoint} has no values of derived columns, which {SETTINGS} make: "
            "leave these out, or use another checkpoint"
        )
    tensors = {key: value for key, value in entry.items() if isinstance(value, Tensor)}
    try:
        return _of_columns({key: value.numpy() for key, value in tensors.items()}, columns)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the plain part of checkpoint {checkpoint} is damaged: {DERIVED_VALUES}: {error}; "
            "use another checkpoint"
        ) from error


def _of_columns(
    values: Mapping[str, Values], columns: Sequence[DerivedColumn]
) -> Mapping[str, Values]:
    for column in columns:
        if column.key not in values:
            raise ValueError(f"there are no values of {column.in_words()}")
        if fault := _fault(column, values[column.key]):
            raise ValueError(f"the values of {column.in_words()} {fault}")
    return {column.key: values[column.key] for column in columns}


def _fault(column: DerivedColumn, values: npt.NDArray[Any]) -> str:
    """Return what is wrong with the stored values of a column; an empty text if nothing is."""
    dtype = "float32" if column.has_floats else "int64"
    if values.dtype != dtype or values.ndim != 1:
        return f"are {values.dtype} of {values.ndim} dimensions, must be a vector of {dtype}"
    counts: Sequence[int] = (0,)
    if column.kind is Derivation.VOCABULARY:
        counts = range(2**48)
    elif column.kind is Derivation.BUCKETS:
        log = column.setting == LOG
        counts = (LOG_EDGES,) if log else range(int(column.setting))
    elif column.kind is Derivation.PIECEWISE:
        counts = (0, 2)
    elif column.kind in (Derivation.SINE, Derivation.COSINE):
        counts = (1,)
        if len(values) == 1 and values[0] != np.float32(column.period):
            return f"are {values[0]}, not its period"
    if len(values) not in counts:
        return f"are {len(values)}"
    if not (np.isfinite(values).all() and (values[1:] > values[:-1]).all()):
        return "are not finite and ascending"
    return ""


def written_values(columns: Sequence[DerivedColumn]) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the file of an artefact's fitted values, and the lines of the columns."""
    raw = []
    lines = []
    first = 0
    for column in columns:
        assert column.values is not None
        wide = column.values.astype("<f8" if column.values.dtype.kind == "f" else "<i8")
        raw.append(wide.tobytes())
        lines.append({**column.plain(), "first": first, "count": len(wide)})
        first += len(wide)
    return b"".join(raw), lines


def read_values(
    raw: bytes, lines: object, columns: Sequence[DerivedColumn]
) -> Mapping[str, Values]:
    """Return the fitted values of columns from an artefact, by key.

    Args:
        raw: The file.
        lines: The lines of the columns.
        columns: The derived columns of the model.

    Raises:
        ValueError: The lines are other columns, or do not fit the file.
    """
    values: dict[str, Values] = {}
    try:
        for line, column in zip(cast(list[Any], lines), columns, strict=True):
            first = line["first"]
            count = line["count"]
            if {**column.plain(), "first": first, "count": count} != line:
                raise ValueError(f"{column.in_words()} has the line of another column")
            if not 0 <= first <= first + count <= len(raw) // ITEM_BYTES:
                raise ValueError(f"{column.name} is outside of the file")
            floats = column.has_floats
            part = np.frombuffer(raw, "<f8" if floats else "<i8", count, first * ITEM_BYTES)
            values[column.key] = part.astype(np.float32 if floats else np.int64)
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return _of_columns(values, columns)


@contextmanager
def unfinished(output: Path, overwrite: bool) -> Iterator[Path]:
    """Yield an empty directory; rename it to `output` on success, and remove it after an error.

    Args:
        output: The name of the artefact's directory.
        overwrite: Whether to replace an artefact of that name.

    Raises:
        ConfigError: The name is taken, or another export is writing it.
        ArtefactError: The directory cannot be written.
    """
    if not output.name:
        raise ConfigError(f"output={output}: is no name of a new directory: choose another name")
    files = files_at(output)
    folder = beside(output, EXPORTED)
    try:
        _check_name(output, overwrite)
        with files.locked(folder) as alone:
            if not alone:
                raise ConfigError(
                    f"output={output}: another export is writing it: wait, or choose another name"
                )
            try:
                _check_name(output, overwrite)  # another export may have ended since
                yield folder
                files.publish(folder, output)
            except BaseException:
                files.remove(folder)
                raise
    except OSError as error:
        why = error.strerror or " ".join(str(error).split())
        raise ArtefactError(f"output={output} cannot be written: {why}") from error


def _check_name(output: Path, overwrite: bool) -> None:
    if entry_of(output) is None:
        return
    if not is_artefact(output):
        raise ConfigError(f"output={output}: exists and is no artefact: choose another name")
    if not overwrite:
        raise ConfigError(
            f"output={output}: there is an artefact: set overwrite=true, or choose another name"
        )
