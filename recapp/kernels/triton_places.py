"""The places of entries in the arrays of a batch (`batch_arrays.py`), where the host knows only how
many ids a feature may have, and the device how many count: features have room for more, or the rule
`drop` takes ids out of their bags.

    kept_ids         the ids that stay, and where those of each bag begin: `mark`, a sum, `keep`
    place_entries    the places of the slots and groups: `place`

The entries of a group stay side by side, so the arrays are those of a batch without free room, and
other kernels see no difference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from recapp.kernels.batch_arrays import BLOCK
from recapp.kernels.links import starts
from recapp.kernels.triton_integers import (
    BLOCKS,
    ENTRIES_END,
    ENTRY,
    GROUP,
    LOOKUP,
    NO_ID,
    PLACE,
    SLOT,
    SLOTS,
    SLOTS_END,
    Take,
    _as_int64,
    _first_above,
)
from recapp.kernels.triton_launch import Launch

MOST = 256  # slots that a program places at once


def kept_ids(
    ids_L: Tensor,
    first_F1: Tensor,
    edge_N1: Tensor,
    samples: int,
    ends_F2: Tensor,
    report: Tensor,
    take: Take,
) -> tuple[Tensor, Tensor]:
    """Return where the ids of each bag begin, without free room, once those outside of some ends
    have left it; and the ids that stay, as places among all ids.

    Args:
        ids_L: The raw ids, lookup by lookup.
        first_F1: The first id of each lookup, and the end of the last, int64.
        edge_N1: Where the ids of each bag would begin without free room, [F x B + 1].
        samples: The samples, B.
        ends_F2: The first and the last id that stays in its bags, for each lookup, int64.
        report: The report of `entries_of_ids`, where ids that leave are counted as changed.
        take: Memory for the results.
    """
    n = len(ids_L)
    stays_L = take("stays", n, torch.int32)
    of_ids = ids_L, first_F1, edge_N1, ends_F2, report, stays_L
    mark((n // BLOCK + 1,), (*of_ids, samples, len(ends_F2), n), (BLOCK,))
    edge_K1 = take("edges", len(edge_N1), torch.int64)
    kept_L = take("kept", n, torch.int32)
    keep(
        (max(n, len(edge_N1)) // BLOCK + 1,),
        (starts(stays_L), first_F1, edge_N1, edge_K1, kept_L, samples, len(edge_N1), n),
        (BLOCK,),
    )
    return edge_K1, kept_L


def place_entries(
    edge_N1: Tensor, samples: int, slots: Tensor, places: Tensor, groups: Tensor
) -> None:
    """Write the first entry of each slot, and the entry behind the last of each group.

    Args:
        edge_N1: Where the ids of each bag would begin without free room, [F x B + 1].
        samples: The samples, B.
        slots: The constants of the slots, int64 [S x `SlotNumbers`].
        places: The places of the slots, int64 [S x `SlotPlace`].
        groups: The places of the groups, int64 [G x `GroupPlace`].
    """
    place((len(groups) // GROUP.value,), (edge_N1, slots, places, groups, samples), (BLOCK, MOST))


@Launch
@triton.jit(do_not_specialize=["samples", "lookups", "total"])
def mark(ids, firsts, edges, ends, report, stays, samples, lookups, total, BLOCK: tl.constexpr):
    """Write whether each of a block of ids stays in its bag, and count those that leave it."""
    l_L = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lookup_L = _first_above(firsts, 1, l_L * 0, l_L * 0 + lookups, l_L) - 1
    bags_L = edges + lookup_L.to(tl.int64) * samples
    ids_L = tl.load(bags_L + samples) - tl.load(bags_L)  # behind them is free room
    here_L = (l_L < total) & (l_L - tl.load(firsts + lookup_L) < ids_L)
    id_L = _as_int64(tl.load(ids + l_L, mask=here_L, other=0))
    stays_L = (id_L >= tl.load(ends + 2 * lookup_L)) & (id_L <= tl.load(ends + 2 * lookup_L + 1))
    stays_L = here_L & (stays_L | (id_L == NO_ID))
    tl.store(stays + l_L, stays_L.to(tl.int32), mask=l_L < total)
    tl.atomic_add(report + 1 + lookup_L, ids_L * 0 + 1, mask=here_L & (stays_L == 0))


@Launch
@triton.jit(do_not_specialize=["samples", "bags", "total"])
def keep(before, firsts, edges, kept_edges, kept, samples, bags, total, BLOCK: tl.constexpr):
    """Write the places of a block of ids that stay, and where the ids of a block of bags begin."""
    n_N = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here_N = n_N < total
    before_N = tl.load(before + n_N, mask=here_N, other=0)
    stays_N = here_N & (tl.load(before + n_N + 1, mask=here_N, other=0) > before_N)
    tl.store(kept + before_N, n_N, mask=stays_N)
    here_N = n_N < bags
    lookup_N = tl.where(here_N, n_N // tl.maximum(samples, 1), 0)
    id_N = tl.load(edges + n_N, mask=here_N, other=0) - tl.load(edges + lookup_N * samples)
    id_N += tl.load(firsts + lookup_N)
    tl.store(kept_edges + n_N, tl.load(before + id_N).to(tl.int64), mask=here_N)


@Launch
@triton.jit(do_not_specialize=["samples"])
def place(edges, slots, places, groups, samples, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """Place the entries of a group, slot by slot."""
    group = groups + tl.program_id(0) * GROUP
    first = tl.load(group + BLOCKS) * BLOCK
    end = tl.load(group + SLOTS_END)
    for begin in range(tl.load(group + SLOTS), end, MOST):
        s_S = begin + tl.arange(0, MOST)
        here_S = s_S < end
        lookup_S = tl.load(slots + s_S * SLOT + LOOKUP, mask=here_S, other=0)
        ids_S = tl.load(edges + (lookup_S + 1) * samples, mask=here_S, other=0)
        ids_S -= tl.load(edges + lookup_S * samples, mask=here_S, other=0)
        tl.store(places + s_S * PLACE + ENTRY, first + tl.cumsum(ids_S, 0) - ids_S, mask=here_S)
        first += tl.sum(ids_S, 0)
    tl.store(group + ENTRIES_END, first)
