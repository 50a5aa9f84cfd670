"""A lower bound of a step's time over all plans, by the cost model's own prices: it limits how much
faster than a given plan another one could be.

A step is the sum over components of what the slowest rank takes, and of a fee for every kind of
calls. Of any plan it is certain that

    in a component the slowest rank takes at least the mean of any set of ranks, at least the
        largest piece, and so at least any mean of the two
    a message takes at least any weighted mean of its two links' times, latencies among them
    every table takes one of its options; the largest piece is at least that of each; every kind of
        calls that one of them needs is paid once

With the weights fixed a sum over tables is left, beside the largest piece and the fees: each table
takes its cheapest option among those whose pieces are no larger. Which kinds to pay for and how
large a piece may be is decided by branch and bound (kinds are the facilities of an uncapacitated
facility location; Erlenkotter, 1978, is the classic). Every set of weights gives a bound, so the
largest counts.

What it leaves out: that pieces of several tables do not fit together into equal loads, that memory
is limited, that a host which answers itself sends less. It is never above the best plan
(`tests/planner/test_bounds.py` tries them all), and equal only by luck.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from recapp.planner.cost import MESSAGES, Floats
from recapp.planner.options import KERNEL_PHASES
from recapp.planner.search_space import SearchSpace

LINK_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the host's link beside the network's
PIECE_WEIGHTS = (0.25, 0.5, 1.0)  # of the largest piece beside the mean of ranks
REGIONS = 4  # sets of ranks that are looked at beside all ranks: those most tables are bound to
NODES = 80  # that one branch and bound opens at most
SMALLEST_DIFFERENCE = 1e-4  # of a largest piece: one that is smaller by less counts as equal
_K = len(KERNEL_PHASES)
_M = len(MESSAGES)
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Bound:
    """A lower bound of the seconds of a step.

    Args:
        seconds: No plan is faster.
        cost_N: Cost of each option in the relaxed problem, without fees; infinite where it is
            barred.
    """

    seconds: float
    cost_N: Floats


def lower_bound(
    space: SearchSpace, world: int, allowed_N: Bools | None = None, *, pieces: bool = True
) -> list[Bound]:
    """Return lower bounds of all plans of these bundles, the highest first, each from another
    relaxed problem.

    Args:
        space: What the options of all bundles cost.
        world: Ranks.
        allowed_N: Options that may be taken, at least one of each bundle; None allows all.
        pieces: Whether the largest piece is looked at as well; without, it is faster and lower.
    """
    free_N = (
        np.zeros(len(space.all_costs)) if allowed_N is None else np.where(allowed_N, 0.0, np.inf)
    )
    found = []
    for mean_NC in _means(space, world):
        near = max(
            LINK_WEIGHTS, key=lambda near: _Relaxed(space, mean_NC, free_N, near).without_fees()
        )
        found += [
            _Relaxed(space, mean_NC, free_N, near, of_piece).solved()
            for of_piece in (_shares() if pieces else [_nothing()])
        ]
    return sorted(found, key=lambda b: -b.seconds)


def _nothing() -> Floats:
    return np.zeros(_K + _M)


def _shares() -> Iterator[Floats]:
    """List weights of the largest piece by kernel and message: none, one of them, kernels,
    messages, all.
    """
    yield _nothing()
    for weight in PIECE_WEIGHTS:
        for components in (range(_K), range(_K, _K + _M), range(_K + _M)):
            yield np.where(np.isin(np.arange(_K + _M), components), weight, 0.0)
    yield from np.eye(_K + _M)


def _means(c: SearchSpace, world: int) -> Iterator[Floats]:
    """List what every option surely adds to the mean of a set of ranks, [N, COMPONENTS]: of all
    ranks, and of those that bundles are bound to.
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
        space: What the options of all bundles cost.
        mean_NC: What each adds to the mean of some ranks.
        free_N: Infinite for options that may not be taken.
        near: Weight of the host's link.
        of_piece: Weights of the largest piece, of kernels and messages.
    """

    def __init__(
        self,
        space: SearchSpace,
        mean_NC: Floats,
        free_N: Floats,
        near: float,
        of_piece: Floats | None = None,
    ) -> None:
        self.c = c = space
        weight = np.array([1.0] * _K + [near] * _M + [1 - near] * _M)
        piece = np.zeros(_K + _M) if of_piece is None else of_piece
        share = weight * np.concatenate([piece, piece[_K:]])
        self.constant = c.fixed.seconds + float(c.base @ weight)
        self.cost_N = c.home_NC @ weight + mean_NC @ (weight - share) + free_N
        self.piece_N = c.largest_NC @ share
        self.fee_K = np.array([c.fee(kind) for kind in c.kinds])

    def without_fees(self) -> float:
        """Return the sum over bundles, without fees."""
        return self.constant + float(np.minimum.reduceat(self.cost_N, self.c.first_B).sum())

    def solved(self) -> Bound:
        """Solve by branch and bound, or return what is certain when that is given up.

        A node has paid for some kinds, does without others, and has a largest piece within an
        interval, the lower end of which is paid; bundles take the cheapest option that is left. It
        branches at the kind that most bundles need unpaid, then at the largest piece. The open node
        that costs least is always the next, so its cost is a bound at any time.
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
        """Return the two halves of what it stands for; none where what it chooses costs what its
        bound says.
        """
        r = self.relaxed
        c = self.relaxed.c
        cheapest_N = self.cost_N <= self.least_B[c.bundle_N]
        unpaid_NK = c.uses_NK & ~self.paid_K
        settled_B = np.logical_or.reduceat(cheapest_N & ~unpaid_NK.any(1), c.first_B)
        wanted_K = unpaid_NK[cheapest_N & ~settled_B[c.bundle_N]].sum(0)
        if wanted_K.any():
            one = np.arange(len(wanted_K)) == wanted_K.argmax()
            return self._feasible(
                [
                    (self.paid_K | one, self.without_K, self.least, self.most),
                    (self.paid_K, self.without_K | one, self.least, self.most),
                ]
            )
        needed = float(
            np.minimum.reduceat(np.where(cheapest_N, r.piece_N, np.inf), c.first_B).max()
        )
        if needed <= self.least * (1 + SMALLEST_DIFFERENCE):
            return []
        between = (max(self.least, needed / 4) + needed) / 2
        return self._feasible(
            [
                (self.paid_K, self.without_K, self.least, between),
                (self.paid_K, self.without_K, between, self.most),
            ]
        )

    def _feasible(self, asked: "list[tuple[Bools, Bools, float, float]]") -> "list[_Node]":
        return [
            node for node in (_Node(self.relaxed, *a) for a in asked) if np.isfinite(node.seconds)
        ]
