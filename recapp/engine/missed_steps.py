"""The steps that rows have missed under a rule of all rows (`l2_all_rows` of row rules).

A dense optimiser with L2 changes every row of a table in every step. Here a step changes only the
rows that the batch touches. Every other row misses the step, and takes it later:

    looked up               the rows that are read catch up first, in training as in evaluation
    updated                 the touched rows catch up first: they may come from an earlier lookup
    read or written whole   all rows catch up: checkpoints, state dicts, exports, loads
    begins anew             the steps before no longer count

A missed step is the rule's step with a gradient of zero. It reads nothing but the row, its state
and the rate of the step, so the order of reads changes no bit: plans, ranks, look-ahead and
checkpoints do not either. The rates of the steps since all rows were last caught up are kept, at
most 24 bytes for each step. Rows have one number more, the steps that they have taken; checkpoints
do not store it, because all rows catch up before they are written.

The idea is that of "delayed" or "lazy" updates of regularised models (Langford et al. 2009, Duchi &
Singer 2009), whose missed steps have a closed form. Those of Adam have none.
"""

import torch
from torch import Tensor

from recapp.optim.rules import Rate, RowRule
from recapp.sparse.transfer import copy_to_device


class MissedSteps:
    """The rates of the latest steps of one row rule.

    Args:
        rule: The rule.
        device: The device of the rows.

    `first` is the number of steps before those of `rates_TK`, and `now` the number of all steps.
    """

    def __init__(self, rule: RowRule, device: torch.device) -> None:
        self.first = 0
        self.now = 0
        rate = rule.rate_of(rule.lr, 1)
        numbers = len(rate) if isinstance(rate, tuple) else 1
        self._held_TK = torch.empty(64, numbers, dtype=torch.float64, device=device)

    @property
    def rates_TK(self) -> Tensor:
        """Return the `lr` of each of the latest steps, fp64."""
        return self._held_TK[: self.now - self.first]

    def add(self, rate: Rate) -> None:
        """Add a step with this `lr`."""
        n = self.now - self.first
        if n == len(self._held_TK):
            self._held_TK = torch.cat([self._held_TK, torch.empty_like(self._held_TK)])
        numbers = rate if isinstance(rate, tuple) else (rate,)
        rate_K = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._held_TK[n] = copy_to_device(rate_K, self._held_TK.device)
        self.now += 1

    def forget(self) -> None:
        """Forget the rates, after all rows have caught up."""
        self.first = self.now

    def begin_at(self, steps: int) -> None:
        """Go on from a number of steps that all rows have taken."""
        self.first = self.now = steps
