"""A partial plan: the work and bytes of each rank so far, and the cheapest ranks for one more
bundle.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from recapp.planner.cost import Floats
from recapp.planner.options import COMPONENTS, PricedBlock
from recapp.planner.search_space import Assignment, Kind, Placement, SearchSpace, step_seconds

SMALLEST_GAIN = 1e-7  # seconds of a step; a smaller gain does not count


class PartialPlan:
    """The bundles placed so far: seconds by rank and component, bytes by rank.

    Args:
        space: The bundles and the costs of their options.
        capacity_W: The memory of each rank in bytes; infinite if unknown.
    """

    def __init__(self, space: SearchSpace, capacity_W: Floats) -> None:
        self.space = space
        self.capacity_W = capacity_W
        self.limited = bool(np.isfinite(capacity_W).any())
        W = len(capacity_W)
        self.load = np.zeros((W, COMPONENTS))
        self.home = space.base.copy()
        self.held = np.zeros(W)
        self.placements: dict[int, Placement] = {}
        self.kinds: Counter[Kind] = Counter()
        self.bundles_apart: dict[str, Counter[int]] = {
            label: Counter() for u in space.bundles for label in u.apart
        }
        self._peak: Floats | None = None

    @property
    def peak(self) -> Floats:
        """Return the seconds of the slowest rank of each component, [COMPONENTS]."""
        if self._peak is None:
            self._peak = self.load.max(0)
        return self._peak

    def seconds_by_component(self) -> Floats:
        """Return the seconds of each component, [COMPONENTS]."""
        return self.home + self.peak

    def seconds(self) -> float:
        """Return the seconds of a step, the sum of its components; never more than its price."""
        fees = sum(self.space.fee(kind) for kind, n in self.kinds.items() if n > 0)
        return float(step_seconds(self.seconds_by_component())) + fees + self.space.fixed.seconds

    def add(self, bundle: int, placement: Placement) -> None:
        """Place a bundle on the ranks of a placement."""
        self._change(bundle, placement, 1)
        self.placements[bundle] = placement

    def remove(self, bundle: int) -> Placement:
        """Remove a bundle, and return its placement."""
        placement = self.placements.pop(bundle)
        self._change(bundle, placement, -1)
        return placement

    def _change(self, bundle: int, placement: Placement, sign: int) -> None:
        cost = self.space.costs[bundle][placement.option]
        self.home = self.home + sign * cost.home
        for kind in cost.kinds:
            self.kinds[kind] += sign
        chosen = [
            (block, block.candidates[a])
            for block, a in zip(cost.blocks, placement.candidates, strict=True)
        ]
        for block, ranks in chosen:
            self.load[ranks] += sign * block.seconds
            self.held[ranks] += sign * block.bytes
        for label in self.space.bundles[bundle].apart:
            self.bundles_apart[label].update(
                dict.fromkeys({int(r) for _, ranks in chosen for r in ranks}, sign)
            )
        self._peak = None

    def cheapest(self, bundle: int, option: int) -> tuple[float, Placement] | None:
        """Place an option, block by block, on the candidate ranks that cost least now. Return the
        seconds of the step and the placement; None if it does not fit.
        """
        cost = self.space.costs[bundle][option]
        load = self.load
        held = self.held
        peak = self.peak
        home = self.home + cost.home
        several = len(cost.blocks) > 1
        taken = [
            r
            for label in self.space.bundles[bundle].apart
            for r, n in self.bundles_apart[label].items()
            if n > 0
        ]
        if several:
            load = load.copy()
            held = held.copy()
        chosen = []
        seconds = 0.0
        for block in cost.blocks:
            after = load[block.candidates]
            after += block.seconds
            top = np.maximum(after.max(1) if after.shape[1] > 1 else after[:, 0], peak)
            price = step_seconds(top + home)
            if (self.limited or taken) and not self._allow(price, block, held, taken):
                return None
            a = _cheapest_candidates(price, block, held)
            seconds = float(price[a])
            chosen.append(a)
            if several:
                load[block.candidates[a]] = after[a]
                held[block.candidates[a]] += block.bytes
                peak = top[a]
        fees = sum(self.space.fee(kind) for kind in cost.kinds if self.kinds[kind] == 0)
        return seconds + fees, Placement(option, tuple(chosen))

    def _allow(self, price: Floats, block: PricedBlock, held: Floats, taken: Sequence[int]) -> bool:
        """Set an infinite price for candidate ranks without space, or with tables that must lie
        apart. Return whether any candidates are left.
        """
        ranks = block.candidates
        barred = (held[ranks] + block.bytes > self.capacity_W[ranks]).any(1)
        if taken:
            barred |= np.isin(ranks, taken).any(1)
        price[barred] = np.inf
        return not barred.all()

    def best(self, bundle: int, options: Sequence[int]) -> Placement | None:
        """Return the cheapest of some options now; among equal costs, the first option."""
        found = [f for o in options if (f := self.cheapest(bundle, o)) is not None]
        least = min((seconds for seconds, _ in found), default=0.0)
        return next(
            (placement for seconds, placement in found if seconds <= least + SMALLEST_GAIN), None
        )

    def assignment(self) -> Assignment:
        """Return the placements, bundle by bundle."""
        return tuple(self.placements[u] for u in range(len(self.space.bundles)))


def _cheapest_candidates(price: Floats, block: PricedBlock, held: Floats) -> int:
    """Return the index of the cheapest candidate ranks; among equal costs, those whose fullest rank
    holds the fewest bytes, then the first.
    """
    if len(price) == 1:
        return 0
    near_best = np.flatnonzero(price <= price.min() + SMALLEST_GAIN)
    if len(near_best) == 1:
        return int(near_best[0])
    return int(near_best[np.argmin((held[block.candidates[near_best]] + block.bytes).max(1))])
