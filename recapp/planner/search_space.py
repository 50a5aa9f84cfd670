"""The search space: bundles of tables, and the costs of their options, computed once.

TableBundle  tables that share their ranks, usually one; with options
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
"""A width, mode and rule, which together need their own kernel calls; or `ROW_STATISTICS`."""
# the kind of the message of row statistics, paid once if a table needs it
ROW_STATISTICS: Kind = (0, "row statistics", 0)
_K = len(KERNEL_PHASES)
_M = (COMPONENTS - len(KERNEL_PHASES)) // 2


@dataclass(frozen=True)
class TableBundle:
    """Tables whose ranks are chosen together; usually one table.

    Args:
        tables: The names of the tables.
        options: For each option of the bundle, an option of each table; their blocks have the same
            candidate ranks.
        apart: Labels; bundles with a common label share no rank.
    """

    tables: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    apart: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Placement:
    """An option of a bundle, with a set of candidate ranks for each of its blocks.

    Args:
        option: The index of the option in the bundle.
        candidates: The index of each block's ranks in `PricedBlock.candidates`.
    """

    option: int
    candidates: tuple[int, ...]


Assignment = tuple[Placement, ...]
"""A placement for each bundle."""


def step_seconds(components: Floats) -> Floats:
    """Return the seconds of a step from the slowest rank's seconds of each component, [...,
    COMPONENTS]: kernels add up, and a message takes the time of the slower of its two links.
    """
    found: Floats = components[..., :_K].sum(-1) + np.maximum(
        components[..., _K : _K + _M], components[..., _K + _M :]
    ).sum(-1)
    return found


@dataclass(frozen=True)
class OptionCost:
    """The cost of an option of a bundle: the sum over the options of its tables. A piece is a
    rank's part of a block.

    Args:
        sharding_type: The name of the type.
        home: Seconds of every rank, [COMPONENTS].
        owned: Seconds of all owners together, [COMPONENTS].
        largest: Seconds of the slowest piece, [COMPONENTS].
        kinds: The kinds of kernel calls of the option.
        blocks: The blocks to choose ranks for; no set of candidate ranks has a rank twice.
    """

    sharding_type: str
    home: Floats
    owned: Floats
    largest: Floats
    kinds: frozenset[Kind]
    blocks: tuple[PricedBlock, ...]

    @cached_property
    def ranks(self) -> frozenset[int]:
        """Return all candidate ranks of the blocks."""
        return frozenset(int(r) for b in self.blocks for r in np.unique(b.candidates))

    def least_on(self, ranks: Sequence[int]) -> Floats:
        """Return the least seconds that the option adds on some ranks together, under any choice of
        candidate ranks, [COMPONENTS].
        """
        return sum(
            ((np.isin(b.candidates, ranks) @ b.seconds).min(0) for b in self.blocks),
            np.zeros(COMPONENTS),
        )

    @cached_property
    def fullest(self) -> float:
        """Return the bytes of the largest piece."""
        return max(float(b.bytes.max()) for b in self.blocks)

    @cached_property
    def bytes(self) -> float:
        """Return the bytes of all pieces."""
        return sum(float(b.bytes.sum()) for b in self.blocks)


def option_cost(chosen: Sequence[Option]) -> OptionCost:
    """Add up the costs of an option of each table of a bundle. The tables lie on the same ranks, so
    a rank's parts of all tables are one piece.
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
    """Join the rectangles of each rank into one piece: a plan made by hand may have several on a
    rank.
    """
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
    """The costs of the options of all bundles, N in total.

    Args:
        bundles: The bundles to choose ranks for.
        fixed: The fixed costs of a step.

    Attributes:
        costs: The costs, by bundle and option.
        all_costs: The costs of all bundles, one bundle after the other, N.
        first_B: The index of the first option of each bundle.
        bundle_N: The bundle of each option.
        home_NC: `OptionCost.home` of each option.
        owned_NC: `OptionCost.owned` of each option.
        largest_NC: `OptionCost.largest` of each option.
        kinds: All kinds of kernel calls of the options, K.
        uses_NK: Whether an option needs a kind.
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
        """Return the seconds that the first table with a kind adds to a step."""
        return self.fixed.statistics_seconds if kind == ROW_STATISTICS else self.fixed.kind_seconds

    def combinations(self) -> int:
        """Return the number of assignments."""
        return prod(
            sum(prod(len(b.candidates) for b in cost.blocks) for cost in of_bundle)
            for of_bundle in self.costs
        )

    def placements(self, bundle: int) -> Iterator[Placement]:
        """Yield all placements of a bundle."""
        for option, cost in enumerate(self.costs[bundle]):
            for chosen in np.ndindex(*(len(b.candidates) for b in cost.blocks)):
                yield Placement(option, tuple(int(a) for a in chosen))
