"""Search: which option and which place for every table, so that the slowest rank of every phase is
as fast as can be.

    few combinations      all of them, cut off by a bound: the best plan there is by the model's
                          price
    more                  largest first, each where it costs least now; then each is taken out and
                          put back where it costs least, until nothing moves; from several starts

Starts: the options that the bound's relaxed problem takes, which then only need places; and options
as they come. A plan of one type throughout is made as well, unless the bound for that type says
that it cannot be better than what is there.

A plan that does not fit is never returned. Ties go to the rank that holds fewer bytes, then to the
lower number, then to the option named first: equal inputs give equal plans. The greedy step is list
scheduling (Graham 1969, LPT) with several resources at once.
"""

from collections.abc import Callable, Sequence

import numpy as np

from recapp.planner.bounds import Bound
from recapp.planner.cost import Floats
from recapp.planner.placement import WORTH, Board
from recapp.planner.units import Assignment, Catalogue, Kind

EXACT_COMBINATIONS = 5_000  # of options and places of all tables: tried one by one, about a second
PASSES = 8  # over all tables, taking out and putting back, at most
# options of a unit that are weighed again and again: cheapest of the kinds paid for, cheapest of
# all
KEPT = 4
# options weighed in all passes over a start, some 40 us each on 128 ranks; at least one pass is
# made
WEIGHED = 12_000

Options = Sequence[Sequence[int]]
"""Of each unit, those that are weighed."""


def taken(catalogue: Catalogue, bound: Bound) -> Options:
    """Of each unit the option that a relaxed problem takes."""
    return [[int(costs.argmin())] for costs in np.split(bound.cost_N, catalogue.first_U[1:])]


def of_kinds(catalogue: Catalogue, bound: Bound, wanted: Options) -> Options:
    """Of some options those that need no other calls than the ones that a relaxed problem takes."""
    paid = set[Kind]()
    chosen = taken(catalogue, bound)
    for ways, (o,) in zip(catalogue.ways, chosen, strict=True):
        paid |= ways[o].kinds
    return [
        sorted({*(o for o in options if ways[o].kinds <= paid), *own})
        for ways, options, own in zip(catalogue.ways, wanted, chosen, strict=True)
    ]


def promising(catalogue: Catalogue, bounds: Sequence[Bound]) -> Options:
    """Options worth weighing: a few that relaxed problems find cheap, and the one in smallest
    pieces.
    """
    found = []
    for first, ways in zip(catalogue.first_U.tolist(), catalogue.ways, strict=True):
        kept = {min(range(len(ways)), key=lambda o: (ways[o].fullest, o))}
        for bound in bounds:
            costs = bound.cost_N[first : first + len(ways)]
            kept.update(
                int(o) for o in np.argsort(costs, kind="stable")[:KEPT] if np.isfinite(costs[o])
            )
        found.append(sorted(kept))
    return found


def greedy(
    catalogue: Catalogue, capacity_W: Floats, wanted: Options, by_bytes: bool = False
) -> Assignment | None:
    """Largest first, each where it costs least of the wanted options, or of all where none of those
    has room. None: no room.
    """
    board = Board(catalogue, capacity_W)
    sizes = [
        max(way.bytes for way in ways)
        if by_bytes
        else min(float(way.home.sum() + way.owned.sum()) for way in ways)
        for ways in catalogue.ways
    ]
    for unit in sorted(range(len(sizes)), key=lambda u: (-sizes[u], u)):
        choice = board.best(unit, wanted[unit]) or board.best(
            unit, range(len(catalogue.ways[unit]))
        )
        if choice is None:
            return None
        board.put(unit, choice)
    return board.assignment()


def of_types(catalogue: Catalogue, types: Sequence[str]) -> Options:
    """Options of some sharding types only; all, where a unit has none."""
    return [
        [o for o, way in enumerate(ways) if way.type in types] or list(range(len(ways)))
        for ways in catalogue.ways
    ]


def improved(
    catalogue: Catalogue, capacity_W: Floats, worth: Options, start: Assignment
) -> Assignment:
    """Take each unit out and put it where it costs least, until a pass moves nothing or enough was
    weighed.
    """
    board = Board(catalogue, capacity_W)
    for unit, choice in enumerate(start):
        board.put(unit, choice)
    for _ in range(min(PASSES, max(1, WEIGHED // sum(map(len, worth))))):
        moved = False
        for unit in range(len(worth)):
            before = board.seconds()
            old = board.choices[unit]
            board.put(unit, old, -1)
            new = board.best(unit, worth[unit])
            board.put(unit, old if new is None else new)
            if board.choices[unit] != old:
                if board.seconds() < before - WORTH:
                    moved = True
                else:
                    board.put(unit, board.choices[unit], -1)
                    board.put(unit, old)
        if not moved:
            break
    return board.assignment()


def exhaustive(
    catalogue: Catalogue,
    capacity_W: Floats,
    seconds_of: Callable[[Assignment], float],
    start: Assignment | None,
) -> Assignment | None:
    """The best of all assignments that fit. A part that is no better than the best so far is not
    completed: more never makes it shorter.

    Args:
        catalogue: what is placed.
        capacity_W: bytes each rank has.
        seconds_of: the whole price of an assignment.
        start: one that fits, if there is one; it wins ties.
    """
    board = Board(catalogue, capacity_W)
    best = start
    units = catalogue.units
    least = np.inf if start is None else seconds_of(start)

    def place(unit: int) -> None:
        nonlocal best, least
        if unit == len(units):
            found = board.assignment()
            if (board.held <= capacity_W).all() and (seconds := seconds_of(found)) < least:
                best = found
                least = seconds
            return
        for choice in catalogue.choices(unit):
            board.put(unit, choice)
            alone = all(n <= 1 for word in units[unit].apart for n in board.near[word].values())
            if alone and board.seconds() < least:
                place(unit + 1)
            board.put(unit, choice, -1)

    place(0)
    return best
