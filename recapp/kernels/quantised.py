"""Rows in 8 or 4 bits, for inference: one scale and one bias per row, row-wise min-max, as FBGEMM
stores them.

    value = scale * q + bias        q an unsigned integer of the given bits; bias the row's minimum,
                                    scale its range / (2^bits - 1)

Two 4-bit numbers share a byte, the even column in the low half; an odd width leaves the last high
half zero. These torch functions define the result that faster kernels reproduce.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recapp.kernels.links import Links
from recapp.kernels.reference import TorchBackend


@dataclass(frozen=True)
class QuantisedRows:
    """Rows of a store, packed.

    Args:
        packed_RK: uint8, [R, D] of 8 bits or [R, (D + 1) // 2] of 4.
        scale_R: fp16 or fp32.
        bias_R: of the same type.
        width: D.
        bits: 8 or 4.
    """

    packed_RK: Tensor
    scale_R: Tensor
    bias_R: Tensor
    width: int
    bits: int


def quantise(weights_RD: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> QuantisedRows:
    """Pack rows; each value moves by at most half a step of its row, and by the rounding of scale
    and bias.

    Args:
        weights_RD: finite floats.
        bits: 8 or 4.
        dtype: of scale and bias, fp32 or fp16.

    Raises:
        ValueError: other bits, or rows that are not finite in `dtype`.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}: rows are kept in 4 or 8 bits")
    weights_RD, width, top = weights_RD.float(), weights_RD.shape[1], 2**bits - 1
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
    """Values of some rows, [N, D], computed in `dtype`."""
    row_N = row_N.long()
    q_ND = rows.packed_RK[row_N]
    if rows.bits == 4:
        q_ND = torch.stack([q_ND & 15, q_ND >> 4], 2).flatten(1)[:, : rows.width]
    return q_ND.to(dtype) * rows.scale_R[row_N, None].to(dtype) + rows.bias_R[row_N, None].to(dtype)


def pool_quantised(
    rows: QuantisedRows, links: Links, target: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> None:
    """`pool` of the reference with packed rows as its source: `links.index_N` holds rows; sums are
    made in `dtype`, as there.
    """
    values_ND = dequantise(rows, links.index_N, dtype)
    each = links._replace(index_N=torch.arange(len(values_ND), device=values_ND.device))
    TorchBackend().pool(values_ND.view(-1), rows.width, rows.width, each, target, dtype, scale)
