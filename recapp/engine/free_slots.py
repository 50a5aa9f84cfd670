"""Free slots of memory that grows. Slots that were used before are given out first."""

import torch
from torch import Tensor


class FreeSlots:
    """The free slots of a store.

    Args:
        device: Device of the numbers.

    `used` is the number of slots that memory must hold: each was given out at least once. `MOST` is
    the maximum, because an index holds slots in 32 bits.
    """

    MOST = 2**31 - 2

    def __init__(self, device: torch.device) -> None:
        self.used = 0
        self._free = torch.zeros(0, dtype=torch.int64, device=device)

    def take(self, n: int) -> Tensor:
        """Return n free slots."""
        again = self._free[max(0, len(self._free) - n) :]
        self._free = self._free[: len(self._free) - len(again)]
        new = torch.arange(self.used, self.used + n - len(again), device=again.device)
        self.used += len(new)
        return torch.cat([again, new])

    def take_behind(self, n: int) -> Tensor:
        """Take and return n consecutive slots behind all used slots."""
        new = self.behind(n)
        self.used += n
        return new

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

    def clear(self) -> None:
        """Make all slots free."""
        self.used = 0
        self._free = self._free[:0]
