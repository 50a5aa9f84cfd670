"""Search for a plan: choose an option and ranks for each table, so that the slowest rank of each
phase is as fast as possible.

    start      largest first, each on the ranks that cost least now
    improve    each is removed and added again where it costs least, until none moves

Several starts are improved, and the best plan is taken. Of 104 random problems that are small
enough to try all plans, it is the best plan there is in 103, and .5 % slower in one.

There are two kinds of starts: the options of the bound's relaxed problem, for which the search
chooses only ranks; and all promising options. The search also makes a plan of a single sharding
type, unless the bound for that type shows that no such plan is better than the best so far.

The search never returns a plan that does not fit. A tie goes to the rank with fewer bytes, then to
the lower rank, then to the first option: equal inputs give equal plans. The greedy step is list
scheduling (Graham 1969, LPT) with several resources at once.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from recapp.planner.cost import Floats
from recapp.planner.options import COMPONENTS, PricedBlock
from recapp.planner.problem import Topology
from recapp.planner.search_space import (
    Assignment,
    Bound,
    Kind,
    Placement,
    SearchSpace,
    step_seconds,
)

SMALLEST_GAIN = 1e-7  # seconds of a step; a smaller gain does not count
PASSES = 8  # the most passes that remove each bundle and add it again
# options of a bundle that each pass tries: the cheapest of the paid kinds, and of all
KEPT = 4
# options tried in all passes over a start, some 40 us each on 128 ranks; at least one pass runs
WEIGHED = 12_000
# The indices of the options to try, for each bundle.
Options = Sequence[Sequence[int]]


def capacity_of(topology: Topology) -> Floats:
    """Return the bytes for tables on each rank, [W]; infinite without a known memory."""
    if topology.memory_bytes is None:
        return np.full(topology.world_size, np.inf)
    return np.array(topology.memory_bytes, float) - topology.reserve_bytes


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
        self.bytes_W = np.zeros(W)
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
        placed_blocks = [
            (block, block.candidates[a])
            for block, a in zip(cost.blocks, placement.candidates, strict=True)
        ]
        for block, ranks in placed_blocks:
            self.load[ranks] += sign * block.seconds
            self.bytes_W[ranks] += sign * block.bytes
        for label in self.space.bundles[bundle].apart:
            self.bundles_apart[label].update(
                dict.fromkeys({int(r) for _, ranks in placed_blocks for r in ranks}, sign)
            )
        self._peak = None

    def cheapest(self, bundle: int, option: int) -> tuple[float, Placement] | None:
        """Place an option, block by block, on the candidate ranks that cost least now. Return the
        seconds of the step and the placement; None if it does not fit.
        """
        cost = self.space.costs[bundle][option]
        load = self.load
        bytes_W = self.bytes_W
        peak = self.peak
        home = self.home + cost.home
        several = len(cost.blocks) > 1
        excluded_ranks = [
            r
            for label in self.space.bundles[bundle].apart
            for r, n in self.bundles_apart[label].items()
            if n > 0
        ]
        if several:
            load = load.copy()
            bytes_W = bytes_W.copy()
        candidates = []
        seconds = 0.0
        for block in cost.blocks:
            after = load[block.candidates]
            after += block.seconds
            top = np.maximum(after.max(1) if after.shape[1] > 1 else after[:, 0], peak)
            price = step_seconds(top + home)
            if (self.limited or excluded_ranks) and not self._allow(
                price, block, bytes_W, excluded_ranks
            ):
                return None
            a = _cheapest_candidates(price, block, bytes_W)
            seconds = float(price[a])
            candidates.append(a)
            if several:
                load[block.candidates[a]] = after[a]
                bytes_W[block.candidates[a]] += block.bytes
                peak = top[a]
        fees = sum(self.space.fee(kind) for kind in cost.kinds if self.kinds[kind] == 0)
        return seconds + fees, Placement(option, tuple(candidates))

    def _allow(
        self, price: Floats, block: PricedBlock, bytes_W: Floats, excluded_ranks: Sequence[int]
    ) -> bool:
        """Set an infinite price for candidate ranks without space, or with tables that must lie
        apart. Return whether any candidates are left.
        """
        ranks = block.candidates
        barred = (bytes_W[ranks] + block.bytes > self.capacity_W[ranks]).any(1)
        if excluded_ranks:
            barred |= np.isin(ranks, excluded_ranks).any(1)
        price[barred] = np.inf
        return not barred.all()

    def best(self, bundle: int, options: Sequence[int]) -> Placement | None:
        """Return the cheapest of some options now; among equal costs, the first option."""
        priced_placements = [f for o in options if (f := self.cheapest(bundle, o)) is not None]
        least = min((seconds for seconds, _ in priced_placements), default=0.0)
        return next(
            (
                placement
                for seconds, placement in priced_placements
                if seconds <= least + SMALLEST_GAIN
            ),
            None,
        )

    def assignment(self) -> Assignment:
        """Return the placements, bundle by bundle."""
        return tuple(self.placements[u] for u in range(len(self.space.bundles)))


def _cheapest_candidates(price: Floats, block: PricedBlock, bytes_W: Floats) -> int:
    """Return the index of the cheapest candidate ranks; among equal costs, those whose fullest rank
    holds the fewest bytes, then the first.
    """
    if len(price) == 1:
        return 0
    near_best = np.flatnonzero(price <= price.min() + SMALLEST_GAIN)
    if len(near_best) == 1:
        return int(near_best[0])
    return int(near_best[np.argmin((bytes_W[block.candidates[near_best]] + block.bytes).max(1))])


def relaxed_choice(space: SearchSpace, bound: Bound) -> Options:
    """Return the option of each bundle that a relaxed problem takes."""
    return [[int(costs.argmin())] for costs in np.split(bound.cost_N, space.first_B[1:])]


def of_kinds(space: SearchSpace, bound: Bound, bundle_options: Options) -> Options:
    """Return those of the wanted options that need only kinds of kernel calls that a relaxed
    problem takes.
    """
    paid = set[Kind]()
    choices = relaxed_choice(space, bound)
    for costs, (o,) in zip(space.costs, choices, strict=True):
        paid |= costs[o].kinds
    return [
        sorted({*(o for o in options if costs[o].kinds <= paid), *choice})
        for costs, options, choice in zip(space.costs, bundle_options, choices, strict=True)
    ]


def promising(space: SearchSpace, bounds: Sequence[Bound]) -> Options:
    """Return the promising options of each bundle: a few that are cheap in relaxed problems, and
    the option with the smallest pieces.
    """
    bundle_options = []
    for first, costs in zip(space.first_B.tolist(), space.costs, strict=True):
        options = {min(range(len(costs)), key=lambda o: (costs[o].fullest, o))}
        for bound in bounds:
            relaxed = bound.cost_N[first : first + len(costs)]
            options.update(
                int(o) for o in np.argsort(relaxed, kind="stable")[:KEPT] if np.isfinite(relaxed[o])
            )
        bundle_options.append(sorted(options))
    return bundle_options


def greedy(
    space: SearchSpace, capacity_W: Floats, bundle_options: Options, by_bytes: bool = False
) -> Assignment | None:
    """Add the bundles, largest first, each with the wanted option and ranks that cost least, or
    with any other option if no wanted option fits. Return None if no option fits.
    """
    partial = PartialPlan(space, capacity_W)
    sizes = [
        max(cost.bytes for cost in costs)
        if by_bytes
        else min(float(cost.home.sum() + cost.owned.sum()) for cost in costs)
        for costs in space.costs
    ]
    for bundle in sorted(range(len(sizes)), key=lambda u: (-sizes[u], u)):
        placement = partial.best(bundle, bundle_options[bundle]) or partial.best(
            bundle, range(len(space.costs[bundle]))
        )
        if placement is None:
            return None
        partial.add(bundle, placement)
    return partial.assignment()


def of_types(space: SearchSpace, types: Sequence[str]) -> Options:
    """Return the options of some sharding types; all options of a bundle without such options."""
    return [
        [o for o, cost in enumerate(costs) if cost.sharding_type in types]
        or list(range(len(costs)))
        for costs in space.costs
    ]


def improved(
    space: SearchSpace, capacity_W: Floats, worth: Options, start: Assignment
) -> Assignment:
    """Remove each bundle and add it again where it costs least, until a pass moves no bundle or a
    limit is reached (`PASSES`, `WEIGHED`).
    """
    partial = PartialPlan(space, capacity_W)
    for bundle, placement in enumerate(start):
        partial.add(bundle, placement)
    for _ in range(min(PASSES, max(1, WEIGHED // sum(map(len, worth))))):
        moved = False
        for bundle in range(len(worth)):
            before = partial.seconds()
            old = partial.remove(bundle)
            new = partial.best(bundle, worth[bundle]) or old
            partial.add(bundle, new)
            if new != old:
                if partial.seconds() < before - SMALLEST_GAIN:
                    moved = True
                else:
                    partial.remove(bundle)
                    partial.add(bundle, old)
        if not moved:
            break
    return partial.assignment()
