"""What the search moves about: units of tables, and all that it asks of their options, worked out
once.

    Unit       tables that are placed together, mostly one; its options
    Way        an option of a unit in numbers: home, owners, the kinds of kernels' calls that it
               needs, blocks to place
    Catalogue  the ways of all units, one by one and as arrays [N, LANES] over all of them
    Choice     a way, and an alternative for each of its blocks
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from recapp.planner.cost import Fixed, Floats
from recapp.planner.options import KERNEL_PHASES, LANES, Block, Option, base_lanes
from recapp.planner.pricing import Ints

Kind = tuple[int, str]
"""A width and mode, each of which has calls of its own; or `AGREEMENT`."""
# the message in which strips of rows agree on a statistic: there is one if any table needs it
AGREEMENT: Kind = (0, "agreement")
_K = len(KERNEL_PHASES)
_M = (LANES - len(KERNEL_PHASES)) // 2


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


def step_seconds(lanes: Floats) -> Floats:
    """Lanes' slowest ranks [..., LANES] as a step: kernels add up, a message takes the slower of
    its two links.
    """
    found: Floats = lanes[..., :_K].sum(-1) + np.maximum(
        lanes[..., _K : _K + _M], lanes[..., _K + _M :]
    ).sum(-1)
    return found


@dataclass(frozen=True)
class Way:
    """An option of a unit: the tables' options added up.

    Args:
        type: sharding type.
        home: seconds of every rank, [LANES].
        owned: of all owners together, [LANES].
        largest: of the piece that takes longest, [LANES]; no rank has a part of a piece.
        kinds: that its calls need.
        blocks: to be placed, none of them twice on a rank.
    """

    type: str
    home: Floats
    owned: Floats
    largest: Floats
    kinds: frozenset[Kind]
    blocks: tuple[Block, ...]

    @cached_property
    def ranks(self) -> frozenset[int]:
        """Where it may lie."""
        return frozenset(int(r) for b in self.blocks for r in np.unique(b.places))

    def inside(self, ranks: Sequence[int]) -> Floats:
        """What these ranks together take of it wherever it lies, [LANES]."""
        return sum(
            ((np.isin(b.places, ranks) @ b.lanes).min(0) for b in self.blocks), np.zeros(LANES)
        )

    @cached_property
    def fullest(self) -> float:
        """Bytes of the piece that has most."""
        return max(float(b.bytes.max()) for b in self.blocks)

    @cached_property
    def bytes(self) -> float:
        """Of all pieces."""
        return sum(float(b.bytes.sum()) for b in self.blocks)


def way_of(chosen: Sequence[Option]) -> Way:
    """Of one table, or of several side by side: those lie on the same ranks, so their pieces are
    one piece.
    """
    kinds = frozenset[Kind]().union(*(o.work.kinds for o in chosen)) | {
        AGREEMENT for o in chosen if o.work.agreeing
    }
    if len(chosen) == 1:
        (o,) = chosen
        blocks = tuple(_once(b) for b in o.blocks)
        return Way(o.kind, o.home, o.owned, o.largest, kinds, blocks)
    blocks = tuple(
        Block(
            same[0].rows,
            same[0].cols,
            np.sum([b.lanes for b in same], 0),
            np.sum([b.bytes for b in same], 0),
            same[0].places,
        )
        for same in zip(*(o.blocks for o in chosen), strict=True)
    )
    return Way(
        chosen[0].kind,
        np.sum([o.home for o in chosen], 0),
        np.sum([o.owned for o in chosen], 0),
        np.max([b.lanes.max(0) for b in blocks], 0),
        kinds,
        blocks,
    )


def _once(block: Block) -> Block:
    """A plan made by hand may have several pieces of a table on a rank: together they are one."""
    if len(block.places) > 1 or len(set(block.places[0].tolist())) == block.places.shape[1]:
        return block
    ranks, piece_m = np.unique(block.places[0], return_inverse=True)
    lanes = np.zeros((len(ranks), LANES))
    held = np.zeros(len(ranks))
    np.add.at(lanes, piece_m, block.lanes)
    np.add.at(held, piece_m, block.bytes)
    return Block(block.rows[:0], block.cols[:0], lanes, held, ranks[None])


class Catalogue:
    """The ways of all units.

    Args:
        units: what is placed.
        fixed: what is paid beside their work.
    """

    def __init__(self, units: Sequence[Unit], fixed: Fixed) -> None:
        self.units = units
        self.fixed = fixed
        self.base = base_lanes(fixed)
        self.ways = [[way_of(chosen) for chosen in u.options] for u in units]
        self.all = [way for of_unit in self.ways for way in of_unit]
        counts = np.array([len(of_unit) for of_unit in self.ways])
        self.first_U: Ints = np.cumsum(counts) - counts
        self.unit_N: Ints = np.repeat(np.arange(len(units)), counts)
        self.home_NL, self.owned_NL, self.largest_NL = (
            np.array([getattr(way, part) for way in self.all])
            for part in ("home", "owned", "largest")
        )
        self.kinds: list[Kind] = sorted({kind for way in self.all for kind in way.kinds})
        number = {kind: k for k, kind in enumerate(self.kinds)}
        self.uses_NK: npt.NDArray[np.bool_] = np.zeros((len(self.all), len(self.kinds)), bool)
        for n, way in enumerate(self.all):
            self.uses_NK[n, [number[kind] for kind in way.kinds]] = True

    def fee(self, kind: Kind) -> float:
        """Seconds that the first table with a kind adds to a step."""
        return self.fixed.agreement_seconds if kind == AGREEMENT else self.fixed.kind_seconds

    def combinations(self) -> int:
        """How many assignments there are."""
        return prod(
            sum(prod(len(b.places) for b in way.blocks) for way in of_unit) for of_unit in self.ways
        )

    def choices(self, unit: int) -> Iterator[Choice]:
        """All of a unit."""
        for o, way in enumerate(self.ways[unit]):
            for places in np.ndindex(*(len(b.places) for b in way.blocks)):
                yield Choice(o, tuple(int(a) for a in places))
