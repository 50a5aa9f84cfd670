"""Rows in 8 or 4 bits, for inference: packed rows in contiguous memory, quantised by the
minimum and maximum of each row, as in FBGEMM's fused row-wise formats.

    packed row = [packed values | zeros up to whole words | scale | bias]

| bits | packed values       | scale, bias | a row of 128 columns    |
|------|---------------------|-------------|-------------------------|
| 8    | a byte for each     | fp32        | 128 + 8 = 136 bytes     |
| 4    | a byte for two; the | fp16        | 64 + 4 = 68 bytes       |
|      | even column lies low|             |                         |

A value is `scale * q + bias`: a product and a sum, each rounded, in the type of the arithmetic. For
a row of floats with smallest value `low` and largest value `high`, in fp32:

    bias  = low, rounded to its type
    scale = (high - bias) / (2^bits - 1), rounded to its type; 0 for one value
    q     = (value - bias) / scale, rounded to the nearest integer, ties to even, then cut off to
            0 .. 2^bits - 1

So a value changes by at most half a scale, plus the effect of rounding scale and bias. A packed
row depends on its row of floats alone, not on the parts in which a table is written.

These torch functions define the result that faster kernels (`pool` of the backends) reproduce.
Packed rows may lie in files that are mapped read-only: only `QuantisedRows.fill` writes to them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recapp.kernels.row_memory import RowMemory

# The possible numbers of bits of a value.
BITS = (8, 4)
WORD_BYTES = 4
# The type of a packed row's scale and bias, by the bits of its values.
NUMBER_TYPES = {8: torch.float32, 4: torch.float16}
PART_ELEMENTS = 1 << 22  # converted at a time; each element needs some floats of scratch memory


@dataclass(frozen=True, eq=False)
class QuantisedRows:
    """The rows of a table or of a store as packed rows, in memory or in a mapped file.

    Args:
        packed_RK: The packed rows (uint8), [R, K] without gaps, the first at a multiple of four
            bytes; K = `bytes_of_packed_row(width, bits)`.
        width: The number of columns D.
        bits: The bits of a value, 8 or 4.

    Raises:
        ValueError: Packed rows have another type or size, have gaps, or are not aligned to four
            bytes.
    """

    packed_RK: Tensor
    width: int
    bits: int

    def __post_init__(self) -> None:
        size = bytes_of_packed_row(self.width, self.bits)
        packed_RK = self.packed_RK
        what = f"packed rows of {self.width} columns in {self.bits} bits are"
        if packed_RK.dtype != torch.uint8 or packed_RK.shape[1:] != (size,):
            raise ValueError(
                f"{what} uint8 [rows, {size}]; these are {_name(packed_RK.dtype)} "
                f"{list(packed_RK.shape)}"
            )
        if not packed_RK.is_contiguous() or packed_RK.data_ptr() % WORD_BYTES:
            raise ValueError(
                f"{what} read word by word: they lie without gaps, from a multiple of "
                f"{WORD_BYTES} bytes on; these have strides {list(packed_RK.stride())} at byte "
                f"{packed_RK.data_ptr() % WORD_BYTES} of a word: copy them"
            )

    def __len__(self) -> int:
        return len(self.packed_RK)

    def __getitem__(self, rows: "Tensor | slice") -> "QuantisedRows":
        """Return some rows: a copy, or a view of neighbours."""
        return QuantisedRows(self.packed_RK[rows], self.width, self.bits)

    def __getstate__(self) -> dict[str, Any]:
        return {"packed_RK": self.packed_RK, "width": self.width, "bits": self.bits}

    @cached_property
    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """The memory on the CPU as two flat arrays: bytes, and numbers in the type of scale and
        bias (fp16 as uint16). They are made once, because this takes longer than a small batch.
        """
        numbers = self.numbers_RN.view(-1)
        if numbers.dtype == torch.float16:
            numbers = numbers.view(torch.uint16)
        return self.packed_RK.view(-1).numpy(), numbers.numpy()

    @property
    def values_RP(self) -> Tensor:
        """The bytes of the values, [R, P], a view without the padding."""
        return self.packed_RK[:, : -(-self.width * self.bits // 8)]

    @property
    def numbers_RN(self) -> Tensor:
        """The memory in the type of scale and bias, [R, n], a view: the last two numbers of a row
        are its scale and bias.
        """
        return self.packed_RK.view(NUMBER_TYPES[self.bits])

    @property
    def scale_R(self) -> Tensor:
        """The scale of each row, a view."""
        return self.numbers_RN[:, -2]

    @property
    def bias_R(self) -> Tensor:
        """The bias of each row, a view."""
        return self.numbers_RN[:, -1]

    def fill(self, first: int, weights_RD: Tensor) -> None:
        """Quantise rows of floats into the packed rows from number `first` on.

        It takes memory for a few million values more, whatever the number of rows.

        Args:
            first: The number of the first packed row to write.
            weights_RD: The rows.

        Raises:
            ValueError: The rows have other columns or are too many, or a row has a value that is
                not finite or too large; the packed rows before this row have been written.
        """
        if weights_RD.dim() != 2 or weights_RD.shape[1] != self.width:
            raise ValueError(
                f"rows have {self.width} columns, and the values have the shape "
                f"{list(weights_RD.shape)}"
            )
        if not 0 <= first <= len(self) - len(weights_RD):
            raise ValueError(
                f"{len(weights_RD):,} rows from {first:,} on do not fit in {len(self):,} "
                "packed rows"
            )
        step = _rows_of_part(self.width)
        for begin in range(0, len(weights_RD), step):
            part_RD = weights_RD[begin : begin + step].float()
            here = first + begin
            _write(self[here : here + len(part_RD)], part_RD, here)

    def strip_of(self, rows: range, columns: range) -> "QuantisedRows":
        """Return a rectangle whose packed rows keep the scale and bias of the whole rows: its
        values have the same bits as in the whole rows.

        With 4 bits a strip may begin and end at odd columns as well: its values are packed again.

        Args:
            rows: The rows of the rectangle.
            columns: The columns of the rectangle. All columns give a view of these packed rows,
                fewer a copy.

        Raises:
            ValueError: The rectangle is not inside of the table, has no columns, or skips some.
        """
        inside = (rows, len(self)), (columns, self.width)
        if not columns or any(r.step != 1 or r.start < 0 or r.stop > n for r, n in inside):
            raise ValueError(
                f"rows {rows}, columns {columns}: no rectangle of {len(self):,} rows x "
                f"{self.width} columns"
            )
        whole = self[rows.start : max(rows.start, rows.stop)]
        if len(columns) == self.width:
            return whole
        strip = empty_rows(len(rows), len(columns), self.bits, whole.packed_RK.device)
        step = _rows_of_part(self.width)
        for begin in range(0, len(rows), step):
            part = whole[begin : begin + step]
            q_RD = _unpacked(part)[:, columns.start : columns.stop]
            _put(strip[begin : begin + step], q_RD, part.scale_R, part.bias_R)
        return strip


def bytes_of_packed_row(width: int, bits: int) -> int:
    """Return the bytes of a packed row of `width` columns.

    Values are padded to whole words of four bytes, so that every scale is aligned. More padding
    gains nothing: a row of some cache lines and a few bytes (136 or 68 bytes for 128 columns)
    touches one line more, whatever word it begins at, and whole lines for each row would take 1.4
    and 1.9 times the memory.

    Raises:
        ValueError: `bits` is neither 8 nor 4, or there are no columns.
    """
    if bits not in BITS:
        raise ValueError(f"bits={bits}: must be 4 or 8")
    if width < 1:
        raise ValueError(f"width={width}: must be at least 1")
    words = -(-width * bits // (8 * WORD_BYTES))
    return words * WORD_BYTES + 2 * NUMBER_TYPES[bits].itemsize


def empty_rows(
    rows: int, width: int, bits: int, device: torch.device | str = "cpu"
) -> QuantisedRows:
    """Return empty packed rows, for `QuantisedRows.fill`.

    Large memory asks for huge pages (`row_memory.py`). Among gigabytes, a random packed row is
    then read in half to a fifth of the time that it takes in a mapped file, whose pages have 4 KB.

    Raises:
        ValueError: `bits` is neither 8 nor 4, or there are no columns.
    """
    memory = RowMemory(rows, bytes_of_packed_row(width, bits), torch.uint8, torch.device(device))
    memory.grow(rows)
    return QuantisedRows(memory.rows, width, bits)


def quantise(weights_RD: Tensor, bits: int) -> QuantisedRows:
    """Return rows of floats as packed rows.

    Raises:
        ValueError: `bits` is neither 8 nor 4, there are no columns, or a row has a value that is
            not finite or too large.
    """
    packed = empty_rows(len(weights_RD), weights_RD.shape[1], bits, weights_RD.device)
    packed.fill(0, weights_RD)
    return packed


def dequantise(rows: QuantisedRows, row_N: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of some rows, [N, D], computed in `dtype`."""
    read = rows[row_N.long()]
    values_ND = _unpacked(read).to(dtype) * read.scale_R[:, None].to(dtype)
    return values_ND + read.bias_R[:, None].to(dtype)


def _write(rows: QuantisedRows, weights_RD: Tensor, first: int) -> None:
    """Quantise a part of the rows; `first` is the number of its first row in errors."""
    if not len(rows):
        return
    dtype = NUMBER_TYPES[rows.bits]
    top = 2**rows.bits - 1
    low_R = weights_RD.amin(1) + 0.0  # makes +0 of -0, whichever of the two was found
    high_R = weights_RD.amax(1)
    bias_R = low_R.to(dtype)
    scale_R = ((high_R - bias_R.float()) / top).clamp(min=0).to(dtype)
    _refuse(~(low_R.isfinite() & high_R.isfinite()), first, "holds a value that is not finite")
    reach_R = scale_R.float() * top + bias_R.float()
    _refuse(
        ~(bias_R.isfinite() & reach_R.isfinite()),
        first,
        f"has values too large for scale and bias in {_name(dtype)}",
    )
    step_R = torch.where(scale_R > 0, scale_R, 1).float()
    q_RD = weights_RD.sub(bias_R.float()[:, None]).div_(step_R[:, None])
    _put(rows, q_RD.round_().clamp_(0, top).to(torch.uint8), scale_R, bias_R)


def _refuse(wrong_R: Tensor, first: int, why: str) -> None:
    if bool(wrong_R.any()):
        raise ValueError(f"row {first + int(wrong_R.int().argmax()):,} {why}")


def _put(rows: QuantisedRows, q_RD: Tensor, scale_R: Tensor, bias_R: Tensor) -> None:
    """Write integers, scales and biases into packed rows."""
    values_RP = q_RD
    if rows.bits == 4:
        odd_RP = torch.nn.functional.pad(q_RD, (0, rows.width % 2))[:, 1::2]
        values_RP = q_RD[:, ::2] | odd_RP << 4
    rows.values_RP.copy_(values_RP)
    numbers = 2 * NUMBER_TYPES[rows.bits].itemsize
    rows.packed_RK[:, values_RP.shape[1] : -numbers] = 0
    rows.scale_R.copy_(scale_R)
    rows.bias_R.copy_(bias_R)


def _unpacked(rows: QuantisedRows) -> Tensor:
    """Return the integers of rows, [R, D]."""
    q_RP = rows.values_RP
    if rows.bits == 8:
        return q_RP
    return torch.stack([q_RP & 15, q_RP >> 4], 2).flatten(1)[:, : rows.width]


def _rows_of_part(width: int) -> int:
    return max(1, PART_ELEMENTS // width)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
