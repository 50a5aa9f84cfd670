"""The slots of keys in memory that grows. An index finds the slot of a key. Slots that were used
before are given out first.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from recapp.errors import CheckpointError
from recapp.kernels.backend import Backend
from recapp.kernels.row_memory import most_bytes
from recapp.sharding.layout import Piece
from recapp.tables.dynamic import keys_of, positions_of, runs_of

MOST_SLOTS = 2**31 - 2  # an index holds slots in 32 bits


def most_slots(device: torch.device, bytes_of_slot: int) -> int:
    """Return the largest number of slots of a size in the memory of a device."""
    return min(MOST_SLOTS, most_bytes(device) // bytes_of_slot)


class KeySlots:
    """The slots of the keys of some strips.

    Args:
        runs: The runs of positions that may occur.
        capacity: The largest number of slots.
        backend: Kernels.
        device: Device of positions and slots.

    `index` finds slots, by position and strip. `used` is the number of slots that memory must hold:
    each was given out at least once.
    """

    def __init__(
        self, runs: Sequence[int], capacity: int, backend: Backend, device: torch.device
    ) -> None:
        self.index = backend.key_index(runs, capacity, device)
        self.used = 0
        self._free = torch.zeros(0, dtype=torch.int64, device=device)
        self._loading: list[tuple[int, Piece, Tensor, Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Return the bytes of the index with its positions and strips."""
        return int(self.index.nbytes + self.index.positions.nbytes + self.index.strips.nbytes)

    def take(self, n: int) -> Tensor:
        """Return n free slots."""
        again = self._free[max(0, len(self._free) - n) :]
        self._free = self._free[: len(self._free) - len(again)]
        new = self.behind(n - len(again))
        self.used += len(new)
        return torch.cat([again, new])

    def behind(self, n: int) -> Tensor:
        """Return n consecutive slots behind all used slots. They stay free."""
        return torch.arange(self.used, self.used + n, device=self._free.device)

    def give_back(self, slot_M: Tensor) -> None:
        """Take slots back. Where they are exactly the newest slots, `used` shrinks."""
        n = len(slot_M)
        newest = torch.arange(self.used - n, self.used, device=slot_M.device)
        if torch.equal(slot_M, newest):
            self.used -= n
        else:
            self._free = torch.cat([self._free, slot_M])

    def remove(self, slot_M: Tensor) -> None:
        """Remove the keys of distinct slots, and take the slots back."""
        if len(slot_M):
            self.index.remove(slot_M)
            self.give_back(slot_M)

    def clear(self) -> None:
        """Remove all keys, and make all slots free."""
        self.index.clear()
        self.used = 0
        self._free = self._free[:0]

    # ---- checkpoints

    def of_pieces(
        self, strip: int, pieces: Sequence[Piece], guests: Tensor | None = None
    ) -> Iterator[tuple[Piece, Tensor, Tensor]]:
        """Yield each piece of a strip, the slots of its keys in the order of their positions, and
        the keys, [N, 1].

        Args:
            strip: The number of the strip.
            pieces: The pieces.
            guests: Slots of keys that are left out.
        """
        slot_N = self.index.slots_of(strip)
        if guests is not None:
            slot_N = slot_N[~torch.isin(slot_N, guests)]
        run_N = runs_of(self.index.positions.rows[slot_N, 0])
        for p in pieces:
            held_N = slot_N[(run_N >= p.rows.start) & (run_N < p.rows.stop)]
            yield p, held_N, keys_of(self.index.positions.rows[held_N])

    def begin_load(self) -> None:
        """Forget the slots of a load that did not end."""
        self._loading = []

    def load(self, strip: int, piece: Piece, n: int) -> tuple[slice, Tensor]:
        """Take n consecutive slots for the keys of a piece. Return them, and memory for the keys,
        [n, 1], which the caller fills before `loaded`.
        """
        slot_N = self.behind(n)
        self.used += n
        key_N1 = torch.zeros(n, 1, dtype=torch.int64, device=slot_N.device)
        self._loading.append((strip, piece, slot_N, key_N1))
        return slice(self.used - n, self.used), key_N1

    def loaded(self, tables: Sequence[str]) -> Iterator[tuple[int, Tensor]]:
        """Put the loaded keys into the index. Yield the strip and the positions of each piece.

        Args:
            tables: The table of each strip, for errors.

        Raises:
            CheckpointError: A key occurs twice or lies in a run where it does not belong.
        """
        for strip, p, slot_N, key_N1 in self._loading:
            position_N = positions_of(key_N1[:, 0])
            run_N = runs_of(position_N)
            inside = bool(((run_N >= p.rows.start) & (run_N < p.rows.stop)).all())
            if not inside or bool((position_N[1:] <= position_N[:-1]).any()):
                raise CheckpointError(
                    f"table {tables[strip]}: the stored keys are not in the order of their "
                    "positions: the checkpoint is damaged; use another one"
                )
            if len(slot_N):
                strip_N = torch.full_like(position_N, strip, dtype=torch.int16)
                self.index.insert(position_N, strip_N, slot_N)
                yield strip, position_N
        self._loading = []
