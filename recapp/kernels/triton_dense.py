"""The dot products of all pairs of a sample's vectors as Triton kernels: DLRM's interaction.

    vectors_BFD   f1 f2 f3    ->    out_BK   f1 | f12 f13 f23 | zeros

torch's own functions write all F x F products to memory, pick the triangle from them and join it
with f1, and backward spreads it out again. Here a kernel multiplies the vectors of a sample and
writes the row of the next layer, whose width suits tensor cores. Backward reads the triangle of
gradients as a symmetric matrix S, with zeros on its diagonal, and writes S f, with the gradient of
f1 itself added to its first row.

A program computes `TILE` vectors of one sample, `BLOCK` of their columns at a time, so the numbers
of vectors and of columns have no limit. Tensor cores multiply in the type of the result, fp32 in
TF32, and add in fp32. No addition is atomic, so equal inputs give equal bits. No load runs ahead of
the products before it (`num_stages`): other programs use the time, and the memory it would take.

These kernels are tested in Triton's interpreter and compiled for a Hopper GPU; they have not run on
a GPU yet.

Shapes: B samples, F vectors of a sample, D columns of a vector, K columns of a result, T vectors of
a tile, C columns of a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from recapp.kernels.triton_launch import Launch

LEAST_TILE = 16  # of a matrix product on tensor cores
MOST_TILE = 64  # a tile of products takes registers: 64 x 64 is 32 in each thread of 4 warps
MOST_BLOCK = 128


def takes(vectors_BFD: Tensor) -> bool:
    """Return whether tensor cores may multiply these vectors: 16 bits always, fp32 unless torch's
    own products are to be exact (`torch.set_float32_matmul_precision`).
    """
    if vectors_BFD.dtype == torch.float32:
        return torch.get_float32_matmul_precision() != "highest"
    return vectors_BFD.dtype in (torch.float16, torch.bfloat16)


def pair_dots(vectors_BFD: Tensor, columns: int, keeps_first: bool) -> Tensor:
    """Return the dot products of all pairs of vectors, the lower triangle row by row, [B, K].

    Args:
        vectors_BFD: The vectors, which `takes` takes.
        columns: The columns of the result, K; with `keeps_first` fewer than 8 of them may be left,
            which become zeros.
        keeps_first: Whether the first vector stands before the products.
    """
    samples, vectors, width = vectors_BFD.shape
    device = vectors_BFD.device
    cast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if cast else vectors_BFD.dtype
    out_BK = torch.empty(samples, columns, dtype=dtype, device=device)
    if not out_BK.numel():
        return out_BK
    tile, block, warps = _tiles(vectors, width)
    tiles = triton.cdiv(vectors, tile)
    vectors_BFD = _rows(vectors_BFD)
    write_dots(
        (samples, tiles, tiles),
        (vectors_BFD, out_BK, columns),
        (vectors_BFD.stride(0), vectors, width, keeps_first, tile, block),
        warps,
    )
    return out_BK


def pair_dots_backward(vectors_BFD: Tensor, grad_BK: Tensor, keeps_first: bool) -> Tensor:
    """Return the gradient of the vectors, [B, F, D].

    Args:
        vectors_BFD: The vectors that `pair_dots` got.
        grad_BK: The gradient of its result.
        keeps_first: As it got it.
    """
    samples, vectors, width = vectors_BFD.shape
    out_BFD = torch.empty(vectors_BFD.shape, dtype=vectors_BFD.dtype, device=vectors_BFD.device)
    if not out_BFD.numel():
        return out_BFD
    tile, block, warps = _tiles(vectors, width)
    vectors_BFD = _rows(vectors_BFD)
    if grad_BK.stride(1) != 1:
        grad_BK = grad_BK.contiguous()
    write_gradients(
        (samples, triton.cdiv(vectors, tile), triton.cdiv(width, block)),
        (vectors_BFD, grad_BK, out_BFD, grad_BK.stride(0)),
        (vectors_BFD.stride(0), vectors, width, keeps_first, tile, block),
        warps,
    )
    return out_BFD


def _tiles(vectors: int, width: int) -> tuple[int, int, int]:
    """Return the vectors of a tile, the columns of a block, and the warps of a program."""
    tile = min(max(triton.next_power_of_2(vectors), LEAST_TILE), MOST_TILE)
    block = min(max(triton.next_power_of_2(width), LEAST_TILE), MOST_BLOCK)
    return tile, block, max(tile * block // 1024, 1)


def _rows(vectors_BFD: Tensor) -> Tensor:
    """Return vectors whose samples lie anywhere, each of them in one piece."""
    whole = vectors_BFD.stride()[1:] == (vectors_BFD.shape[2], 1)
    return vectors_BFD if whole else vectors_BFD.contiguous()


@triton.jit
def _tile(vectors, vector_T, column_C, F: tl.constexpr, D: tl.constexpr):
    """Return columns of some vectors of a sample, [TILE, BLOCK], and zeros beyond them."""
    inside_TC = (vector_T < F)[:, None] & (column_C < D)[None, :]
    return tl.load(vectors + vector_T[:, None] * D + column_C[None, :], mask=inside_TC, other=0.0)


@Launch
@triton.jit
def write_dots(
    vectors,
    out,
    out_stride,
    STRIDE: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
    KEEPS_FIRST: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the products of a tile of a sample's vectors with those of a tile before it, or with
    themselves. The first program of a sample writes its first vector and the zeros.
    """
    high = tl.program_id(1)
    low = tl.program_id(2)
    if low > high:
        return
    sample = tl.program_id(0).to(tl.int64)
    vectors += sample * STRIDE
    out += sample * out_stride
    high_T = high * TILE + tl.arange(0, TILE)
    low_T = low * TILE + tl.arange(0, TILE)
    WIDTH: tl.constexpr = D if KEEPS_FIRST else 0
    product_TT = tl.zeros([TILE, TILE], tl.float32)
    for first in tl.range(0, D, BLOCK, num_stages=1):
        column_C = first + tl.arange(0, BLOCK)
        high_TC = _tile(vectors, high_T, column_C, F, D).to(out.dtype.element_ty)
        if F <= TILE:
            low_TC = high_TC
        else:
            low_TC = _tile(vectors, low_T, column_C, F, D).to(out.dtype.element_ty)
        product_TT = tl.dot(high_TC, tl.trans(low_TC), product_TT, input_precision="tf32")
        if KEEPS_FIRST:
            inside_C = (column_C < D) & (high == 0)
            first_C = tl.load(vectors + column_C, mask=inside_C, other=0.0)
            tl.store(out + column_C, first_C.to(out.dtype.element_ty), mask=inside_C)
    pair_TT = (high_T * (high_T - 1) // 2)[:, None] + low_T[None, :]
    below_TT = (low_T[None, :] < high_T[:, None]) & (high_T < F)[:, None]
    tl.store(out + WIDTH + pair_TT, product_TT.to(out.dtype.element_ty), mask=below_TT)
    if KEEPS_FIRST:
        rest = D + F * (F - 1) // 2 + tl.arange(0, 8)
        zeros = tl.zeros([8], out.dtype.element_ty)
        tl.store(out + rest, zeros, mask=(rest < out_stride) & (high == 0))


@Launch
@triton.jit
def write_gradients(
    vectors,
    grad,
    out,
    grad_stride,
    STRIDE: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
    KEEPS_FIRST: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of columns of the gradients of a tile of a sample's vectors."""
    sample = tl.program_id(0).to(tl.int64)
    vectors += sample * STRIDE
    grad += sample * grad_stride
    vector_T = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column_C = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = D if KEEPS_FIRST else 0
    total_TC = tl.zeros([TILE, BLOCK], tl.float32)
    for first in tl.range(0, F, TILE, num_stages=1):
        other_T = first + tl.arange(0, TILE)
        high_TT = tl.maximum(vector_T[:, None], other_T[None, :])
        low_TT = tl.minimum(vector_T[:, None], other_T[None, :])
        pair_TT = high_TT * (high_TT - 1) // 2 + low_TT
        is_pair_TT = (low_TT < high_TT) & (high_TT < F)
        factor_TT = tl.load(grad + WIDTH + pair_TT, mask=is_pair_TT, other=0.0)
        other_TC = _tile(vectors, other_T, column_C, F, D)
        factor_TT = factor_TT.to(other_TC.dtype)
        total_TC = tl.dot(factor_TT, other_TC, total_TC, input_precision="tf32")
    if KEEPS_FIRST:
        inside_C = (column_C < D) & (tl.program_id(1) == 0)
        first_C = tl.load(grad + column_C, mask=inside_C, other=0.0).to(tl.float32)
        total_TC += tl.where((vector_T == 0)[:, None], first_C[None, :], 0.0)
    inside_TC = (vector_T < F)[:, None] & (column_C < D)[None, :]
    to_TC = sample * (F * D) + vector_T[:, None] * D + column_C[None, :]
    tl.store(out + to_TC, total_TC.to(out.dtype.element_ty), mask=inside_TC)
