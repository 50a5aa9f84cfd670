"""What an optimiser sees of gradients of table rows whose update waits for its step, and how
norms of parts are put together.
"""

import math
from collections.abc import Sequence
from typing import Protocol


class TableGradients(Protocol):
    """Gradients of the touched rows of some tables, over all ranks.

    Every rank calls each method.
    """

    def defer(self, optimizer: object) -> None:
        """Have updates wait for `end_step` from now on, instead of ending backward.

        Args:
            optimizer: Calls it in its step, and has to live as long as the tables train.
        """

    def power_sum(self, order: float, dense: float) -> float:
        """Return the sum of all elements' absolute values to a power, over all ranks and each row
        once, or their maximum: the same number on every rank. It costs one small message.

        Args:
            order: The power, or infinity for the maximum.
            dense: What the other gradients add to it; rank 0's counts.
        """

    def scale(self, factor: float) -> None:
        """Multiply the gradients."""

    def clamp(self, most: float) -> None:
        """Bring the elements of the gradients between -most and most."""

    def end_step(self) -> None:
        """Update the rows with what waits, and forget it."""

    def drop(self) -> None:
        """Forget what waits."""


def joined(parts: Sequence[float], order: float) -> float:
    """Return the sum of some powers in their order, or their maximum where the order of the norm is
    infinite; a part that is no number wins.
    """
    if any(math.isnan(part) for part in parts):
        return math.nan
    return max(parts, default=0.0) if math.isinf(order) else sum(parts)
