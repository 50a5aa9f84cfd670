"""Rows in 8 or 4 bits, for inference: one scale and one bias per row, row-wise min-max, as FBGEMM
stores them.

    value = scale * q + bias        q an unsigned integer of the given bits; bias the row's minimum,
                                    scale its range / (2^bits - 1)

Two 4-bit numbers share a byte, the even column in the low half; an odd width leaves the last high
half zero. These torch functions define the result that faster kernels (`pool_quantised` of the
backends) reproduce.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BITS = (8, 4)
"""The numbers of bits in which a value can be kept."""


@dataclass(frozen=True)
class QuantisedRows:
    """The packed rows of a store.

    Args:
        packed_RK: The bytes of the rows (uint8), [R, D] with 8 bits or [R, (D + 1) // 2] with 4.
        scale_R: The scale of each row, fp16 or fp32.
        bias_R: The bias of each row, in the type of the scales.
        width: The number of columns D.
        bits: The bits of a value, 8 or 4.
    """

    packed_RK: Tensor
    scale_R: Tensor
    bias_R: Tensor
    width: int
    bits: int


def bytes_of_row(width: int, bits: int) -> int:
    """Return how many bytes a packed row of so many columns takes, without scale and bias."""
    return -(-width * bits // 8)


def check_bits(bits: int) -> None:
    """Check that rows can be kept in so many bits.

    Raises:
        ValueError: They cannot.
    """
    if bits not in BITS:
        raise ValueError(f"bits={bits}: rows are kept in 4 or 8 bits")


def quantise(weights_RD: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> QuantisedRows:
    """Return packed rows.

    Each value changes by at most half a step of its row, and by the rounding of scale and bias.

    Args:
        weights_RD: The rows, finite floats.
        bits: The bits of a value, 8 or 4.
        dtype: The type of scale and bias, fp32 or fp16.

    Raises:
        ValueError: Other bits, or rows that are not finite in `dtype`.
    """
    check_bits(bits)
    weights_RD = weights_RD.float()
    width = weights_RD.shape[1]
    top = 2**bits - 1
    bias_R = weights_RD.amin(1).to(dtype)
    scale_R = ((weights_RD.amax(1) - bias_R.float()) / top).clamp(min=0).to(dtype)
    if not bool((bias_R.isfinite() & scale_R.isfinite()).all()):
        raise ValueError(
            "rows hold values that are not finite, or too large for scale and bias in "
            f"{str(dtype).removeprefix('torch.')}"
        )
    step_R = torch.where(scale_R > 0, scale_R, 1).float()
    q_RD = (
        ((weights_RD - bias_R.float()[:, None]) / step_R[:, None])
        .round_()
        .clamp_(0, top)
        .to(torch.uint8)
    )
    if bits == 4:
        even_RK = q_RD[:, ::2]
        odd_RK = torch.nn.functional.pad(q_RD, (0, width % 2))[:, 1::2]
        q_RD = even_RK | odd_RK << 4
    return QuantisedRows(q_RD.contiguous(), scale_R, bias_R, width, bits)


def dequantise(rows: QuantisedRows, row_N: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of some rows, [N, D], computed in `dtype`."""
    row_N = row_N.long()
    q_ND = rows.packed_RK[row_N]
    if rows.bits == 4:
        q_ND = torch.stack([q_ND & 15, q_ND >> 4], 2).flatten(1)[:, : rows.width]
    return q_ND.to(dtype) * rows.scale_R[row_N, None].to(dtype) + rows.bias_R[row_N, None].to(dtype)
