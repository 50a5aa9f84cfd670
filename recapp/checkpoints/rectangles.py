"""Stored rectangles of logical tensors: where a value of a table lies in the files of a checkpoint.

    stored by 2 ranks (row strips)         wanted by another plan (a column strip)

    +-----------------+ rank-00000         . . . +-----+
    |  rows 0..600    |                    . . . |  x  |  <- rows 0..600 of its columns, a slice of the first block
    +-----------------+ rank-00001         . . . +-----+
    |  rows 600..1000 |                    . . . |  x  |  <- rows 600..1000, a slice of the second
    +-----------------+                    . . . +-----+

Pure: no file is opened here (`recapp/checkpoints/block_files.py` does).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recapp.errors import CheckpointError
from recapp.sharding.layout import Block

BLOCK_BYTES = 64 * 2**20    # of a stored row block: what saving copies and loading reads at a time
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)}


class Stored(NamedTuple):
    """One rectangle in a file.

    `shape` is of the whole logical tensor, `dtype` torch's name, `begin` and `end` are bytes of the file, `crc32` is of those bytes.
    """

    table: str
    tensor: str
    shape: tuple[int, int]
    rows: range
    cols: range
    dtype: str
    file: str
    begin: int
    end: int
    crc32: int

    @property
    def key(self) -> str:
        """Its name in the safetensors file."""
        return block_key(self.table, self.tensor, self.rows, self.cols)

    def to_dict(self) -> dict[str, Any]:
        """Plain types: an entry of the manifest."""
        return {"table": self.table, "tensor": self.tensor, "shape": list(self.shape), "rows": [self.rows.start, self.rows.stop],
                "cols": [self.cols.start, self.cols.stop], "dtype": self.dtype, "file": self.file, "bytes": [self.begin, self.end],
                "crc32": f"{self.crc32:08x}"}

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> "Stored":
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: an entry that `to_dict` would not write.
        """
        if plain["dtype"] not in DTYPES or Path(plain["file"]).name != plain["file"]:
            raise ValueError(f"dtype {plain['dtype']}, file {plain['file']}")
        (rows, columns), (begin, end) = plain["shape"], plain["bytes"]
        return Stored(plain["table"], plain["tensor"], (rows, columns), range(*plain["rows"]), range(*plain["cols"]), plain["dtype"],
                      plain["file"], begin, end, int(plain["crc32"], 16))


def block_key(table: str, tensor: str, rows: range, cols: range) -> str:
    """The name of a rectangle in a file and in messages."""
    return f"{table}/{tensor}/rows {rows.start}-{rows.stop}/cols {cols.start}-{cols.stop}"


def overlap(a: range, b: range) -> range:
    """What two ranges have in common; empty if nothing."""
    return range(max(a.start, b.start), max(min(a.stop, b.stop), a.start, b.start))


def check_tiling(stored: Sequence[Stored]) -> None:
    """The rectangles of one tensor cover it exactly once.

    Raises:
        CheckpointError: shapes that differ, a rectangle that leaves the tensor, an overlap, a hole.
    """
    name, shape = f"table {stored[0].table}, {stored[0].tensor}", stored[0].shape
    open_now: list[Stored] = []
    for s in sorted(stored, key=lambda s: s.rows.start):
        if s.shape != shape or s.rows.start < 0 or s.cols.start < 0 or s.rows.stop > shape[0] or s.cols.stop > shape[1]:
            raise CheckpointError(f"{name}: a stored block {s.key!r} of shape {by(s.shape)} does not lie in {by(shape)}")
        open_now = [o for o in open_now if o.rows.stop > s.rows.start]
        for o in open_now:
            if overlap(o.cols, s.cols):
                raise CheckpointError(f"{name}: the blocks {o.key!r} and {s.key!r} overlap")
        open_now.append(s)
    covered = sum(len(s.rows) * len(s.cols) for s in stored)
    if covered != shape[0] * shape[1]:
        raise CheckpointError(f"{name}: only {covered:,} of {shape[0] * shape[1]:,} values ({by(shape)}) are stored")


def by(shape: tuple[int, int]) -> str:
    """A shape for people."""
    return f"{shape[0]:,} x {shape[1]:,}"


def row_blocks(block: Block) -> list[range]:
    """A held rectangle's rows in parts of at most `BLOCK_BYTES`, a row at least."""
    per_row = len(block.cols) * block.data.element_size()
    step = max(1, BLOCK_BYTES // max(1, per_row))
    return [range(r, min(r + step, block.rows.stop)) for r in range(block.rows.start, block.rows.stop, step) if per_row]
