"""The interface between an optimiser and gradients of table rows whose update waits for its step,
and the sum of the norms of parts.
"""

import math
from collections.abc import Sequence
from typing import Protocol


class TableGradients(Protocol):
    """The gradients of the touched rows of some tables, over all ranks.

    Every rank calls each method.
    """

    def defer(self, optimizer: object) -> None:
        """Make updates wait for `end_step` from now on, instead of running at the end of backward.

        Args:
            optimizer: The optimiser that calls `end_step` in its step. It must live as long as the
                tables train.
        """

    def power_sum(self, order: float, dense: float) -> float:
        """Return the sum of the absolute values of all elements to a power, or their maximum: over
        all ranks, each row once, the same number on every rank. It costs one small message.

        Args:
            order: The power, or infinity for the maximum.
            dense: The other gradients' part of the sum; rank 0's value counts.
        """

    def scale(self, factor: float) -> None:
        """Multiply the gradients."""

    def clamp(self, most: float) -> None:
        """Limit the elements of the gradients to -most .. most."""

    def end_step(self) -> None:
        """Update the rows with the waiting gradients, then drop the gradients."""

    def drop(self) -> None:
        """Drop the waiting gradients."""


def joined(parts: Sequence[float], order: float) -> float:
    """Return the sum of powers in their order, or their maximum if the order of the norm is
    infinite. With a part of NaN the result is NaN.
    """
    if any(math.isnan(part) for part in parts):
        return math.nan
    return max(parts, default=0.0) if math.isinf(order) else sum(parts)
