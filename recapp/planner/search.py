"""Search: which option and which place for every table, so that the slowest rank of every phase is as fast as can be.

    few combinations      all of them, cut off by a bound: the best plan there is by the model's price
    more                  largest first, each where it costs least now; then each is taken out and put back where it costs least, until
                          nothing moves; the same from every uniform start

A plan that does not fit is never returned. Ties go to the rank that holds fewer bytes, then to the lower number, then to the option
named first: equal inputs give equal plans. The greedy step is list scheduling (Graham 1969, LPT) with several resources at once.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from recapp.planner.cost import Floats, add_by_rank
from recapp.planner.options import KERNEL_PHASES, LANES, Block, Option
from recapp.sharding.plan import Mode

EXACT_COMBINATIONS = 5_000      # of options and places of all tables: tried one by one, about a second
PASSES = 8                      # over all tables, taking out and putting back, at most
KEPT = 4                        # options of a unit that are weighed again and again, beside the one that spreads its bytes most
WEIGHED = 12_000                # options weighed in all passes over a start, about .2 ms each on 128 ranks; at least one pass is made
LINK_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)      # of the host's link beside the network's
WORTH = 1e-7                    # seconds of a step: less is no gain
_K, _M = len(KERNEL_PHASES), (LANES - len(KERNEL_PHASES)) // 2


@dataclass(frozen=True)
class Unit:
    """Tables that are placed together, mostly one.

    Args:
        tables: their names.
        options: of the unit: for each, an option for each table, with blocks that agree on places.
        apart: words; units that share one share no rank.
    """

    tables: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    apart: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Choice:
    """An option of a unit, and an alternative for each of its blocks."""

    option: int
    places: tuple[int, ...]


Assignment = tuple[Choice, ...]
"""A choice for each unit."""


def step_seconds(peak: Floats) -> Floats:
    """Lanes' slowest ranks [LANES, ...] as a step: kernels add up, a message takes the slower of its two links."""
    found: Floats = peak[:_K].sum(0) + np.maximum(peak[_K:_K + _M], peak[_K + _M:]).sum(0)
    return found


def merged_blocks(unit: Unit, option: int) -> list[Block]:
    """Blocks of a unit's option: those of one table, or of several side by side."""
    chosen = unit.options[option]
    if len(chosen) == 1:
        return list(chosen[0].blocks)
    blocks = []
    for same in zip(*(o.blocks for o in chosen), strict=True):
        blocks.append(Block(tuple(r for b in same for r in b.rectangles), np.concatenate([b.lanes for b in same], 1),
                            np.concatenate([b.bytes for b in same]), np.concatenate([b.places for b in same], 1)))
    return blocks


@dataclass
class Board:
    """What lies where: seconds by lane and rank, bytes by rank.

    Args:
        units: what is placed.
        capacity_W: bytes each rank has; infinite where nobody knows.
        call_seconds: what each further width and mode costs, in calls of kernels.
    """

    units: Sequence[Unit]
    capacity_W: Floats
    call_seconds: float = 0.0
    choices: dict[int, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        W = len(self.capacity_W)
        self.load, self.home, self.held = np.zeros((LANES, W)), np.zeros(LANES), np.zeros(W)
        self.kinds: Counter[tuple[int, Mode]] = Counter()
        self.near: dict[str, Counter[int]] = {word: Counter() for u in self.units for word in u.apart}
        self._blocks = [[merged_blocks(u, o) for o in range(len(u.options))] for u in self.units]
        self._home = [[_home_of(chosen) for chosen in u.options] for u in self.units]
        self._kinds = [[frozenset[tuple[int, Mode]]().union(*(p.work.kinds for p in chosen)) for chosen in u.options] for u in self.units]

    def seconds(self) -> float:
        """Of a step, by what the lanes say."""
        return float(step_seconds(self.home + self.load.max(1))) + self.call_seconds * sum(n > 0 for n in self.kinds.values())

    def put(self, unit: int, choice: Choice, sign: int = 1) -> None:
        """Place a unit; with `sign` -1 take it away."""
        self.home = self.home + sign * self._home[unit][choice.option]
        self.kinds.update(dict.fromkeys(self._kinds[unit][choice.option], sign))
        chosen = list(zip(self._blocks[unit][choice.option], choice.places, strict=True))
        for block, a in chosen:
            add_by_rank(self.load, block.places[a], sign * block.lanes)
            np.add.at(self.held, block.places[a], sign * block.bytes)
        for word in self.units[unit].apart:
            self.near[word].update(dict.fromkeys({int(r) for block, a in chosen for r in block.places[a]}, sign))
        if sign > 0:
            self.choices[unit] = choice
        else:
            del self.choices[unit]

    def cheapest(self, unit: int, option: int) -> tuple[float, Choice] | None:
        """Where an option costs least now, block by block; None where it has no room."""
        load, held, home = self.load.copy(), self.held.copy(), self.home + self._home[unit][option]
        taken = {r for word in self.units[unit].apart for r, n in self.near[word].items() if n > 0}
        chosen = []
        for block in self._blocks[unit][option]:
            places, peak = block.places, load.max(1)
            after = np.maximum((load[:, places] + block.lanes[:, None]).max(2), peak[:, None])
            price = step_seconds(home[:, None] + after)
            full = held[places] + block.bytes
            barred = (full > self.capacity_W[places]).any(1)
            if taken:
                barred |= np.isin(places, list(taken)).any(1)
            if barred.all():
                return None
            price[barred] = np.inf
            near_best = np.flatnonzero(price <= price.min() + WORTH)
            a = int(near_best[np.lexsort((near_best, full[near_best].max(1)))[0]])
            chosen.append(a)
            add_by_rank(load, places[a], block.lanes)
            np.add.at(held, places[a], block.bytes)
        kinds = sum(self.kinds[kind] == 0 for kind in self._kinds[unit][option])
        return float(step_seconds(home + load.max(1))) + self.call_seconds * kinds, Choice(option, tuple(chosen))

    def best(self, unit: int, options: Sequence[int]) -> Choice | None:
        """The cheapest of some options now; of those that cost the same, the one named first."""
        found = [f for o in options if (f := self.cheapest(unit, o)) is not None]
        least = min((seconds for seconds, _ in found), default=0.0)
        return next((choice for seconds, choice in found if seconds <= least + WORTH), None)

    def assignment(self) -> Assignment:
        """What was chosen, unit by unit."""
        return tuple(self.choices[u] for u in range(len(self.units)))


def promising(unit: Unit, world: int) -> list[int]:
    """The options worth weighing: cheapest if their work could be spread evenly, and the one whose fullest rectangle is smallest."""
    bound, largest = [], []
    for chosen in unit.options:
        bound.append(_weighted(_home_of(chosen) + sum((b.lanes.sum(1) for p in chosen for b in p.blocks), np.zeros(LANES)) / world))
        largest.append(max(float(b.bytes.max()) for p in chosen for b in p.blocks))
    kept = sorted(range(len(bound)), key=lambda o: (bound[o], o))[:KEPT]
    smallest = min(range(len(largest)), key=lambda o: (largest[o], o))
    return sorted({*kept, smallest})


def _home_of(chosen: Sequence[Option]) -> Floats:
    return sum((p.home for p in chosen), np.zeros(LANES))


def greedy(units: Sequence[Unit], capacity_W: Floats, call_seconds: float, kinds: Sequence[str] | None = None,
           by_bytes: bool = False) -> Assignment | None:
    """Largest first, each where it costs least; with `kinds` only options of those types, where a unit has one. None: no room."""
    board = Board(units, capacity_W, call_seconds)
    sizes = [min(sum(p.seconds for p in chosen) for chosen in u.options) for u in units]
    if by_bytes:
        sizes = [max(sum(float(b.bytes.sum()) for p in chosen for b in p.blocks) for chosen in u.options) for u in units]
    for unit in sorted(range(len(units)), key=lambda u: (-sizes[u], u)):
        options = range(len(units[unit].options))
        if kinds is None:
            wanted = promising(units[unit], len(capacity_W))
        else:
            wanted = [o for o in options if units[unit].options[o][0].kind in kinds]
        choice = board.best(unit, wanted) or board.best(unit, options)
        if choice is None:
            return None
        board.put(unit, choice)
    return board.assignment()


def improved(units: Sequence[Unit], capacity_W: Floats, call_seconds: float, start: Assignment) -> Assignment:
    """Take each unit out and put it where it costs least, until a pass moves nothing or enough was weighed."""
    board, worth = Board(units, capacity_W, call_seconds), [promising(u, len(capacity_W)) for u in units]
    for unit, choice in enumerate(start):
        board.put(unit, choice)
    for _ in range(min(PASSES, max(1, WEIGHED // sum(map(len, worth))))):
        moved = False
        for unit in range(len(units)):
            before, old = board.seconds(), board.choices[unit]
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


def combinations(units: Sequence[Unit]) -> int:
    """How many assignments there are."""
    return prod(sum(prod(len(b.places) for b in merged_blocks(u, o)) for o in range(len(u.options))) for u in units)


def exhaustive(units: Sequence[Unit], capacity_W: Floats, call_seconds: float, seconds_of: Callable[[Assignment], float],
               start: Assignment | None, constant: float) -> Assignment | None:
    """The best of all assignments that fit. A part that is no better than the best so far is not completed: more never makes it shorter.

    Args:
        units: what is placed.
        capacity_W: bytes each rank has.
        call_seconds: as of `Board`.
        seconds_of: the whole price of an assignment.
        start: one that fits, if there is one; it wins ties.
        constant: what every assignment pays beside what lanes say.
    """
    board, best = Board(units, capacity_W, call_seconds), start
    least = np.inf if start is None else seconds_of(start)

    def place(unit: int) -> None:
        nonlocal best, least
        if unit == len(units):
            found = board.assignment()
            if (board.held <= capacity_W).all() and (seconds := seconds_of(found)) < least:
                best, least = found, seconds
            return
        for choice in _choices(units[unit]):
            board.put(unit, choice)
            alone = all(n <= 1 for word in units[unit].apart for n in board.near[word].values())
            if alone and board.seconds() + constant < least:
                place(unit + 1)
            board.put(unit, choice, -1)

    place(0)
    return best


def _choices(unit: Unit) -> Iterator[Choice]:
    for o in range(len(unit.options)):
        sizes = [len(b.places) for b in merged_blocks(unit, o)]
        for places in np.ndindex(*sizes):
            yield Choice(o, tuple(int(a) for a in places))


def lower_bound(units: Sequence[Unit], world: int) -> float:
    """No placement is faster: ranks share the least work at best evenly, and the least divisible rectangle lies somewhere whole.

    A message takes the slower of two links, so any mean of both is certain to add up over tables; several are tried.
    """
    even = [[_home_of(chosen) + sum((b.lanes.sum(1) for p in chosen for b in p.blocks), np.zeros(LANES)) / world for chosen in u.options]
            for u in units]
    shared = max(sum(min(_weighted(lanes, near) for lanes in options) for options in even) for near in LINK_WEIGHTS)
    whole = [min(float(step_seconds(_home_of(chosen) + np.max([b.lanes.max(1) for p in chosen for b in p.blocks], 0)))
                 for chosen in u.options) for u in units]
    return max(shared, *whole)


def _weighted(lanes: Floats, near: float = 0.5) -> float:
    return float(lanes[:_K].sum() + near * lanes[_K:_K + _M].sum() + (1 - near) * lanes[_K + _M:].sum())
