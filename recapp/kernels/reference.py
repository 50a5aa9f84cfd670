"""The local arithmetic in torch: it defines the result that every faster backend must reproduce.

Everything local is a sparse matrix in CSR form (`Links`), its transpose, one `pool` and one `update`. Letters: N entries, M rows of the
matrix, U distinct keys, R rows of a store, D width.

    group   equal keys brought together: distinct keys, each key's places, each place's key
    pool    out[m] = sum of weights[k] * rows[index[k]], k in offsets[m] .. offsets[m + 1]      lookup, combine, segment sums
    update  weights and state of each touched row, once

A bag's entries are summed one after the other in their order, whatever the width: that is what makes results equal bit for bit
under every way of cutting a table.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SQUARE_BLOCK = 64       # columns; as wide as a vertical strip is by default (recapp/sharding/tilings.py)


class Links(NamedTuple):
    """A sparse matrix in CSR: row m sums `weights[k] * rows[index[k]]` over k in offsets[m] .. offsets[m + 1].

    No offsets: one entry per row. No weights: ones.
    """

    index_N: Tensor
    offsets_M1: Tensor | None = None
    weights_N: Tensor | None = None


class Grouped(NamedTuple):
    """Equal keys brought together: `order[start[u] : start[u + 1]]` are the places of `key[u]` in their original order."""

    key_U: Tensor
    number_N: Tensor
    order_N: Tensor
    start_U1: Tensor

    def transpose(self, row_N: Tensor, weights_N: Tensor | None) -> Links:
        """Key u collects from the rows that held it."""
        weights = None if weights_N is None else weights_N.index_select(0, self.order_N)
        return Links(row_N.index_select(0, self.order_N), self.start_U1, weights)


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


def pool(rows_RD: Tensor, links: Links) -> Tensor:
    """Sum rows along a sparse matrix.

    Args:
        rows_RD: what is read, fp32 or fp64.
        links: M bags of its rows.

    Returns:
        [M, D].
    """
    if links.offsets_M1 is None and links.weights_N is None:
        return rows_RD.index_select(0, links.index_N)
    n = len(links.index_N)
    offsets_M1 = torch.arange(n + 1, device=rows_RD.device) if links.offsets_M1 is None else links.offsets_M1
    if n == 0:                                                    # embedding_bag refuses a table of no rows
        return rows_RD.new_zeros(len(offsets_M1) - 1, rows_RD.shape[1])
    return F.embedding_bag(links.index_N, rows_RD, offsets_M1.to(links.index_N.dtype), mode="sum", include_last_offset=True,
                           per_sample_weights=links.weights_N)


def square_sums(grad_UD: Tensor) -> Tensor:
    """fp64 sum of squares of every row, [U]: within blocks of `SQUARE_BLOCK` columns, then block by block.

    So a table cut into such strips, whose owners add each other's sums, gets the bits of an uncut one.
    """
    total_U = torch.zeros(len(grad_UD), dtype=torch.float64, device=grad_UD.device)
    for block_UC in torch.split(grad_UD, SQUARE_BLOCK, 1):
        total_U += block_UC.to(torch.float64, copy=True).square_().sum(1)
    return total_U


def update(weights_RD: Tensor, state: Sequence[Tensor], row_U: Tensor, grad_UD: Tensor, mean_square_U1: Tensor | None, lr: float,
           step: Callable[..., tuple[Any, ...]], constants: Sequence[float]) -> None:
    """Apply a rule (`recapp/optim/rules.py`) to each touched row, once.

    Args:
        weights_RD: the store, changed in place; half types are read as the gradient's type and rounded back.
        state: its state tensors, [R, 1] or [R, D], changed in place.
        row_U: distinct rows, int64.
        grad_UD: their summed gradients.
        mean_square_U1: mean of the squared gradient over the whole logical row, or None where the rule does not ask.
        lr: learning rate of this update.
        step: the rule's expression.
        constants: the rule's constants.
    """
    held = [weights_RD, *state]
    w_UD, *s = (x.index_select(0, row_U).to(grad_UD.dtype) for x in held)
    new = step(w_UD, grad_UD, mean_square_U1, lr, torch.sqrt, *constants, *s)
    for x, value in zip(held, new, strict=True):
        x.index_copy_(0, row_U, value.to(x.dtype))
