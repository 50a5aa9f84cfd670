"""The fitted values of derived columns in a stored model.

checkpoint   meta.pt, entry derived_values      tensors by key
artefact     derived.bin                        int64 and float32 values, one array after the
             manifest.json, features.derived    other; a line for each column has its place
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recapp.dataset.derived_columns import LOG, LOG_EDGES, SETTINGS, DerivedColumn, Kind
from recapp.errors import CheckpointError

DERIVED_VALUES = "derived_values"
"""The entry of the plain part of a checkpoint."""
DERIVED_FILE = "derived.bin"
ITEM_BYTES = 8  # float32 values are written as float64, so that every array begins at a multiple
Values = npt.NDArray[np.generic]


def plain_values(values: Mapping[str, Values]) -> dict[str, Tensor]:
    """Return fitted values as tensors for a checkpoint."""
    return {key: torch.from_numpy(np.array(own)) for key, own in values.items()}


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
    found = meta.get(DERIVED_VALUES)
    if not isinstance(found, dict):
        raise CheckpointError(
            f"checkpoint {checkpoint} has no values of derived columns, which {SETTINGS} make: "
            "leave these out, or use another checkpoint"
        )
    tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
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
    if column.kind is Kind.VOCABULARY:
        counts = range(2**48)
    elif column.kind is Kind.BUCKETS:
        log = column.setting == LOG
        counts = (LOG_EDGES,) if log else range(int(column.setting))
    elif column.kind is Kind.PIECEWISE:
        counts = (0, 2)
    elif column.kind in (Kind.SINE, Kind.COSINE):
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
    made: dict[str, Values] = {}
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
            made[column.key] = part.astype(np.float32 if floats else np.int64)
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return _of_columns(made, columns)
