"""What the search chooses among: units of tables, and all that it asks of their options, worked out
once.

    Unit        tables that share their ranks, mostly one; its options
    OptionCost  an option of a unit in numbers: seconds of every rank, seconds of the owners, the
                kinds of kernel calls that it needs, blocks whose ranks are chosen
    Catalogue   the costs of the options of all units, one by one and as arrays [N, LANES] over all
                of them
    Choice      an option, and candidate ranks for each of its blocks
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from recapp.planner.cost import Fixed, Floats
from recapp.planner.options import KERNEL_PHASES, LANES, Option, PricedBlock, base_lanes
from recapp.sharding.sharding_types import Ints

Kind = tuple[int, str]
"""A width and mode, each of which has calls of its own; or `AGREEMENT`."""
# the message in which strips of rows agree on a statistic: there is one if any table needs it
AGREEMENT: Kind = (0, "agreement")
_K = len(KERNEL_PHASES)
_M = (LANES - len(KERNEL_PHASES)) // 2


@dataclass(frozen=True)
class Unit:
    """Tables whose ranks are chosen together, mostly one.

    Args:
        tables: Their names.
        options: For each option of the unit an option of each table; their blocks have the same
            candidate ranks.
        apart: Labels; units that have one in common share no rank.
    """

    tables: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    apart: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Choice:
    """An option of a unit, and for each of its blocks one of the block's sets of candidate ranks.

    Args:
        option: Its index in the unit.
        candidates: For each block the index of its ranks in `PricedBlock.candidates`.
    """

    option: int
    candidates: tuple[int, ...]


Assignment = tuple[Choice, ...]
"""A choice for each unit."""


def step_seconds(lanes: Floats) -> Floats:
    """Return the seconds of a step from what the slowest rank of each lane takes, [..., LANES]:
    kernels add up, a message takes the slower of its two links.
    """
    found: Floats = lanes[..., :_K].sum(-1) + np.maximum(
        lanes[..., _K : _K + _M], lanes[..., _K + _M :]
    ).sum(-1)
    return found


@dataclass(frozen=True)
class OptionCost:
    """What an option of a unit costs: the options of its tables added up. A piece is what a rank
    holds of a block.

    Args:
        sharding_type: The name of the type.
        home: Seconds of every rank, [LANES].
        owned: Seconds of all owners together, [LANES].
        largest: Seconds of the piece that takes longest, [LANES].
        kinds: The kinds of kernel calls that it needs.
        blocks: What ranks are chosen for; no set of candidate ranks has a rank twice.
    """

    sharding_type: str
    home: Floats
    owned: Floats
    largest: Floats
    kinds: frozenset[Kind]
    blocks: tuple[PricedBlock, ...]

    @cached_property
    def ranks(self) -> frozenset[int]:
        """The ranks on which any of it may lie."""
        return frozenset(int(r) for b in self.blocks for r in np.unique(b.candidates))

    def least_on(self, ranks: Sequence[int]) -> Floats:
        """Return what these ranks together take of it at least, whichever candidate ranks are
        chosen, [LANES].
        """
        return sum(
            ((np.isin(b.candidates, ranks) @ b.lanes).min(0) for b in self.blocks), np.zeros(LANES)
        )

    @cached_property
    def fullest(self) -> float:
        """Bytes of the piece that has most."""
        return max(float(b.bytes.max()) for b in self.blocks)

    @cached_property
    def bytes(self) -> float:
        """Bytes of all pieces."""
        return sum(float(b.bytes.sum()) for b in self.blocks)


def option_cost(chosen: Sequence[Option]) -> OptionCost:
    """Return the cost of an option of each table of a unit; several tables lie on the same ranks,
    so what a rank holds of them is one piece.
    """
    kinds = frozenset[Kind]().union(*(o.work.kinds for o in chosen)) | {
        AGREEMENT for o in chosen if o.work.agreeing
    }
    if len(chosen) == 1:
        (o,) = chosen
        blocks = tuple(_once(b) for b in o.blocks)
        return OptionCost(o.sharding_type, o.home, o.owned, o.largest, kinds, blocks)
    blocks = tuple(
        PricedBlock(
            same[0].rows,
            same[0].cols,
            np.sum([b.lanes for b in same], 0),
            np.sum([b.bytes for b in same], 0),
            same[0].candidates,
        )
        for same in zip(*(o.blocks for o in chosen), strict=True)
    )
    return OptionCost(
        chosen[0].sharding_type,
        np.sum([o.home for o in chosen], 0),
        np.sum([o.owned for o in chosen], 0),
        np.max([b.lanes.max(0) for b in blocks], 0),
        kinds,
        blocks,
    )


def _once(block: PricedBlock) -> PricedBlock:
    """Make one piece of the rectangles of a rank: a plan made by hand may have several there."""
    ranks_Am = block.candidates
    if len(ranks_Am) > 1 or len(set(ranks_Am[0].tolist())) == ranks_Am.shape[1]:
        return block
    ranks, piece_m = np.unique(ranks_Am[0], return_inverse=True)
    lanes = np.zeros((len(ranks), LANES))
    held = np.zeros(len(ranks))
    np.add.at(lanes, piece_m, block.lanes)
    np.add.at(held, piece_m, block.bytes)
    return PricedBlock(block.rows[:0], block.cols[:0], lanes, held, ranks[None])


class Catalogue:
    """What the options of all units cost, N of them.

    Args:
        units: What ranks are chosen for.
        fixed: What a step takes beside their work.

    Attributes:
        costs: By unit and option.
        all_costs: Those of all units one after the other, N.
        first_U: Where those of each unit begin.
        unit_N: The unit of each.
        home_NL: `OptionCost.home` of each; likewise `owned_NL` and `largest_NL`.
        kinds: The kinds of kernel calls that any of them needs, K.
        uses_NK: Which of them each needs.
    """

    def __init__(self, units: Sequence[Unit], fixed: Fixed) -> None:
        self.units = units
        self.fixed = fixed
        self.base = base_lanes(fixed)
        self.costs = [[option_cost(chosen) for chosen in u.options] for u in units]
        self.all_costs = [cost for of_unit in self.costs for cost in of_unit]
        counts = np.array([len(of_unit) for of_unit in self.costs])
        self.first_U: Ints = np.cumsum(counts) - counts
        self.unit_N: Ints = np.repeat(np.arange(len(units)), counts)
        self.home_NL, self.owned_NL, self.largest_NL = (
            np.array([getattr(cost, part) for cost in self.all_costs])
            for part in ("home", "owned", "largest")
        )
        self.kinds: list[Kind] = sorted({kind for cost in self.all_costs for kind in cost.kinds})
        number = {kind: k for k, kind in enumerate(self.kinds)}
        self.uses_NK: npt.NDArray[np.bool_] = np.zeros((len(self.all_costs), len(self.kinds)), bool)
        for n, cost in enumerate(self.all_costs):
            self.uses_NK[n, [number[kind] for kind in cost.kinds]] = True

    def fee(self, kind: Kind) -> float:
        """Return the seconds that the first table with a kind of calls adds to a step."""
        return self.fixed.agreement_seconds if kind == AGREEMENT else self.fixed.kind_seconds

    def combinations(self) -> int:
        """Count the assignments that there are."""
        return prod(
            sum(prod(len(b.candidates) for b in cost.blocks) for cost in of_unit)
            for of_unit in self.costs
        )

    def choices(self, unit: int) -> Iterator[Choice]:
        """List all choices of a unit."""
        for option, cost in enumerate(self.costs[unit]):
            for chosen in np.ndindex(*(len(b.candidates) for b in cost.blocks)):
                yield Choice(option, tuple(int(a) for a in chosen))
