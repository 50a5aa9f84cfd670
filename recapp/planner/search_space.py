"""The search space: bundles of tables, and all that the search asks of their options, worked out
once.

    TableBundle  tables that share their ranks, mostly one; its options
    OptionCost   an option of a bundle in numbers: seconds of every rank, seconds of the owners, the
                 kinds of kernel calls that it needs, blocks whose ranks are chosen
    SearchSpace  the costs of the options of all bundles, one by one and as arrays [N, COMPONENTS]
                 over all of them
    Placement    an option, and candidate ranks for each of its blocks
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from recapp.planner.cost import Fixed, Floats
from recapp.planner.options import COMPONENTS, KERNEL_PHASES, Option, PricedBlock, base_components
from recapp.sharding.sharding_types import Ints

Kind = tuple[int, str, int]
"""A width, mode and rule, each of which has calls of its own; or `ROW_STATISTICS`."""
# the message of row statistics: there is one if any table needs it
ROW_STATISTICS: Kind = (0, "row statistics", 0)
_K = len(KERNEL_PHASES)
_M = (COMPONENTS - len(KERNEL_PHASES)) // 2


@dataclass(frozen=True)
class TableBundle:
    """Tables whose ranks are chosen together, mostly one.

    Args:
        tables: Their names.
        options: For each option of the bundle an option of each table; their blocks have the same
            candidate ranks.
        apart: Labels; bundles that have one in common share no rank.
    """

    tables: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    apart: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Placement:
    """An option of a bundle, and for each of its blocks one of the block's sets of candidate ranks.

    Args:
        option: Its index in the bundle.
        candidates: For each block the index of its ranks in `PricedBlock.candidates`.
    """

    option: int
    candidates: tuple[int, ...]


Assignment = tuple[Placement, ...]
"""A placement for each bundle."""


def step_seconds(components: Floats) -> Floats:
    """Return the seconds of a step from what the slowest rank of each component takes, [...,
    COMPONENTS]: kernels add up, a message takes the slower of its two links.
    """
    found: Floats = components[..., :_K].sum(-1) + np.maximum(
        components[..., _K : _K + _M], components[..., _K + _M :]
    ).sum(-1)
    return found


@dataclass(frozen=True)
class OptionCost:
    """What an option of a bundle costs: the options of its tables added up. A piece is what a rank
    holds of a block.

    Args:
        sharding_type: The name of the type.
        home: Seconds of every rank, [COMPONENTS].
        owned: Seconds of all owners together, [COMPONENTS].
        largest: Seconds of the piece that takes longest, [COMPONENTS].
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
        """Return the ranks on which any of it may lie."""
        return frozenset(int(r) for b in self.blocks for r in np.unique(b.candidates))

    def least_on(self, ranks: Sequence[int]) -> Floats:
        """Return what these ranks together take of it at least, whichever candidate ranks are
        chosen, [COMPONENTS].
        """
        return sum(
            ((np.isin(b.candidates, ranks) @ b.seconds).min(0) for b in self.blocks),
            np.zeros(COMPONENTS),
        )

    @cached_property
    def fullest(self) -> float:
        """Return the bytes of the piece that has most."""
        return max(float(b.bytes.max()) for b in self.blocks)

    @cached_property
    def bytes(self) -> float:
        """Return the bytes of all pieces."""
        return sum(float(b.bytes.sum()) for b in self.blocks)


def option_cost(chosen: Sequence[Option]) -> OptionCost:
    """Return the cost of an option of each table of a bundle; several tables lie on the same ranks,
    so what a rank holds of them is one piece.
    """
    kinds = frozenset[Kind]().union(*(o.work.kinds for o in chosen)) | {
        ROW_STATISTICS for o in chosen if o.work.statistics_rows
    }
    if len(chosen) == 1:
        (o,) = chosen
        blocks = tuple(_once(b) for b in o.blocks)
        return OptionCost(o.sharding_type, o.home, o.owned, o.largest, kinds, blocks)
    blocks = tuple(
        PricedBlock(
            same[0].rows,
            same[0].cols,
            np.sum([b.seconds for b in same], 0),
            np.sum([b.bytes for b in same], 0),
            same[0].candidates,
        )
        for same in zip(*(o.blocks for o in chosen), strict=True)
    )
    return OptionCost(
        chosen[0].sharding_type,
        np.sum([o.home for o in chosen], 0),
        np.sum([o.owned for o in chosen], 0),
        np.max([b.seconds.max(0) for b in blocks], 0),
        kinds,
        blocks,
    )


def _once(block: PricedBlock) -> PricedBlock:
    """Make one piece of the rectangles of a rank: a plan made by hand may have several there."""
    ranks_Am = block.candidates
    if len(ranks_Am) > 1 or len(set(ranks_Am[0].tolist())) == ranks_Am.shape[1]:
        return block
    ranks, piece_m = np.unique(ranks_Am[0], return_inverse=True)
    components = np.zeros((len(ranks), COMPONENTS))
    held = np.zeros(len(ranks))
    np.add.at(components, piece_m, block.seconds)
    np.add.at(held, piece_m, block.bytes)
    return PricedBlock(block.rows[:0], block.cols[:0], components, held, ranks[None])


class SearchSpace:
    """What the options of all bundles cost, N of them.

    Args:
        bundles: What ranks are chosen for.
        fixed: What a step takes beside their work.

    Attributes:
        costs: By bundle and option.
        all_costs: Those of all bundles one after the other, N.
        first_B: Index of the first option of each bundle.
        bundle_N: The bundle of each option.
        home_NC: `OptionCost.home` of each.
        owned_NC: `OptionCost.owned` of each.
        largest_NC: `OptionCost.largest` of each.
        kinds: The kinds of kernel calls that any of them needs, K.
        uses_NK: Which of them each needs.
    """

    def __init__(self, bundles: Sequence[TableBundle], fixed: Fixed) -> None:
        self.bundles = bundles
        self.fixed = fixed
        self.base = base_components(fixed)
        self.costs = [[option_cost(chosen) for chosen in u.options] for u in bundles]
        self.all_costs = [cost for of_bundle in self.costs for cost in of_bundle]
        counts = np.array([len(of_bundle) for of_bundle in self.costs])
        self.first_B: Ints = np.cumsum(counts) - counts
        self.bundle_N: Ints = np.repeat(np.arange(len(bundles)), counts)
        self.home_NC, self.owned_NC, self.largest_NC = (
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
        return self.fixed.statistics_seconds if kind == ROW_STATISTICS else self.fixed.kind_seconds

    def combinations(self) -> int:
        """Count the assignments that there are."""
        return prod(
            sum(prod(len(b.candidates) for b in cost.blocks) for cost in of_bundle)
            for of_bundle in self.costs
        )

    def placements(self, bundle: int) -> Iterator[Placement]:
        """List all placements of a bundle."""
        for option, cost in enumerate(self.costs[bundle]):
            for chosen in np.ndindex(*(len(b.candidates) for b in cost.blocks)):
                yield Placement(option, tuple(int(a) for a in chosen))
