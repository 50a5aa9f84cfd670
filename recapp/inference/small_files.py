"""The small files of an artefact: the dense part as safetensors, the example as an Arrow file."""

import io
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa
import safetensors.torch
import torch
from torch import Tensor

from recapp.dataset.raw_rows import RawTable
from recapp.errors import ArtefactError
from recapp.inference.artefact import DENSE, EXAMPLE, Artefact

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

    What they say of themselves is compared with the bytes that there are before anything is made
    of it: no few bytes become many rows, and nothing is decompressed.

    Raises:
        ArtefactError: They are damaged.
    """
    raw = artefact.read(EXAMPLE)
    try:
        if not raw.startswith(_ARROW):
            raise ValueError("it is no Arrow file")
        _check_messages(raw[len(_ARROW) :])
        # as messages one after the other: the footer could name others
        with pa.ipc.open_stream(raw[len(_ARROW) :]) as reader:
            rows = reader.read_all()
        rows.validate(full=True)
        return rows
    except (ValueError, OSError, struct.error, pa.ArrowException) as error:
        why = " ".join(str(error).split())
        raise artefact.damaged(f"{EXAMPLE} cannot be read: {why[:200]}") from error


def _check_messages(raw: bytes) -> None:
    """Check what the messages of an Arrow stream say of the values that they hold.

    Raises:
        ValueError: There are too many rows, more values than bytes have room for, or compressed
            ones.
    """
    rows = 0
    values = 0
    for message in pa.ipc.MessageReader.open_stream(raw):
        batch = _Table.root(bytes(message.metadata)).table(2)  # a message's header
        if message.type == "dictionary":
            batch = batch and batch.table(1)
        elif message.type != "record batch":
            continue
        if batch is None or batch.at(3):
            raise ValueError("it has compressed values")
        counts = list(batch.structs(1))  # of each array in it
        values += sum(counts)
        rows += batch.number(0)
        if rows > MOST_EXAMPLE_ROWS or min(counts, default=0) < 0:
            raise ValueError(f"it is said to have {rows:,} rows")
        if values > VALUES_PER_BYTE * len(raw):
            raise ValueError(f"it is said to have {values:,} values in {len(raw):,} bytes")


class _Table(NamedTuple):
    """A table of a flatbuffer: the form in which Arrow describes its messages.

    Args:
        raw: The flatbuffer.
        start: Where the table begins.
    """

    raw: bytes
    start: int

    @classmethod
    def root(cls, raw: bytes) -> "_Table":
        """Return the table that a flatbuffer begins with."""
        return cls(raw, int(struct.unpack_from("<I", raw)[0]))

    def at(self, field: int) -> int:
        """Return where a field is; 0 where it is left out."""
        fields = self.start - self._integer("<i", self.start)
        if 4 + 2 * field >= self._integer("<H", fields):
            return 0
        offset = self._integer("<H", fields + 4 + 2 * field)
        return self.start + offset if offset else 0

    def table(self, field: int) -> "_Table | None":
        """Return the table that a field leads to; None where it is left out."""
        at = self.at(field)
        return _Table(self.raw, at + self._integer("<I", at)) if at else None

    def number(self, field: int) -> int:
        """Return a field of 64 bits; 0 where it is left out."""
        at = self.at(field)
        return self._integer("<q", at) if at else 0

    def structs(self, field: int) -> Iterator[int]:
        """Yield the first numbers of the structs of two numbers that a field leads to."""
        at = self.at(field)
        if at:
            first = at + self._integer("<I", at)
            for i in range(self._integer("<I", first)):
                yield self._integer("<q", first + 4 + 16 * i)

    def _integer(self, form: str, at: int) -> int:
        return int(struct.unpack_from(form, self.raw, at)[0])
