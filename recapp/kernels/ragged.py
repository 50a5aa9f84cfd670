"""Ragged arithmetic in torch: offsets, runs, equal keys brought together, vectors gathered from flat buffers. No loops over bags."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Grouped(NamedTuple):
    """Equal keys brought together: `order[start[u] : start[u + 1]]` are the places of `key[u]` in their original order."""

    key_U: Tensor
    number_N: Tensor
    order_N: Tensor
    start_U1: Tensor


def starts(counts_M: Tensor) -> Tensor:
    """Offsets of counts: 0, c0, c0 + c1, ...; one longer."""
    return F.pad(counts_M.cumsum(0, dtype=counts_M.dtype), (1, 0))


def runs(first_K: Tensor, count_K: Tensor) -> Tensor:
    """first0, first0 + 1, ... (count0 of them), first1, ..."""
    total = int(count_K.sum())
    return torch.repeat_interleave(first_K - starts(count_K)[:-1], count_K, output_size=total) + torch.arange(total, device=first_K.device)


def group(key_N: Tensor) -> Grouped:
    """Bring equal keys together; distinct keys come out ascending."""
    sorted_N, order_N = torch.sort(key_N, stable=True)
    new_N = torch.ones_like(sorted_N, dtype=torch.bool)
    torch.ne(sorted_N[1:], sorted_N[:-1], out=new_N[1:])
    first_U = new_N.nonzero().view(-1)
    number_N = torch.empty_like(order_N, dtype=torch.int32).index_copy_(0, order_N, new_N.cumsum(0, dtype=torch.int32) - 1)
    return Grouped(sorted_N.index_select(0, first_U), number_N, order_N, F.pad(first_U, (0, 1), value=len(key_N)).int())


def gather(source: Tensor, unit: int, width: int, index_N: Tensor, dtype: torch.dtype) -> Tensor:
    """source[index[n] * unit : +width], [N, width]: rows of a store (`unit` is the width) or vectors at places of a buffer (1)."""
    if not len(index_N):
        return source.new_zeros(0, width, dtype=dtype)
    return source.as_strided(((len(source) - width) // unit + 1, width), (unit, 1)).index_select(0, index_N).to(dtype)
