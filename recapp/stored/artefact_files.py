"""The small files of an artefact: the dense part as safetensors, the example as an Arrow file."""

import io
from collections.abc import Mapping

import pyarrow as pa
import safetensors.torch
import torch
from torch import Tensor

from recapp.dataset.arrow_messages import sizes_of
from recapp.dataset.raw_rows import RawTable
from recapp.errors import ArtefactError
from recapp.stored.artefact_manifest import DENSE, EXAMPLE
from recapp.stored.snapshot import Artefact

EXAMPLE_ROWS = 16
MOST_EXAMPLE_ROWS = 4096
VALUES_PER_BYTE = 8  # of an example's file; more of them take no room in it
_ARROW = b"ARROW1\0\0"  # in front of the messages of an Arrow file


def dense_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Return dense parameters and buffers as a safetensors file."""
    own = {name: values.detach().cpu().contiguous().clone() for name, values in state.items()}
    raw: bytes = safetensors.torch.save(own)
    return raw


def read_dense(artefact: Artefact) -> dict[str, Tensor]:
    """Read the dense part.

    Raises:
        ArtefactError: It is damaged, or has values that are not finite.
    """
    try:
        state: dict[str, Tensor] = safetensors.torch.load(artefact.read(DENSE))
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise artefact.damaged(f"{DENSE} cannot be read: {error}") from error
    for name, values in state.items():
        wide = values.float() if values.element_size() == 1 else values  # of 8 bits torch asks not
        if values.is_floating_point() and not bool(torch.isfinite(wide).all()):
            raise ArtefactError(
                f"{artefact.path / DENSE}: {name} has values that are not finite: export another "
                "checkpoint"
            )
    return state


def example_bytes(rows: RawTable) -> bytes:
    """Return raw rows as an Arrow file."""
    out = io.BytesIO()
    with pa.ipc.new_file(out, rows.schema) as writer:
        writer.write_table(rows)
    return out.getvalue()


def read_example(artefact: Artefact) -> RawTable:
    """Read the raw rows that an artefact is tried with.

    What they say of themselves is compared with the bytes that there are before anything is made
    of it: no few bytes become many rows, and nothing is decompressed.

    Raises:
        ArtefactError: They are damaged.
    """
    raw = artefact.read(EXAMPLE)
    try:
        if not raw.startswith(_ARROW):
            raise ValueError("it is no Arrow file")
        _check_sizes(raw[len(_ARROW) :])
        # as messages one after the other: the footer could name others
        with pa.ipc.open_stream(raw[len(_ARROW) :]) as reader:
            rows = reader.read_all()
        rows.validate(full=True)
        return rows
    except (ValueError, OSError, pa.ArrowException) as error:
        why = " ".join(str(error).split())
        raise artefact.damaged(f"{EXAMPLE} cannot be read: {why[:200]}") from error


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
