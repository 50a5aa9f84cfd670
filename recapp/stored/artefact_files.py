"""What an artefact has beside the rows of its tables, and its directory.

    dense.safetensors         the dense part
    derived.bin               the fitted values of derived columns, int64 and float32, one array
                              after the other; features.derived of the manifest has a line for each

A checkpoint has fitted values as tensors by key, in the entry `derived_values` of meta.pt.

Readers never see a part of an artefact, two commands cannot write the same one, and no other file
is deleted:

    served.recapp-export     while an export writes it, under the kernel's lock (flock)
    served                   when it is whole, by one rename
    served.recapp-replaced   the earlier artefact, between two renames; readers look here, too

Users name their own copies served.old, so these suffixes are unlikely names.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recapp.dataset.data_settings import LOG, LOG_EDGES, SETTINGS, Derivation, DerivedColumn
from recapp.errors import ArtefactError, CheckpointError, ConfigError
from recapp.stored.model_store import entry_of, files_at, is_artefact
from recapp.stored.store import beside

DERIVED_VALUES = "derived_values"
"""The entry of the plain part of a checkpoint."""
DERIVED_FILE = "derived.bin"
ITEM_BYTES = 8  # float32 values are written as float64, so that every array begins at a multiple
Values = npt.NDArray[np.generic]


def dense_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Return dense parameters and buffers as a safetensors file."""
    import safetensors.torch

    tensors = {name: values.detach().cpu().contiguous().clone() for name, values in state.items()}
    raw: bytes = safetensors.torch.save(tensors)
    return raw


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
    """Return the stored values of each column, by key.

    Raises:
        ValueError: A column has none, or values that no fit gives.
    """
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
    folder = beside(output, "recapp-export")
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
    """Check that a name is free, or is the name of an artefact that may be replaced.

    Raises:
        ConfigError: The name is taken.
    """
    if entry_of(output) is None:
        return
    if not is_artefact(output):
        raise ConfigError(f"output={output}: exists and is no artefact: choose another name")
    if not overwrite:
        raise ConfigError(
            f"output={output}: there is an artefact: set overwrite=true, or choose another name"
        )
