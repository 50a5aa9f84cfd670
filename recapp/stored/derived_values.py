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

from recapp.dataset.derived_columns import SETTINGS, DerivedColumn, Kind, derived_from
from recapp.errors import CheckpointError

DERIVED_VALUES = "derived_values"
"""The entry of the plain part of a checkpoint."""
DERIVED_FILE = "derived.bin"
ITEM_BYTES = 8  # float32 values are written as float64, so that every array begins at a multiple
Values = npt.NDArray[np.generic]


def plain_values(values: Mapping[str, Values]) -> dict[str, Tensor]:
    """Return fitted values as tensors for a checkpoint."""
    return {key: torch.from_numpy(np.array(own)) for key, own in values.items()}


def values_in(meta: Mapping[str, Any], checkpoint: object) -> Mapping[str, Values]:
    """Return the fitted values of the plain part of a checkpoint, by key.

    Args:
        meta: The plain part.
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
    made = {}
    for key, values in found.items():
        if not _is_ascending(values):
            raise CheckpointError(
                f"the plain part of checkpoint {checkpoint} is damaged: {DERIVED_VALUES}.{key}; "
                "use another checkpoint"
            )
        made[str(key)] = values.numpy()
    return made


def _is_ascending(values: object) -> bool:
    """Return whether a value is a vector of int64 or float32, strictly ascending."""
    if not isinstance(values, Tensor) or values.dim() != 1:
        return False
    kinds = (torch.int64, torch.float32)
    return values.dtype in kinds and bool((values[1:] > values[:-1]).all())


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


def read_values(raw: bytes, lines: object) -> Mapping[str, Values]:
    """Return the fitted values of an artefact, by key.

    Args:
        raw: The file.
        lines: The lines of the columns.

    Raises:
        ValueError: The lines are no columns, or do not fit the file.
    """
    made: dict[str, Values] = {}
    try:
        for line in cast(list[Any], lines):
            column = derived_from(line)
            first = int(line["first"])
            count = int(line["count"])
            if not 0 <= first <= first + count <= len(raw) // ITEM_BYTES:
                raise ValueError(f"{column.name} is outside of the file")
            floats = column.has_floats
            part = np.frombuffer(raw, "<f8" if floats else "<i8", count, first * ITEM_BYTES)
            values: npt.NDArray[Any] = part.astype(np.float32 if floats else np.int64)
            if not bool((values[1:] > values[:-1]).all()):
                raise ValueError(f"{column.name} is not ascending")
            if column.kind is Kind.PIECEWISE and count not in (0, 2):
                raise ValueError(f"{column.name} has {count} ends")
            if column.kind in (Kind.SINE, Kind.COSINE) and count != 1:
                raise ValueError(f"{column.name} has {count} periods")
            made[column.key] = values
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return made
