"""Read the sizes that messages of an Arrow IPC stream declare, before Arrow allocates memory.

The bytes are not trusted, but Arrow trusts them: a small message may declare a terabyte of nulls.
Arrow verifies the metadata (a flatbuffer) before it returns a message. This file reads the needed
fields by their numbers in the format:

    Message          1 kind of header, 2 header
    RecordBatch      0 rows, 1 arrays (length, nulls), 3 compression
    DictionaryBatch  1 its record batch
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

DICTIONARY_BATCH = 2
RECORD_BATCH = 3
PAIR = struct.Struct("<qq")
LENGTH = struct.Struct("<q")
OFFSET = struct.Struct("<I")
BACK = struct.Struct("<i")
FIELD = struct.Struct("<H")


@dataclass(frozen=True)
class Sizes:
    """The sizes that a message with values declares, unchecked.

    Args:
        rows: The number of rows.
        values: The lengths of all arrays added up, including arrays inside of lists.
        compressed: Whether the buffers are compressed.
    """

    rows: int
    values: int
    compressed: bool


def sizes_of(stream: pa.Buffer | bytes | memoryview) -> Iterator[Sizes]:
    """Yield the sizes of each record batch and dictionary of a stream.

    Raises:
        ValueError: The stream is malformed.
        ArrowException: The stream is malformed.
    """
    for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(stream)):
        try:
            sizes = _sizes(memoryview(message.metadata))
        except (struct.error, IndexError):
            raise ValueError("its metadata is damaged") from None
        if sizes is not None:
            yield sizes


def _sizes(metadata: memoryview) -> Sizes | None:
    root = OFFSET.unpack_from(metadata, 0)[0]
    kind_at = _field(metadata, root, 1)
    header = _reference(metadata, root, 2)
    kind = metadata[kind_at] if kind_at else 0
    if kind == DICTIONARY_BATCH and header:
        header = _reference(metadata, header, 1)
    if kind not in (DICTIONARY_BATCH, RECORD_BATCH) or not header:
        return None
    rows_at = _field(metadata, header, 0)
    lengths = [length for length, _ in _pairs(metadata, header, 1)]
    if min(lengths, default=0) < 0:
        raise ValueError("an array has fewer than no values")
    rows = LENGTH.unpack_from(metadata, rows_at)[0] if rows_at else 0
    return Sizes(rows, sum(lengths), bool(_field(metadata, header, 3)))


def _pairs(metadata: memoryview, table: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of numbers of the vector that a field refers to."""
    at = _reference(metadata, table, number)
    for index in range(OFFSET.unpack_from(metadata, at)[0] if at else 0):
        yield PAIR.unpack_from(metadata, at + 4 + index * PAIR.size)


def _field(metadata: memoryview, table: int, number: int) -> int:
    """Return the offset of a field of a table; 0 for an absent field."""
    fields = table - BACK.unpack_from(metadata, table)[0]
    entry = 4 + 2 * number
    if entry + 2 > FIELD.unpack_from(metadata, fields)[0]:
        return 0
    offset = FIELD.unpack_from(metadata, fields + entry)[0]
    return table + int(offset) if offset else 0


def _reference(metadata: memoryview, table: int, number: int) -> int:
    """Return the offset of the table or vector that a field refers to; 0 for an absent field."""
    at = _field(metadata, table, number)
    return at + int(OFFSET.unpack_from(metadata, at)[0]) if at else 0
