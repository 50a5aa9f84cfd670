"""Ragged arithmetic in torch: offsets, runs, equal keys brought together, vectors gathered from
flat buffers. No loops over bags.

Nothing waits for a device but `group`, for the number of distinct keys.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recapp.sparse.transfer import true_indices


class Grouped(NamedTuple):
    """Equal keys brought together: `order[start[u] : start[u + 1]]` are the positions of `key[u]`
    in their original order.
    """

    key_U: Tensor
    number_N: Tensor
    order_N: Tensor
    start_U1: Tensor


def starts(counts_M: Tensor) -> Tensor:
    """Offsets of counts: 0, c0, c0 + c1, ...; one longer."""
    return F.pad(counts_M.cumsum(0, dtype=counts_M.dtype), (1, 0))


def runs(first_K: Tensor, count_K: Tensor, total: int) -> Tensor:
    """first0, first0 + 1, ... (count0 of them), first1, ...; `total` is the sum of the counts."""
    return torch.repeat_interleave(
        first_K - starts(count_K)[:-1], count_K, output_size=total
    ) + torch.arange(total, device=first_K.device)


def numbered(kind_N: Tensor, kinds: int) -> tuple[Tensor, Tensor]:
    """How many entries of the same kind stand before each entry, [N], and how many there are of
    each of 0 .. kinds - 1, [kinds].
    """
    sorted_N, order_N = torch.sort(kind_N, stable=True)
    first_K1 = torch.searchsorted(
        sorted_N, torch.arange(kinds + 1, dtype=kind_N.dtype, device=kind_N.device)
    )
    nth_N = torch.arange(len(kind_N), device=kind_N.device) - first_K1[sorted_N]
    return torch.empty_like(nth_N).index_copy_(0, order_N, nth_N), first_K1.diff()


def group(key_N: Tensor) -> Grouped:
    """Bring equal keys together; distinct keys come out ascending."""
    sorted_N, order_N = torch.sort(key_N, stable=True)
    new_N = torch.ones_like(sorted_N, dtype=torch.bool)
    torch.ne(sorted_N[1:], sorted_N[:-1], out=new_N[1:])
    first_U = true_indices(new_N)
    number_N = torch.empty_like(order_N, dtype=torch.int32).index_copy_(
        0, order_N, new_N.cumsum(0, dtype=torch.int32) - 1
    )
    return Grouped(
        sorted_N.index_select(0, first_U),
        number_N,
        order_N,
        F.pad(first_U, (0, 1), value=len(key_N)).int(),
    )


def gather(source: Tensor, unit: int, width: int, index_N: Tensor, dtype: torch.dtype) -> Tensor:
    """source[index[n] * unit : +width], [N, width]: rows of a store (`unit` is the width) or
    vectors at offsets of a buffer (1).
    """
    if not len(index_N):
        return source.new_zeros(0, width, dtype=dtype)
    return (
        source.as_strided(((len(source) - width) // unit + 1, width), (unit, 1))
        .index_select(0, index_N)
        .to(dtype)
    )
