"""The search space, and a lower bound of all plans in it: bundles of tables, and the costs of their
options, computed once.

TableBundle  tables that share their ranks, usually one; with options
OptionCost   an option of a bundle in numbers: seconds of every rank, seconds of the owners, the
             kinds of kernel calls that it needs, blocks whose ranks are chosen
SearchSpace  the costs of the options of all bundles, one by one and as arrays [N, COMPONENTS]
             over all of them
Placement    an option, and candidate ranks for each of its blocks

Compute a lower bound of a step's time over all plans, with the prices of the cost model. The
bound limits the speed-up of any plan over a given plan.

The time of a step is the sum over components of the slowest rank's time, plus a fee for each kind
of kernel calls. For every plan these hold:

    in a component the slowest rank takes at least the mean over any set of ranks, at least the
        largest piece, and so at least any weighted mean of the two
    a message takes at least any weighted mean of its two links' times, latencies among them
    every table takes one of its options; the largest piece is at least the piece of each table;
        each kind of calls that a table needs is paid once

For fixed weights the bound is a sum over tables, plus the largest piece and the fees: each table
takes its cheapest option among those with no larger piece. Branch and bound decides which kinds to
pay for and how large a piece may be. (This is an uncapacitated facility location problem with kinds
as facilities; Erlenkotter, 1978, is the classic.) Every set of weights gives a bound, and the
largest bound counts.

The bound ignores three facts: pieces of several tables do not add up to equal loads, memory is
limited, and a host that answers its own requests sends less. The bound is never above the best plan
(`tests/planner/test_bounds.py` tries all plans), and equals it only by chance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from recapp.planner.cost import MESSAGES, Fixed, Floats
from recapp.planner.options import COMPONENTS, KERNEL_PHASES, Option, PricedBlock
from recapp.sharding.sharding_types import Ints

# A width, mode and rule, which together need their own kernel calls; or `ROW_STATISTICS`.
Kind = tuple[int, str, int]
# the kind of the message of row statistics, paid once if a table needs it
ROW_STATISTICS: Kind = (0, "row statistics", 0)
LINK_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # weights of the host's link; the rest: the network's
PIECE_WEIGHTS = (0.25, 0.5, 1.0)  # weights of the largest piece; the mean of ranks has the rest
REGIONS = 4  # sets of ranks beside the set of all: those to which most tables are bound
NODES = 80  # the most nodes that one branch and bound opens
SMALLEST_DIFFERENCE = 1e-4  # relative; pieces that differ by less count as equal
_K = len(KERNEL_PHASES)
_M = len(MESSAGES)
NO_PIECE = np.zeros(_K + _M)  # weights of the largest piece, where only the mean counts
Bools = npt.NDArray[np.bool_]


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


# A placement for each bundle.
Assignment = tuple[Placement, ...]


def step_seconds(components: Floats) -> Floats:
    """Return the seconds of a step from the slowest rank's seconds of each component, [...,
    COMPONENTS]: kernels add up, and a message takes the time of the slower of its two links.
    """
    seconds: Floats = components[..., :_K].sum(-1) + np.maximum(
        components[..., _K : _K + _M], components[..., _K + _M :]
    ).sum(-1)
    return seconds


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


def option_cost(options: Sequence[Option]) -> OptionCost:
    """Add up the costs of an option of each table of a bundle. The tables lie on the same ranks, so
    a rank's parts of all tables are one piece.
    """
    kinds = frozenset[Kind]().union(*(o.work.kinds for o in options)) | {
        ROW_STATISTICS for o in options if o.work.statistics_rows
    }
    if len(options) == 1:
        (o,) = options
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
        for same in zip(*(o.blocks for o in options), strict=True)
    )
    return OptionCost(
        options[0].sharding_type,
        np.sum([o.home for o in options], 0),
        np.sum([o.owned for o in options], 0),
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
    bytes_m = np.zeros(len(ranks))
    np.add.at(components, piece_m, block.seconds)
    np.add.at(bytes_m, piece_m, block.bytes)
    return PricedBlock(block.rows[:0], block.cols[:0], components, bytes_m, ranks[None])


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
        self.base = np.concatenate([np.zeros(_K), *fixed.latency_23])
        self.costs = [[option_cost(options) for options in u.options] for u in bundles]
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


@dataclass(frozen=True)
class Bound:
    """A lower bound of the seconds of a step.

    Args:
        seconds: The bound: no plan is faster.
        cost_N: Cost of each option in the relaxed problem, without fees; infinite for an option
            that is not allowed.
    """

    seconds: float
    cost_N: Floats


def lower_bound(
    space: SearchSpace, world: int, allowed_N: Bools | None = None, *, pieces: bool = True
) -> list[Bound]:
    """Return lower bounds for all plans of some bundles, highest first, one for each relaxed
    problem.

    Args:
        space: The costs of the options of all bundles.
        world: The number of ranks.
        allowed_N: The allowed options, at least one of each bundle; None allows all.
        pieces: Whether to use the largest piece as well; without it, the computation is faster and
            the bound lower.
    """
    free_N = (
        np.zeros(len(space.all_costs)) if allowed_N is None else np.where(allowed_N, 0.0, np.inf)
    )
    bounds = []
    for mean_NC in _means(space, world):
        near = max(
            LINK_WEIGHTS, key=lambda near: _Relaxed(space, mean_NC, free_N, near).without_fees()
        )
        bounds += [
            _Relaxed(space, mean_NC, free_N, near, of_piece).solved()
            for of_piece in (_shares() if pieces else [NO_PIECE])
        ]
    return sorted(bounds, key=lambda b: -b.seconds)


def _shares() -> Iterator[Floats]:
    """Yield weights of the largest piece, by kernel and message: none, one kernel or message, all
    kernels, all messages, all.
    """
    yield NO_PIECE
    for weight in PIECE_WEIGHTS:
        for components in (range(_K), range(_K, _K + _M), range(_K + _M)):
            yield np.where(np.isin(np.arange(_K + _M), components), weight, 0.0)
    yield from np.eye(_K + _M)


def _means(c: SearchSpace, world: int) -> Iterator[Floats]:
    """Yield the least that each option adds to the mean over a set of ranks, [N, COMPONENTS]: over
    all ranks, and over the sets to which bundles are bound.
    """
    yield c.owned_NC / world
    bound: dict[tuple[int, ...], int] = {}
    for of_bundle in c.costs:
        if all(len(cost.ranks) < world for cost in of_bundle):
            ranks = tuple(sorted(frozenset[int]().union(*(cost.ranks for cost in of_bundle))))
            if len(ranks) < world:
                bound[ranks] = bound.get(ranks, 0) + 1
    for ranks in sorted(bound, key=lambda r: (-bound[r], r))[:REGIONS]:
        yield np.array([cost.least_on(ranks) for cost in c.all_costs]) / len(ranks)


class _Relaxed:
    """The problem with weights fixed: a cost and a piece of each option, and fees.

    Args:
        space: The costs of the options of all bundles.
        mean_NC: The addition of each option to the mean over some ranks.
        free_N: Infinite for options that are not allowed, else 0.
        near: The weight of the host's link.
        of_piece: The weights of the largest piece, by kernel and message.
    """

    def __init__(
        self,
        space: SearchSpace,
        mean_NC: Floats,
        free_N: Floats,
        near: float,
        of_piece: Floats = NO_PIECE,
    ) -> None:
        self.c = c = space
        weight = np.array([1.0] * _K + [near] * _M + [1 - near] * _M)
        share = weight * np.concatenate([of_piece, of_piece[_K:]])
        self.constant = c.fixed.seconds + float(c.base @ weight)
        self.cost_N = c.home_NC @ weight + mean_NC @ (weight - share) + free_N
        self.piece_N = c.largest_NC @ share
        self.fee_K = np.array([c.fee(kind) for kind in c.kinds])

    def without_fees(self) -> float:
        """Return the sum over bundles, without fees."""
        return self.constant + float(np.minimum.reduceat(self.cost_N, self.c.first_B).sum())

    def solved(self) -> Bound:
        """Solve the problem by branch and bound; after `NODES` nodes, return the bound reached so
        far.

        A node has paid for some kinds, excludes others, and has a largest piece within an interval,
        whose lower end is paid. Bundles take their cheapest remaining option. A node branches at
        the unpaid kind that most bundles need, then at the largest piece. The next node is always
        the open node with the least cost, so that this cost is a bound at any time.
        """
        queue = [
            _Node(
                self, np.zeros(len(self.fee_K), bool), np.zeros(len(self.fee_K), bool), 0.0, np.inf
            )
        ]
        for _ in range(NODES):
            node = queue[0]
            children = node.children()
            if not children:
                break
            heappop(queue)
            for child in children:
                heappush(queue, child)
        return Bound(self.constant + queue[0].seconds, queue[0].cost_N)


class _Node:
    """A node of the branch and bound of `_Relaxed.solved`."""

    def __init__(
        self, relaxed: _Relaxed, paid_K: Bools, without_K: Bools, least: float, most: float
    ) -> None:
        self.relaxed = relaxed
        self.paid_K = paid_K
        self.without_K = without_K
        self.least = least
        self.most = most
        c = relaxed.c
        barred_N = relaxed.piece_N > most
        if without_K.any():
            barred_N = barred_N | c.uses_NK[:, without_K].any(1)
        self.cost_N = np.where(barred_N, np.inf, relaxed.cost_N)
        self.least_B = np.minimum.reduceat(self.cost_N, c.first_B)
        self.seconds = float(self.least_B.sum() + relaxed.fee_K[paid_K].sum() + least)

    def __lt__(self, other: "_Node") -> bool:
        return self.seconds < other.seconds

    def children(self) -> "list[_Node]":
        """Return the two halves of the node; none if its choice costs as much as its bound."""
        r = self.relaxed
        c = self.relaxed.c
        cheapest_N = self.cost_N <= self.least_B[c.bundle_N]
        unpaid_NK = c.uses_NK & ~self.paid_K
        settled_B = np.logical_or.reduceat(cheapest_N & ~unpaid_NK.any(1), c.first_B)
        demand_K = unpaid_NK[cheapest_N & ~settled_B[c.bundle_N]].sum(0)
        if demand_K.any():
            one = np.arange(len(demand_K)) == demand_K.argmax()
            return self._feasible(
                [
                    (self.paid_K | one, self.without_K, self.least, self.most),
                    (self.paid_K, self.without_K | one, self.least, self.most),
                ]
            )
        threshold = float(
            np.minimum.reduceat(np.where(cheapest_N, r.piece_N, np.inf), c.first_B).max()
        )
        if threshold <= self.least * (1 + SMALLEST_DIFFERENCE):
            return []
        between = (max(self.least, threshold / 4) + threshold) / 2
        return self._feasible(
            [
                (self.paid_K, self.without_K, self.least, between),
                (self.paid_K, self.without_K, between, self.most),
            ]
        )

    def _feasible(self, node_arguments: "list[tuple[Bools, Bools, float, float]]") -> "list[_Node]":
        return [
            node
            for node in (_Node(self.relaxed, *a) for a in node_arguments)
            if np.isfinite(node.seconds)
        ]
