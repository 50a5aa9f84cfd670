"""Sums of bags in torch: serial, which defines the result, or in the order of a GPU.

The serial sum adds the entries of a bag one after the other, whatever the width. On a GPU a bag of
many entries would hold up others, so it is summed in blocks of `BLOCK` entries, counted from its
own first entry; these sums in blocks of `BLOCK` again; and the sums of those one after the other.
Both orders depend on the entries of the bag alone. A bag of at most `BLOCK` entries has the same
bits in both.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from recapp.kernels.links import Links, gather, starts
from recapp.kernels.widths import SQUARE_BLOCK
from recapp.sparse.transfer import to_host

BLOCK = 128  # entries; smaller blocks make more partial sums, larger ones more additions in a row
GPU_ORDER = (BLOCK, BLOCK)


def bag_sums(
    source: Tensor,
    stride: int,
    width: int,
    links: Links,
    dtype: torch.dtype,
    first: int,
    last: int,
    blocks: tuple[int, ...],
) -> Tensor:
    """Return the unscaled sums of bags first .. last of `pool`, [last - first, width].

    Args:
        source: The flat buffer of vectors.
        stride: The width where `index` holds rows, 1 where it holds offsets.
        width: The columns of a vector.
        links: The sparse matrix.
        dtype: The type of the arithmetic.
        first: The first bag.
        last: The bag behind the last one.
        blocks: The sizes of blocks: of entries, of these blocks, ...; empty for the serial sum.
    """
    begin = first
    end = last
    if links.offsets_M1 is not None:  # the host reads offsets only if bags come in several chunks
        begin = int(to_host(links.offsets_M1[first])) if first else 0
        end = int(to_host(links.offsets_M1[last])) if last < links.bags else len(links.index_N)
    if begin == end:
        return source.new_zeros(last - first, width, dtype=dtype)
    gathered_ND = gather(source, stride, width, links.index_N[begin:end], dtype)
    if links.offsets_M1 is None and links.weights_N is None:
        return gathered_ND
    offsets = torch.arange(end - begin + 1, device=source.device)
    if links.offsets_M1 is not None:
        offsets = links.offsets_M1[first : last + 1].long() - begin
    weights = None if links.weights_N is None else links.weights_N[begin:end].to(dtype)
    if blocks and weights is not None:  # a product is rounded before it is added
        gathered_ND = gathered_ND * weights[:, None]
        weights = None
    for block in blocks:
        gathered_ND, offsets = _sums_of_blocks(gathered_ND, offsets, block)
    return _serial_sums(gathered_ND, offsets, weights)


def _serial_sums(values_ND: Tensor, offsets_M1: Tensor, weights_N: Tensor | None) -> Tensor:
    return F.embedding_bag(
        torch.arange(len(values_ND), device=values_ND.device),
        values_ND,
        offsets_M1,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=weights_N,
    )


def _sums_of_blocks(values_ND: Tensor, offsets_M1: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the sums of the blocks of all bags, and where those of each bag begin and end.

    The host does not know the number of blocks; behind them stand sums of nothing.
    """
    first_M1 = starts((offsets_M1.diff() + block - 1) // block)
    bags = len(offsets_M1) - 1
    block_B = torch.arange(len(values_ND) // block + bags, device=values_ND.device)
    bag_B = (torch.searchsorted(first_M1, block_B, right=True) - 1).clamp_(max=bags - 1)
    begin_B = offsets_M1[bag_B] + (block_B - first_M1[bag_B]) * block
    begin_B = torch.where(block_B < first_M1[-1], begin_B, offsets_M1[-1])
    edge_B1 = torch.cat([begin_B, offsets_M1[-1:]])
    return _serial_sums(values_ND, edge_B1, None), first_M1


def squares(values_UD: Tensor) -> Tensor:
    """Return the fp64 sum of squares of each row: within blocks of `SQUARE_BLOCK` columns, then
    block by block.
    """
    total_U = torch.zeros(len(values_UD), dtype=torch.float64, device=values_UD.device)
    for block_UC in torch.split(values_UD, SQUARE_BLOCK, 1):
        total_U += block_UC.to(torch.float64, copy=True).square_().sum(1)
    return total_U
