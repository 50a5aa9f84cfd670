"""The small files of an artefact: the dense part as safetensors, the example as an Arrow file."""

import io
from collections.abc import Mapping

import pyarrow as pa
import safetensors.torch
import torch
from torch import Tensor

from recapp.dataset.raw_rows import RawTable
from recapp.errors import ArtefactError
from recapp.inference.artefact import DENSE, EXAMPLE, Artefact

EXAMPLE_ROWS = 16


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
    except (ValueError, safetensors.SafetensorError) as error:
        raise artefact.damaged(f"{DENSE} cannot be read: {error}") from error
    for name, values in state.items():
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise ArtefactError(
                f"{artefact.folder / DENSE}: {name} has values that are not finite: export "
                "another checkpoint"
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

    Raises:
        ArtefactError: They are damaged.
    """
    try:
        with pa.ipc.open_file(pa.BufferReader(artefact.read(EXAMPLE))) as reader:
            rows = reader.read_all()
        rows.validate(full=True)
        return rows
    except pa.ArrowInvalid as error:
        raise artefact.damaged(f"{EXAMPLE} cannot be read: {error}") from error
