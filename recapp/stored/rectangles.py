"""Stored rectangles of logical tensors: they map the values of a table to files of a checkpoint.

    stored by 2 ranks (row strips)         wanted by another plan (a column strip)

    +-----------------+ rank-00000         . . . +-----+
    |  rows 0..600    |                    . . . |  x  |  <- a slice of the first block
    +-----------------+ rank-00001         . . . +-----+
    |  rows 600..1000 |                    . . . |  x  |  <- a slice of the second block
    +-----------------+                    . . . +-----+

This file opens no file; `recapp/stored/block_files.py` does.
"""

import heapq
from bisect import bisect_right, insort
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recapp.errors import CheckpointError
from recapp.sharding.layout import Block, overlap

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
    tensor: str
    """`weight`, or the name of a state of the optimiser."""
    shape: tuple[int, int]
    """The shape of the whole logical tensor."""
    rows: range
    cols: range
    dtype: str
    """Torch's name of the dtype: `float32`."""
    file: str
    begin: int
    """The first byte in the file."""
    end: int
    """One past the last byte in the file."""
    crc32: int
    """The checksum of these bytes."""

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
        held = _pair(plain, "bytes")
        rows, cols = (range(*_pair(plain, key)) for key in ("rows", "cols"))
        made = StoredBlock(
            str(plain["table"]),
            str(plain["tensor"]),
            shape,
            rows,
            cols,
            plain["dtype"],
            plain["file"],
            *held,
            int(plain["crc32"], 16),
        )
        needed = len(rows) * len(cols) * DTYPES[made.dtype].itemsize
        if not needed or held[1] - held[0] != needed:
            raise ValueError(f"block {made.key!r} of {made.dtype} in {held[1] - held[0]:,} bytes")
        return made


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

    The rectangles are visited in the order of their first row. Visited rectangles that reach the
    current row are kept in the order of their columns, side by side. So each new rectangle is
    compared only with its two neighbours.

    Args:
        stored: All stored rectangles of the tensor; at least one.

    Raises:
        CheckpointError: Shapes differ, a rectangle leaves the tensor, two overlap, or they leave a
            hole.
    """
    name = f"table {stored[0].table}, {stored[0].tensor}"
    shape = stored[0].shape
    beside: list[tuple[int, int]] = []  # first column, and index in `ordered`
    ends: list[tuple[int, tuple[int, int]]] = []  # one past the last row, and entry of `beside`
    ordered = sorted(stored, key=lambda s: s.rows.start)
    for number, s in enumerate(ordered):
        if s.shape != shape or s.rows.stop > shape[0] or s.cols.stop > shape[1]:
            raise CheckpointError(
                f"{name}: a stored block {s.key!r} of shape {by(s.shape)} does not lie in "
                f"{by(shape)}"
            )
        while ends and ends[0][0] <= s.rows.start:
            gone = heapq.heappop(ends)[1]
            del beside[bisect_right(beside, gone) - 1]
        at = bisect_right(beside, (s.cols.start, number))
        for _, other in beside[max(at - 1, 0) : at + 1]:
            if overlap(ordered[other].cols, s.cols):
                raise CheckpointError(
                    f"{name}: the blocks {ordered[other].key!r} and {s.key!r} overlap"
                )
        entry = (s.cols.start, number)
        insort(beside, entry)
        heapq.heappush(ends, (s.rows.stop, entry))
    covered = sum(len(s.rows) * len(s.cols) for s in stored)
    if covered != shape[0] * shape[1]:
        raise CheckpointError(
            f"{name}: only {covered:,} of {shape[0] * shape[1]:,} values ({by(shape)}) are stored"
        )


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
