"""Numbers of places in memory that grows: free ones are handed out, those used before first."""

import torch
from torch import Tensor


class FreeSlots:
    """The slots of a store that hold nothing.

    Args:
        device: Device of the numbers.

    `used` is how many slots were ever handed out: memory has to reach so far. `MOST` is how many
    there can be: an index holds them in 32 bits.
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
        """Return n slots behind all that were handed out: one behind the other."""
        new = self.behind(n)
        self.used += n
        return new

    def behind(self, n: int) -> Tensor:
        """Return n slots behind all that were handed out, which stay free."""
        return torch.arange(self.used, self.used + n, device=self._free.device)

    def give_back(self, slot_M: Tensor) -> None:
        """Take back slots; the newest ones as if they had never been handed out."""
        n = len(slot_M)
        newest = torch.arange(self.used - n, self.used, device=slot_M.device)
        if torch.equal(slot_M, newest):
            self.used -= n
        else:
            self._free = torch.cat([self._free, slot_M])

    def clear(self) -> None:
        """Have all slots free."""
        self.used = 0
        self._free = self._free[:0]
