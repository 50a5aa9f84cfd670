"""How many bytes an Arrow IPC stream holds when it is unpacked, before anything unpacks it.

Buffers of a record batch may be compressed, and each says in front how long it will be: Arrow
takes that much memory before it looks further, a terabyte for a body of a few hundred bytes. So
these numbers are added up first. Arrow has verified the metadata (a flatbuffer) when it returns a
message; the few fields that matter are read here, as its format lays them out:

    Message      1 type of header, 2 header          RecordBatch      2 buffers, 3 compression
    types        2 dictionary batch, 3 record batch  DictionaryBatch  1 its record batch
"""

import struct
from collections.abc import Iterator

import pyarrow as pa

from recapp.serving.limits import Limits, check_body_bytes

DICTIONARY_BATCH = 2
RECORD_BATCH = 3
BUFFER = struct.Struct("<qq")  # offset in the body, length
LENGTH = struct.Struct("<q")  # unpacked; -1 where the buffer is not compressed
OFFSET = struct.Struct("<I")
BACK = struct.Struct("<i")
FIELD = struct.Struct("<H")


def check_unpacked_bytes(body: memoryview, limits: Limits) -> None:
    """Check that a stream does not hold more than the limit when it is unpacked.

    Args:
        body: The stream.
        limits: The limits; `max_body_bytes` counts.

    Raises:
        Refused: It holds more.
        ValueError: It is malformed.
        ArrowException: It is malformed.
    """
    total = 0
    for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(body)):
        total += sum(_compressed_lengths(message))
        check_body_bytes(total, limits)


def _compressed_lengths(message: pa.ipc.Message) -> Iterator[int]:
    """Yield the unpacked length of each compressed buffer of a message."""
    metadata = memoryview(message.metadata)
    try:
        yield from _lengths(metadata, memoryview(message.body or b""))
    except (struct.error, IndexError):
        raise ValueError("its metadata is damaged") from None


def _lengths(metadata: memoryview, data: memoryview) -> Iterator[int]:
    root = OFFSET.unpack_from(metadata, 0)[0]
    kind_at = _field(metadata, root, 1)
    header = _table(metadata, root, 2)
    kind = metadata[kind_at] if kind_at else 0
    if kind == DICTIONARY_BATCH and header:
        header = _table(metadata, header, 1)
    if kind not in (DICTIONARY_BATCH, RECORD_BATCH) or not header:
        return
    if not _field(metadata, header, 3):  # nothing is compressed
        return
    buffers = _table(metadata, header, 2)
    count = OFFSET.unpack_from(metadata, buffers)[0] if buffers else 0
    for number in range(count):
        start, length = BUFFER.unpack_from(metadata, buffers + 4 + number * BUFFER.size)
        if length:
            yield max(0, LENGTH.unpack_from(data, start)[0])


def _field(metadata: memoryview, table: int, number: int) -> int:
    """Return where a field of a table stands; 0 where it is absent."""
    fields = table - BACK.unpack_from(metadata, table)[0]
    entry = 4 + 2 * number
    if entry + 2 > FIELD.unpack_from(metadata, fields)[0]:
        return 0
    offset = FIELD.unpack_from(metadata, fields + entry)[0]
    return table + int(offset) if offset else 0


def _table(metadata: memoryview, table: int, number: int) -> int:
    """Return where the table or vector lies that a field refers to; 0 where it is absent."""
    at = _field(metadata, table, number)
    return at + int(OFFSET.unpack_from(metadata, at)[0]) if at else 0
