"""The places of entries in the arrays of a batch (`batch_arrays.py`), where the host knows only how
many ids a feature may have, and the device how many it has.

The entries of a group stay side by side, so the arrays are those of a batch without free room, and
other kernels see no difference.
"""

import triton
import triton.language as tl
from torch import Tensor

from recapp.kernels.batch_arrays import BLOCK
from recapp.kernels.triton_integers import (
    BLOCKS,
    ENTRIES_END,
    ENTRY,
    GROUP,
    LOOKUP,
    PLACE,
    SLOT,
    SLOTS,
    SLOTS_END,
)
from recapp.kernels.triton_launch import Launch

MOST = 256  # slots that a program places at once


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
