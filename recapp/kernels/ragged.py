"""Ragged arithmetic in torch: offsets, runs, groups of equal keys, vectors gathered from flat
buffers. No function loops over bags.

Only `group` waits for the device: it reads the number of distinct keys.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recapp.sparse.transfer import true_indices


class Grouped(NamedTuple):
    """Equal keys brought together.

    Args:
        key_U: The distinct keys, ascending.
        number_N: The number u of each entry's key.
        order_N: The positions of the entries, key by key. The entries of `key[u]` have the
            positions `order[start[u] : start[u + 1]]`, in their original order.
        start_U1: Where the positions of each key begin and end.
    """

    key_U: Tensor
    number_N: Tensor
    order_N: Tensor
    start_U1: Tensor


def starts(counts_M: Tensor) -> Tensor:
    """Return the offsets 0, c0, c0 + c1, ... of counts: one more offset than counts."""
    return F.pad(counts_M.cumsum(0, dtype=counts_M.dtype), (1, 0))


def runs(first_K: Tensor, count_K: Tensor, total: int) -> Tensor:
    """Return first0, first0 + 1, ... (count0 numbers), first1, ... as one tensor.

    Args:
        first_K: The first number of each run.
        count_K: The length of each run.
        total: The sum of the lengths, which the host knows.
    """
    return torch.repeat_interleave(
        first_K - starts(count_K)[:-1], count_K, output_size=total
    ) + torch.arange(total, device=first_K.device)


def numbered(kind_N: Tensor, kinds: int) -> tuple[Tensor, Tensor]:
    """Return the number of entries of the same kind before each entry, [N], and the number of
    entries of each of the kinds 0 .. kinds - 1, [kinds].
    """
    sorted_N, order_N = torch.sort(kind_N, stable=True)
    first_K1 = torch.searchsorted(
        sorted_N, torch.arange(kinds + 1, dtype=kind_N.dtype, device=kind_N.device)
    )
    nth_N = torch.arange(len(kind_N), device=kind_N.device) - first_K1[sorted_N]
    return torch.empty_like(nth_N).index_copy_(0, order_N, nth_N), first_K1.diff()


def numbered_runs(
    kind_V: Tensor, length_V: Tensor, kinds: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the numbers of runs and of entries of the same kind before each run, both [V]; and the
    numbers of runs and of entries of each of the kinds 0 .. kinds - 1, both [kinds].
    """
    if kinds == 1:  # there is nothing to sort
        before_V1 = starts(length_V)
        nth_V = torch.arange(len(kind_V), device=kind_V.device)
        return nth_V, before_V1[:-1], nth_V.new_full((1,), len(nth_V)), before_V1[-1:]
    sorted_V, turn_V = torch.sort(kind_V.to(torch.int32), stable=True)
    first_K1 = torch.searchsorted(
        sorted_V, torch.arange(kinds + 1, dtype=torch.int32, device=kind_V.device)
    )
    before_V1 = starts(length_V[turn_V])
    first_V = torch.arange(len(kind_V), device=kind_V.device) - first_K1[sorted_V]
    entries_V = before_V1[:-1] - before_V1[first_K1][sorted_V]
    nth_V = torch.empty_like(first_V).index_copy_(0, turn_V, first_V)
    before_V = torch.empty_like(entries_V).index_copy_(0, turn_V, entries_V)
    return nth_V, before_V, first_K1.diff(), before_V1[first_K1].diff()


def counts_of(kind_N: Tensor, kinds: int) -> Tensor:
    """Return how often each of 0, 1, ..., kinds - 1 occurs among ascending numbers."""
    return torch.searchsorted(kind_N, torch.arange(kinds + 1, device=kind_N.device)).diff()


def group(key_N: Tensor) -> Grouped:
    """Bring equal keys together, the distinct keys in ascending order."""
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


def gather(source: Tensor, stride: int, width: int, index_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Return vectors of a flat buffer, source[index[n] * stride : +width], as [N, width].

    Args:
        source: The flat buffer.
        stride: The width where `index_N` holds rows of a store, 1 where it holds offsets.
        width: The elements of a vector.
        index_N: The rows or offsets.
        dtype: The type of the result.
    """
    if not len(index_N):
        return source.new_zeros(0, width, dtype=dtype)
    return (
        source.as_strided(((len(source) - width) // stride + 1, width), (stride, 1))
        .index_select(0, index_N)
        .to(dtype)
    )
