"""The small files of an artefact: the dense part as safetensors, the example as an Arrow file."""

import io
from collections.abc import Mapping

import pyarrow as pa
import safetensors.torch
import torch
from torch import Tensor

from recapp.dataset.arrow_messages import sizes_of
from recapp.dataset.raw_rows import RawTable

EXAMPLE_ROWS = 16
MOST_EXAMPLE_ROWS = 4096
VALUES_PER_BYTE = 8  # the most of an example's file: a value takes at least a bit
_ARROW = b"ARROW1\0\0"  # the start of an Arrow file, before its messages


def dense_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Return dense parameters and buffers as a safetensors file."""
    own = {name: values.detach().cpu().contiguous().clone() for name, values in state.items()}
    raw: bytes = safetensors.torch.save(own)
    return raw


def dense_state(raw: bytes) -> dict[str, Tensor]:
    """Read the dense part from the bytes of a safetensors file.

    Raises:
        ValueError: The bytes are not a safetensors file, or a value is not finite.
    """
    try:
        state: dict[str, Tensor] = safetensors.torch.load(raw)
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise ValueError(str(error)) from error
    for name, values in state.items():
        wide = values.float() if values.element_size() == 1 else values  # isfinite lacks float8
        if values.is_floating_point() and not bool(torch.isfinite(wide).all()):
            raise ValueError(f"{name} has values that are not finite")
    return state


def example_bytes(rows: RawTable) -> bytes:
    """Return raw rows as an Arrow file."""
    out = io.BytesIO()
    with pa.ipc.new_file(out, rows.schema) as writer:
        writer.write_table(rows)
    return out.getvalue()


def example_table(raw: bytes) -> RawTable:
    """Read raw rows from the bytes of an Arrow file.

    This compares the counts that the file declares with its size before it reads rows. So a small
    file cannot expand to many rows. Compressed files are refused.

    Raises:
        ValueError: The bytes are not such a file.
    """
    if not raw.startswith(_ARROW):
        raise ValueError("it is no Arrow file")
    try:
        _check_sizes(raw[len(_ARROW) :])
        # reads the messages in order, because the footer could name other messages
        with pa.ipc.open_stream(raw[len(_ARROW) :]) as reader:
            rows = reader.read_all()
        rows.validate(full=True)
    except (ValueError, OSError, pa.ArrowException) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error
    return rows


def _check_sizes(raw: bytes) -> None:
    """Check the counts that an Arrow stream declares.

    Raises:
        ValueError: The stream has too many rows, more values than its bytes can hold, or compressed
            values.
    """
    rows = 0
    values = 0
    for sizes in sizes_of(raw):
        if sizes.compressed:
            raise ValueError("it has compressed values")
        rows += sizes.rows
        values += sizes.values
        if rows > MOST_EXAMPLE_ROWS:
            raise ValueError(f"it declares {rows:,} rows")
        if values > VALUES_PER_BYTE * len(raw):
            raise ValueError(f"it declares {values:,} values in {len(raw):,} bytes")
