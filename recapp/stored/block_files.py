"""Files of stored rectangles: safetensors, one per rank, written by row blocks and read by slices.

Any reader of safetensors can open these files. Loading reads only the slices that it needs, and
unpickles nothing. This file has its own reader and writer, because the safetensors package needs
too much memory: to write, it needs all tensors of a file in CPU memory at once; to read a slice for
torch, it maps the whole file privately, which a memory limit counts in full. Here one row block, or
a few rows of a block, is in memory.

    8 bytes   length of the header, little endian
    header    JSON: {key: {dtype, shape, data_offsets}}, padded with blanks so that data is aligned
    data      the blocks, one behind the other

A rank checks that each row block is finite before it writes the block. A rank that needs some rows
of a stored block reads the whole block once and compares its checksum. At most two blocks, of at
most 64 MiB each, hold rows that the rank does not need. So the check costs little, and ranks need
not wait for each other. If the stored order of rows differs from the order in memory
(`recapp/tables/positions.py`), each block of a table has rows for every rank, so every rank reads
the whole table.

Stored rectangles map the values of a table to files:

    stored by 2 ranks (row strips)         wanted by another plan (a column strip)
    +-----------------+ rank-00000         . . . +-----+
    |  rows 0..600    |                    . . . |  x  |  <- a slice of the first block
    +-----------------+ rank-00001         . . . +-----+
    |  rows 600..1000 |                    . . . |  x  |  <- a slice of the second block
    +-----------------+                    . . . +-----+
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from recapp.errors import CheckpointError, suggest
from recapp.kernels.row_memory import is_finite
from recapp.sharding.layout import OF_WEIGHTS, Block, copy_rows, overlap
from recapp.stored.store import bytes_of, files_at, share
from recapp.tables.positions import RowOrder

BLOCK_BYTES = 64 * 2**20  # the most bytes of a stored block; a save copies a block at a time
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    )
}


class StoredBlock(NamedTuple):
    """A rectangle of a logical tensor in a file."""

    table: str
    # `weight`, or the name of a state of the optimiser.
    tensor: str
    # The shape of the whole logical tensor.
    shape: tuple[int, int]
    rows: range
    cols: range
    # Torch's name of the dtype: `float32`.
    dtype: str
    file: str
    # The first byte in the file.
    begin: int
    # One past the last byte in the file.
    end: int
    # The checksum of these bytes.
    crc32: int

    @property
    def key(self) -> str:
        """The rectangle's name in the safetensors file."""
        return block_key(self.table, self.tensor, self.rows, self.cols)

    def to_dict(self) -> dict[str, Any]:
        """Return the rectangle as an entry of the manifest, in plain types."""
        return {
            "table": self.table,
            "tensor": self.tensor,
            "shape": list(self.shape),
            "rows": [self.rows.start, self.rows.stop],
            "cols": [self.cols.start, self.cols.stop],
            "dtype": self.dtype,
            "file": self.file,
            "bytes": [self.begin, self.end],
            "crc32": f"{self.crc32:08x}",
        }

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> "StoredBlock":
        """Return the rectangle of an entry of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: The entry is invalid.
        """
        if plain["dtype"] not in DTYPES or Path(plain["file"]).name != plain["file"]:
            raise ValueError(f"dtype {plain['dtype']}, file {plain['file']}")
        shape = _pair(plain, "shape")
        span = _pair(plain, "bytes")
        rows, cols = (range(*_pair(plain, key)) for key in ("rows", "cols"))
        block = StoredBlock(
            str(plain["table"]),
            str(plain["tensor"]),
            shape,
            rows,
            cols,
            plain["dtype"],
            plain["file"],
            *span,
            int(plain["crc32"], 16),
        )
        needed = len(rows) * len(cols) * DTYPES[block.dtype].itemsize
        if not needed or span[1] - span[0] != needed:
            raise ValueError(f"block {block.key!r} of {block.dtype} in {span[1] - span[0]:,} bytes")
        return block


def _pair(plain: dict[str, Any], key: str) -> tuple[int, int]:
    """Return an entry of two integers of at least 0; refuse True and 1.0."""
    first, second = plain[key]
    if type(first) is not int or type(second) is not int or min(first, second) < 0:
        raise ValueError(f"{key} {plain[key]}")
    return first, second


def block_key(table: str, tensor: str, rows: range, cols: range) -> str:
    """Return the name of a rectangle in a file and in messages."""
    return f"{table}/{tensor}/rows {rows.start}-{rows.stop}/cols {cols.start}-{cols.stop}"


def check_tiling(stored: Sequence[StoredBlock]) -> None:
    """Check that the rectangles of one tensor cover it exactly once.

    Where rectangles meet inside of the tensor, each point is a corner of an even number of them.
    So if all points with an odd number are the tensor's own corners, each value is covered an odd
    number of times; and with as many values as the tensor has, once.

    Args:
        stored: All stored rectangles of the tensor; at least one.

    Raises:
        CheckpointError: Shapes differ, a rectangle leaves the tensor, two overlap, or they leave a
            hole.
    """
    name = f"table {stored[0].table}, {stored[0].tensor}"
    shape = stored[0].shape
    odd: set[tuple[int, int]] = {(0, 0), (0, shape[1]), (shape[0], 0), shape}
    for s in stored:
        if s.shape != shape or s.rows.stop > shape[0] or s.cols.stop > shape[1]:
            raise CheckpointError(
                f"{name}: a stored block {s.key!r} of shape {by(s.shape)} does not lie in "
                f"{by(shape)}"
            )
        odd ^= set(product((s.rows.start, s.rows.stop), (s.cols.start, s.cols.stop)))
    covered = sum(len(s.rows) * len(s.cols) for s in stored)
    whole = shape[0] * shape[1]
    if covered < whole:
        raise CheckpointError(
            f"{name}: only {covered:,} of {whole:,} values ({by(shape)}) are stored"
        )
    if odd or covered > whole:
        raise CheckpointError(f"{name}: its stored blocks overlap")


def by(shape: tuple[int, int]) -> str:
    """Return a shape as text: `1,000 x 16`."""
    return f"{shape[0]:,} x {shape[1]:,}"


def row_blocks(block: Block) -> list[range]:
    """Split the rows of a block into parts of at most `BLOCK_BYTES`, but at least one row."""
    per_row = len(block.cols) * block.data.element_size()
    step = max(1, BLOCK_BYTES // max(1, per_row))
    return [
        range(r, min(r + step, block.rows.stop))
        for r in range(block.rows.start, block.rows.stop, step)
        if per_row
    ]


# ---- files

LENGTH_BYTES = 8  # of the field for the header's length, and the alignment of data
NOT_SAVED = (
    "weights that are not finite (NaN or infinity), so this checkpoint is not written and earlier "
    "ones stay as they are; go on from one of those with smaller rates (optimizer.sparse.lr, "
    "optimizer.dense.lr)"
)
STATE_NOT_SAVED = (
    "{state} of the optimiser is not finite (NaN or infinity): a gradient was too large, and what "
    "it belongs to would not train any more; so this checkpoint is not written and earlier ones "
    "stay as they are: make the numbers of rows smaller (dataset.weight; or a dense column that is "
    "huge: dataset.dense_transform=log1p)"
)
# stored rows read at a time; memory beside the shard that they are copied into
READ_BYTES = 16 * 2**20
_FORMAT_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def write_blocks(folder: Path, file: str, blocks: Iterable[Block]) -> list[StoredBlock]:
    """Write the owned blocks of one rank into one file, row block by row block.

    A rank that owns no block writes no file.

    Args:
        folder: The directory, which must exist.
        file: The name of the file.
        blocks: The blocks that this rank holds; blocks of other owners are skipped.

    Returns:
        The stored rectangles, in file order.

    Raises:
        OSError: The disk is full, or there is no permission.
        CheckpointError: Weights, or the state of their optimiser, are not finite; the text names
            the first such rows.
    """
    # Wide dtypes first, as the format's readers want every tensor aligned to its items and no gaps.
    parts = sorted(
        ((b, rows) for b in blocks if b.owner for rows in row_blocks(b)),
        key=lambda p: -p[0].data.element_size(),
    )
    if not parts:
        return []
    entries = {}
    spans = []
    end = 0
    for b, rows in parts:
        assert b.data.shape == (len(b.rows), len(b.cols)), (
            f"{b.table}, {b.tensor}: {tuple(b.data.shape)} held for {b.rows} x {b.cols}"
        )
        spans.append((end, end + len(rows) * len(b.cols) * b.data.element_size()))
        end = spans[-1][1]
        entries[block_key(b.table, b.tensor, rows, b.cols)] = {
            "dtype": _FORMAT_NAMES[b.data.dtype],
            "shape": [len(rows), len(b.cols)],
            "data_offsets": spans[-1],
        }
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % LENGTH_BYTES)
    base = LENGTH_BYTES + len(head)
    stored = []
    with files_at(folder).create(folder / file) as out:
        out.write(len(head).to_bytes(LENGTH_BYTES, "little") + head)
        for (b, rows), (begin, end) in zip(parts, spans, strict=True):
            part = _rows_of(b, rows)
            if not is_finite(part):
                template = NOT_SAVED if b.tensor in OF_WEIGHTS else STATE_NOT_SAVED
                at = f"table {b.table}, rows {rows.start}-{rows.stop}"
                raise CheckpointError(f"{at}: {template.format(state=b.tensor)}")
            raw = _bytes(part)
            out.write(raw)
            stored.append(
                StoredBlock(
                    b.table,
                    b.tensor,
                    b.shape,
                    rows,
                    b.cols,
                    str(b.data.dtype).removeprefix("torch."),
                    file,
                    base + begin,
                    base + end,
                    zlib.crc32(raw),
                )
            )
    return stored


def link_blocks(
    folder: Path, file: str, blocks: Iterable[Block], saved: Path, stored: Sequence[StoredBlock]
) -> bool:
    """Give a rank's file of another checkpoint a second name, if it has the same blocks: that costs
    a checksum instead of a write.

    Args:
        folder: The directory, which must exist.
        file: The name of the file in both.
        blocks: The blocks that this rank holds.
        saved: The other checkpoint.
        stored: The rectangles in its file.

    Returns:
        Whether `folder` has the file now.
    """
    left = {(s.key, s.shape, s.dtype): s.crc32 for s in stored}
    for b in blocks:
        for rows in row_blocks(b) if b.owner else ():
            key = block_key(b.table, b.tensor, rows, b.cols)
            known = left.pop((key, b.shape, str(b.data.dtype).removeprefix("torch.")), None)
            if known is None or known != zlib.crc32(_bytes(_rows_of(b, rows))):
                return False
    return bool(stored) and not left and share(saved / file, folder / file)


def _rows_of(b: Block, rows: range) -> Tensor:
    return b.data[rows.start - b.rows.start : rows.stop - b.rows.start].detach().cpu()


def _bytes(data: Tensor) -> memoryview:
    return data.reshape(-1).view(torch.uint8).numpy().data


# ---- reading


class StoredSource(NamedTuple):
    """A stored rectangle, and the rectangles of a rank that it fills.

    Args:
        stored: The rectangle.
        order: The order of its rows; None for the order of row numbers.
        blocks: The rectangles in the rank's memory that it fills, at least in part.
    """

    stored: StoredBlock
    order: RowOrder | None
    blocks: list[Block]


def sources_of(
    tensors: Mapping[tuple[str, str], Sequence[StoredBlock]],
    orders: Mapping[str, RowOrder],
    blocks: Iterable[Block],
) -> list[StoredSource]:
    """Return the stored rectangles that fill the blocks; open no file.

    The stored tables may have another tiling and another order of rows than the blocks. If the
    orders differ, a block needs some rows of every stored rectangle in its columns.

    Args:
        tensors: The stored rectangles of each (table, tensor).
        orders: The stored order of rows of each table that is not stored in the order of row
            numbers.
        blocks: The blocks to fill, owned or not.

    Raises:
        CheckpointError: A table or tensor is not stored, has another shape, or has a hole.
    """
    checked = set[tuple[str, str]]()
    sources = dict[tuple[str, str], StoredSource]()
    for b in blocks:
        if not b.data.numel():
            continue
        stored = _stored_of(tensors, b)
        if (b.table, b.tensor) not in checked:
            check_tiling(stored)
            checked.add((b.table, b.tensor))
        order = orders.get(b.table)
        for s in stored:
            if overlap(s.cols, b.cols) and (order != b.order or overlap(s.rows, b.rows)):
                sources.setdefault((s.file, s.key), StoredSource(s, order, [])).blocks.append(b)
    return list(sources.values())


def fill_blocks(
    folder: Path, sources: Sequence[StoredSource], opened: Callable[[str], BinaryIO]
) -> None:
    """Fill blocks from stored rectangles; convert floats to the dtype of the block.

    Args:
        folder: The directory of the files, for messages.
        sources: The result of `sources_of`.
        opened: Returns a file of the checkpoint by its name, open for reading.

    Raises:
        CheckpointError: A file is damaged.
    """
    file_of = cache(lambda file: _BlockFile(folder / file, opened(file)))
    with torch.no_grad():
        for stored, order, blocks in sources:
            for rows, part in file_of(stored.file).read(stored):
                for b in blocks:
                    copy_rows(b, part, rows, stored.cols, order)


def _stored_of(
    by_tensor: Mapping[tuple[str, str], Sequence[StoredBlock]], block: Block
) -> Sequence[StoredBlock]:
    stored = by_tensor.get((block.table, block.tensor))
    if stored is None:
        tables = {table for table, _ in by_tensor}
        if block.table not in tables:
            raise CheckpointError(
                f"the checkpoint has no table {block.table}: {suggest(block.table, tables)}"
            )
        has = ", ".join(sorted(tensor for table, tensor in by_tensor if table == block.table))
        raise CheckpointError(
            f"the checkpoint has no {block.tensor} of table {block.table}, only {has}: "
            "set the optimizer that it was trained with"
        )
    if stored[0].shape != block.shape:
        raise CheckpointError(
            f"table {block.table}, {block.tensor} is {by(stored[0].shape)} in the checkpoint, but "
            f"{by(block.shape)} in the model: set tables and optimizer as they were when it was "
            "saved"
        )
    if DTYPES[stored[0].dtype].is_floating_point != block.data.dtype.is_floating_point:
        raise CheckpointError(
            f"table {block.table}, {block.tensor} is stored as {stored[0].dtype} and cannot become "
            f"{block.data.dtype}"
        )
    return stored


class _BlockFile:
    """A file of stored rectangles, open for reading.

    Args:
        file: Its name, for messages.
        source: The open file.

    Raises:
        CheckpointError: The file has no safetensors header.
    """

    def __init__(self, file: Path, source: BinaryIO) -> None:
        self.file = file
        self.source = source
        try:
            source.seek(0)
            length = int.from_bytes(source.read(LENGTH_BYTES), "little")
            if length > bytes_of(source):
                raise ValueError(f"its header would have {length:,} bytes")
            self.base = LENGTH_BYTES + length
            self.header = dict(json.loads(source.read(length)))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def read(self, stored: StoredBlock) -> Iterator[tuple[range, Tensor]]:
        """Yield the rows of a stored rectangle in all its columns, a few at a time; compare its
        checksum after the last rows.

        Args:
            stored: The rectangle.

        Yields:
            A range of rows, numbered as in the whole tensor, and their values [rows, columns of the
            rectangle].

        Raises:
            CheckpointError: The file does not hold the rectangle at the manifest's offset, or the
                bytes differ.
        """
        dtype = DTYPES[stored.dtype]
        shape = [len(stored.rows), len(stored.cols)]
        offsets = [stored.begin - self.base, stored.end - self.base]
        if self.header.get(stored.key) != {
            "dtype": _FORMAT_NAMES[dtype],
            "shape": shape,
            "data_offsets": offsets,
        }:
            raise CheckpointError(
                f"{self.file}: block {stored.key!r} cannot be read: the manifest and the file "
                "disagree about it"
            )
        checksum = 0
        for some, raw in self._pieces(stored):
            checksum = zlib.crc32(raw, checksum)
            yield some, torch.frombuffer(raw, dtype=dtype).view(len(some), shape[1])
        if checksum != stored.crc32:
            raise CheckpointError(
                f"{self.file} is damaged: table {stored.table}, {stored.tensor}, rows "
                f"{stored.rows.start}-{stored.rows.stop}: bytes {stored.begin}-{stored.end} are "
                "not those that were saved; use another checkpoint"
            )

    def _pieces(self, stored: StoredBlock) -> Iterator[tuple[range, bytearray]]:
        per_row = (stored.end - stored.begin) // len(stored.rows)
        step = max(1, READ_BYTES // per_row)
        for first in range(stored.rows.start, stored.rows.stop, step):
            some = range(first, min(first + step, stored.rows.stop))
            raw = bytearray(len(some) * per_row)
            self.source.seek(stored.begin + (first - stored.rows.start) * per_row)
            if self.source.readinto(raw) != len(raw):  # type: ignore[attr-defined]
                raise CheckpointError(
                    f"{self.file}: block {stored.key!r} cannot be read: the file ends before it "
                    "does"
                )
            yield some, raw


def check_bytes(
    folder: Path, stored: Iterable[StoredBlock], opened: Callable[[str], BinaryIO]
) -> int:
    """Read all stored blocks, and compare their checksums.

    Args:
        folder: The directory of the files, for messages.
        stored: The entries of the manifest.
        opened: Returns a file of the checkpoint by its name, open for reading.

    Returns:
        The number of bytes read.

    Raises:
        CheckpointError: A block is damaged, or its file does not hold it; the text names the first
            such block.
    """
    file_of = cache(lambda file: _BlockFile(folder / file, opened(file)))
    return sum(part.nbytes for s in stored for _, part in file_of(s.file).read(s))
