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
VALUES_PER_BYTE = 8  # of an example's file; more of them take no room in it
_ARROW = b"ARROW1\0\0"  # in front of the messages of an Arrow file


def dense_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Return dense parameters and buffers as a safetensors file."""
    own = {name: values.detach().cpu().contiguous().clone() for name, values in state.items()}
    raw: bytes = safetensors.torch.save(own)
    return raw


def dense_state(raw: bytes) -> dict[str, Tensor]:
    """Return the dense part of the bytes of a safetensors file.

    Raises:
        ValueError: They are none, or have values that are not finite.
    """
    try:
        state: dict[str, Tensor] = safetensors.torch.load(raw)
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise ValueError(str(error)) from error
    for name, values in state.items():
        wide = values.float() if values.element_size() == 1 else values  # isfinite lacks 8 bits
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
    """Return the raw rows of the bytes of an Arrow file.

    The counts that it states are compared with its bytes before anything is made of it: no few
    bytes become many rows, and nothing is decompressed.

    Raises:
        ValueError: They are no such file.
    """
    if not raw.startswith(_ARROW):
        raise ValueError("it is no Arrow file")
    try:
        _check_sizes(raw[len(_ARROW) :])
        # as messages one after the other: the footer could name others
        with pa.ipc.open_stream(raw[len(_ARROW) :]) as reader:
            rows = reader.read_all()
        rows.validate(full=True)
    except (ValueError, OSError, pa.ArrowException) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error
    return rows


def _check_sizes(raw: bytes) -> None:
    """Check what an Arrow stream says of the values that it holds.

    Raises:
        ValueError: There are too many rows, more values than bytes have room for, or compressed
            ones.
    """
    rows = 0
    values = 0
    for sizes in sizes_of(raw):
        if sizes.compressed:
            raise ValueError("it has compressed values")
        rows += sizes.rows
        values += sizes.values
        if rows > MOST_EXAMPLE_ROWS:
            raise ValueError(f"it is said to have {rows:,} rows")
        if values > VALUES_PER_BYTE * len(raw):
            raise ValueError(f"it is said to have {values:,} values in {len(raw):,} bytes")
