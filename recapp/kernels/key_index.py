"""The index of a store of dynamic tables: (strip, position) -> slot, in torch. And the search of a
read-only store, whose numbers are sorted strip by strip.

A store keeps each row in a *slot*, whatever its strip, and this index finds the slot. It defines
the result that `numba_key_index.py` reproduces, and it runs on any device. The positions of a strip
are kept sorted, so adding some costs a sort of all.

`recapp/tables/dynamic.py` explains positions and runs. N entries, M entries of keys that the index
does not hold yet.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from recapp.kernels.links import RUN_BITS, group
from recapp.kernels.row_memory import RowMemory


class SortedIndex:
    """An index of the slots of all rows that exist.

    Args:
        runs: The runs of positions that the store may hold.
        capacity: The largest number of slots.
        device: The device of positions and slots.

    Attributes:
        positions: The position of each slot, [capacity, 1].
        strips: The strip of each slot, [capacity, 1], int16.
    """

    def __init__(self, runs: Sequence[int], capacity: int, device: torch.device) -> None:
        self.positions = RowMemory(capacity, 1, torch.int64, device)
        self.strips = RowMemory(capacity, 1, torch.int16, device)
        self._sorted: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        """Return the number of keys."""
        return sum(len(position_N) for position_N, _ in self._sorted.values())

    @property
    def nbytes(self) -> int:
        """Return the bytes of the index, without `positions` and `strips`."""
        return sum(p.nbytes + s.nbytes for p, s in self._sorted.values())

    def clear(self) -> None:
        """Forget all keys."""
        self._sorted.clear()

    def find(self, position_N: Tensor, strip_N: Tensor) -> Tensor:
        """Return the slot of each key, int64; -1 for a key that is absent."""
        slot_N = torch.full_like(position_N, -1)
        for strip, (sorted_K, slot_K) in self._sorted.items():
            of_strip_N = strip_N == strip
            at_N = torch.searchsorted(sorted_K, position_N).clamp_(max=len(sorted_K) - 1)
            found_N = of_strip_N & (sorted_K[at_N] == position_N)
            slot_N = torch.where(found_N, slot_K[at_N], slot_N)
        return slot_N

    def insert(self, position_M: Tensor, strip_M: Tensor, fresh_M: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys that the index does not hold.

        Args:
            position_M: The positions of the keys; a key may occur several times.
            strip_M: The strips of the keys.
            fresh_M: Free slots, one for each entry.

        Returns:
            The slot of each entry, and the first entry of each new key: these entries take the
            fresh slots in order.
        """
        same = group(position_M)
        keys = group(strip_M.long() * len(same.key_U) + same.number_N)
        first_U = keys.order_N[keys.start_U1[:-1].long()].sort().values
        slot_U = fresh_M[: len(first_U)]
        rank_M = torch.empty_like(position_M)
        rank_M[first_U] = slot_U
        slot_M = rank_M[keys.order_N[keys.start_U1[:-1].long()]][keys.number_N.long()]
        self.positions.grow(int(slot_U.max()) + 1)
        self.strips.grow(int(slot_U.max()) + 1)
        self.positions.rows[slot_U, 0] = position_M[first_U]
        self.strips.rows[slot_U, 0] = strip_M[first_U].to(torch.int16)
        for strip in set(strip_M[first_U].tolist()):
            of_strip_U = strip_M[first_U] == strip
            added = position_M[first_U][of_strip_U], slot_U[of_strip_U]
            entries = self._sorted.get(strip, (added[0][:0], added[1][:0]))
            position_K, order_K = torch.cat([entries[0], added[0]]).sort()
            self._sorted[strip] = position_K, torch.cat([entries[1], added[1]])[order_K]
        return slot_M, first_U

    def remove(self, slot_M: Tensor) -> None:
        """Remove the keys of distinct slots."""
        gone_M = self.positions.rows[slot_M, 0]
        strip_M = self.strips.rows[slot_M, 0]
        for strip in set(strip_M.tolist()):
            position_K, slot_K = self._sorted[strip]
            keep_K = ~torch.isin(position_K, gone_M[strip_M == strip])
            self._sorted[strip] = position_K[keep_K], slot_K[keep_K]
            if not keep_K.any():
                del self._sorted[strip]

    def slots_of_run(self, run: int, strip: int) -> Tensor:
        """Return the slots of a strip whose positions lie in a run."""
        if strip not in self._sorted:
            return torch.zeros(0, dtype=torch.int64, device=self.positions.rows.device)
        position_K, slot_K = self._sorted[strip]
        return slot_K[(position_K >> (64 - RUN_BITS)) + (1 << RUN_BITS - 1) == run]

    def slots_of(self, strip: int) -> Tensor:
        """Return the slots of a strip in the order of their positions."""
        if strip not in self._sorted:
            return torch.zeros(0, dtype=torch.int64, device=self.positions.rows.device)
        return self._sorted[strip][1]


def find_sorted(
    number_R: Tensor, edge_I1: Sequence[int], wanted_N: Tensor, strip_N: Tensor | None
) -> Tensor:
    """Return the indices of numbers, int64 [N]; -1 for numbers that are absent.

    Args:
        number_R: The numbers, int64, of each strip ascending and distinct.
        edge_I1: Strip i has number_R[edge[i] : edge[i + 1]].
        wanted_N: The numbers to find, int64.
        strip_N: The strip of each wanted number; None if there is one strip.
    """
    found_N = torch.full_like(wanted_N, -1)
    for strip in range(len(edge_I1) - 1):
        first = edge_I1[strip]
        held_K = number_R[first : edge_I1[strip + 1]]
        if not len(held_K):
            continue
        at_N = torch.searchsorted(held_K, wanted_N).clamp_(max=len(held_K) - 1)
        here_N = held_K[at_N] == wanted_N
        if strip_N is not None:
            here_N &= strip_N == strip
        found_N = torch.where(here_N, at_N + first, found_N)
    return found_N
