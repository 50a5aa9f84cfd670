"""Search for a plan: choose an option and ranks for each table, so that the slowest rank of each
phase is as fast as possible.

    few combinations      all combinations, pruned by a bound: the best plan by the cost model's
                          price
    more                  largest first, each on the ranks that cost least now; then each is
                          removed and added again where it costs least, until none moves; from
                          several starts

There are two kinds of starts: the options of the bound's relaxed problem, for which the search
chooses only ranks; and all promising options. The search also makes a plan of a single sharding
type, unless the bound for that type shows that no such plan is better than the best so far.

The search never returns a plan that does not fit. A tie goes to the rank with fewer bytes, then to
the lower rank, then to the first option: equal inputs give equal plans. The greedy step is list
scheduling (Graham 1969, LPT) with several resources at once.
"""

from collections.abc import Callable, Sequence

import numpy as np

from recapp.planner.bounds import Bound
from recapp.planner.cost import Floats
from recapp.planner.partial_plan import SMALLEST_GAIN, PartialPlan
from recapp.planner.search_space import Assignment, Kind, SearchSpace

# the most combinations of options and candidate ranks to try one by one, in about a second
EXACT_COMBINATIONS = 5_000
PASSES = 8  # the most passes that remove each bundle and add it again
# options of a bundle that each pass tries: the cheapest of the paid kinds, and of all
KEPT = 4
# options tried in all passes over a start, some 40 us each on 128 ranks; at least one pass runs
WEIGHED = 12_000

Options = Sequence[Sequence[int]]
"""The indices of the options to try, for each bundle."""


def taken(space: SearchSpace, bound: Bound) -> Options:
    """Return the option of each bundle that a relaxed problem takes."""
    return [[int(costs.argmin())] for costs in np.split(bound.cost_N, space.first_B[1:])]


def of_kinds(space: SearchSpace, bound: Bound, wanted: Options) -> Options:
    """Return those of the wanted options that need only kinds of kernel calls that a relaxed
    problem takes.
    """
    paid = set[Kind]()
    chosen = taken(space, bound)
    for costs, (o,) in zip(space.costs, chosen, strict=True):
        paid |= costs[o].kinds
    return [
        sorted({*(o for o in options if costs[o].kinds <= paid), *own})
        for costs, options, own in zip(space.costs, wanted, chosen, strict=True)
    ]


def promising(space: SearchSpace, bounds: Sequence[Bound]) -> Options:
    """Return the promising options of each bundle: a few that are cheap in relaxed problems, and
    the option with the smallest pieces.
    """
    found = []
    for first, costs in zip(space.first_B.tolist(), space.costs, strict=True):
        kept = {min(range(len(costs)), key=lambda o: (costs[o].fullest, o))}
        for bound in bounds:
            relaxed = bound.cost_N[first : first + len(costs)]
            kept.update(
                int(o) for o in np.argsort(relaxed, kind="stable")[:KEPT] if np.isfinite(relaxed[o])
            )
        found.append(sorted(kept))
    return found


def greedy(
    space: SearchSpace, capacity_W: Floats, wanted: Options, by_bytes: bool = False
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
        placement = partial.best(bundle, wanted[bundle]) or partial.best(
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


def exhaustive(
    space: SearchSpace,
    capacity_W: Floats,
    seconds_of: Callable[[Assignment], float],
    start: Assignment | None,
) -> Assignment | None:
    """Return the best of all assignments that fit. Skip a partial plan that is not better than the
    best so far, because further bundles never make it faster.

    Args:
        space: The bundles and the costs of their options.
        capacity_W: The memory of each rank in bytes.
        seconds_of: Returns the whole price of an assignment.
        start: An assignment that fits, or None; it wins ties.
    """
    partial = PartialPlan(space, capacity_W)
    best = start
    bundles = space.bundles
    least = np.inf if start is None else seconds_of(start)

    def extend(bundle: int) -> None:
        nonlocal best, least
        if bundle == len(bundles):
            found = partial.assignment()
            if (partial.held <= capacity_W).all() and (seconds := seconds_of(found)) < least:
                best = found
                least = seconds
            return
        for placement in space.placements(bundle):
            partial.add(bundle, placement)
            alone = all(
                n <= 1
                for label in bundles[bundle].apart
                for n in partial.bundles_apart[label].values()
            )
            if alone and partial.seconds() < least:
                extend(bundle + 1)
            partial.remove(bundle)

    extend(0)
    return best
