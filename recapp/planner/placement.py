"""A board on which units are placed: what each rank has to do and to hold, and where one more unit
costs least now.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from recapp.planner.cost import Floats
from recapp.planner.options import LANES, Block
from recapp.planner.units import Assignment, Catalogue, Choice, Kind, step_seconds

WORTH = 1e-7  # seconds of a step: less is no gain


class Board:
    """What lies where: seconds by rank and lane, bytes by rank.

    Args:
        catalogue: the units and what each of their options costs.
        capacity_W: bytes each rank has; infinite where nobody knows.
    """

    def __init__(self, catalogue: Catalogue, capacity_W: Floats) -> None:
        self.catalogue = catalogue
        self.capacity_W = capacity_W
        self.limited = bool(np.isfinite(capacity_W).any())
        W = len(capacity_W)
        self.load = np.zeros((W, LANES))
        self.home = catalogue.base.copy()
        self.held = np.zeros(W)
        self.choices: dict[int, Choice] = {}
        self.kinds: Counter[Kind] = Counter()
        self.near: dict[str, Counter[int]] = {
            word: Counter() for u in catalogue.units for word in u.apart
        }
        self._peak: Floats | None = None

    @property
    def peak(self) -> Floats:
        """The slowest rank of each lane."""
        if self._peak is None:
            self._peak = self.load.max(0)
        return self._peak

    def lanes(self) -> Floats:
        """What each lane takes."""
        return self.home + self.peak

    def seconds(self) -> float:
        """Of a step by what the lanes say, never more than its price."""
        fees = sum(self.catalogue.fee(kind) for kind, n in self.kinds.items() if n > 0)
        return float(step_seconds(self.lanes())) + fees + self.catalogue.fixed.seconds

    def put(self, unit: int, choice: Choice, sign: int = 1) -> None:
        """Place a unit; with `sign` -1 take it away."""
        way = self.catalogue.ways[unit][choice.option]
        self.home = self.home + sign * way.home
        for kind in way.kinds:
            self.kinds[kind] += sign
        chosen = list(zip(way.blocks, choice.places, strict=True))
        for block, a in chosen:
            self.load[block.places[a]] += sign * block.lanes
            self.held[block.places[a]] += sign * block.bytes
        for word in self.catalogue.units[unit].apart:
            self.near[word].update(
                dict.fromkeys({int(r) for block, a in chosen for r in block.places[a]}, sign)
            )
        self._peak = None
        if sign > 0:
            self.choices[unit] = choice
        else:
            del self.choices[unit]

    def cheapest(self, unit: int, option: int) -> tuple[float, Choice] | None:
        """Where an option costs least now, block by block; None where it has no room."""
        way = self.catalogue.ways[unit][option]
        load = self.load
        held = self.held
        peak = self.peak
        home = self.home + way.home
        several = len(way.blocks) > 1
        taken = [
            r
            for word in self.catalogue.units[unit].apart
            for r, n in self.near[word].items()
            if n > 0
        ]
        if several:
            load = load.copy()
            held = held.copy()
        chosen = []
        seconds = 0.0
        for block in way.blocks:
            after = load[block.places]
            after += block.lanes
            top = np.maximum(after.max(1) if after.shape[1] > 1 else after[:, 0], peak)
            price = step_seconds(top + home)
            if (self.limited or taken) and not self._allow(price, block, held, taken):
                return None
            a = _first_of_the_cheapest(price, block, held)
            seconds = float(price[a])
            chosen.append(a)
            if several:
                load[block.places[a]] = after[a]
                held[block.places[a]] += block.bytes
                peak = top[a]
        fees = sum(self.catalogue.fee(kind) for kind in way.kinds if self.kinds[kind] == 0)
        return seconds + fees, Choice(option, tuple(chosen))

    def _allow(self, price: Floats, block: Block, held: Floats, taken: Sequence[int]) -> bool:
        """Places without room, or with tables to be kept apart from, get an infinite price; whether
        any is left.
        """
        barred = (held[block.places] + block.bytes > self.capacity_W[block.places]).any(1)
        if taken:
            barred |= np.isin(block.places, taken).any(1)
        price[barred] = np.inf
        return not barred.all()

    def best(self, unit: int, options: Sequence[int]) -> Choice | None:
        """The cheapest of some options now; of those that cost the same, the one named first."""
        found = [f for o in options if (f := self.cheapest(unit, o)) is not None]
        least = min((seconds for seconds, _ in found), default=0.0)
        return next((choice for seconds, choice in found if seconds <= least + WORTH), None)

    def assignment(self) -> Assignment:
        """What was chosen, unit by unit."""
        return tuple(self.choices[u] for u in range(len(self.catalogue.units)))


def _first_of_the_cheapest(price: Floats, block: Block, held: Floats) -> int:
    """Of places that cost the same, the one whose fullest rank is least full, then the first."""
    if len(price) == 1:
        return 0
    near_best = np.flatnonzero(price <= price.min() + WORTH)
    if len(near_best) == 1:
        return int(near_best[0])
    return int(near_best[np.argmin((held[block.places[near_best]] + block.bytes).max(1))])
