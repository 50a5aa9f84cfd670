"""Which cases of a test run: covers of grids, and in the default tier some that differ."""

from collections import defaultdict
from heapq import heappop, heappush
from itertools import combinations, count, product
from operator import itemgetter

import pytest


def one_of(number, cases):
    """Mark all cases but every `number`-th, from the first on, for the full tier.

    Args:
        number: One of so many stays in the default tier.
        cases: Tuples of arguments, or single ones (a tuple that is one argument: in a tuple).
    """
    return [
        pytest.param(*_tuple(case), marks=[pytest.mark.full] if index % number else [])
        for index, case in enumerate(cases)
    ]


def _tuple(case):
    return case if isinstance(case, tuple) else (case,)


def cover(strength, axes):
    """Choose rows of a grid in which any values of `strength` axes meet at least once.

    Every row is the one that adds most, the first of several, so that the choice is always the
    same. A mistake that shows with `strength` values together is met by one of the rows, which are
    few: 8 axes have 1,536 combinations, and 32 rows of strength 2.

    Args:
        strength: The number of axes whose values meet: 2 for pairs.
        axes: The values of each axis.
    """
    bits = (1 << number for number in count())
    meetings = [
        (itemgetter(*places), defaultdict(lambda: next(bits)))
        for places in combinations(range(len(axes)), strength)
    ]
    met = 0
    waiting = []  # rows by what they add at most, the first of several first
    for number, row in enumerate(product(*(range(len(axis)) for axis in axes))):
        added = sum(bit_of[values(row)] for values, bit_of in meetings)
        waiting.append((-len(meetings), number, row, added))
    rows = []
    while waiting:
        most, number, row, added = heappop(waiting)
        adds = (added & ~met).bit_count()
        if adds == -most:
            met |= added
            rows.append(tuple(axis[place] for axis, place in zip(axes, row, strict=True)))
        elif adds:
            heappush(waiting, (-adds, number, row, added))
    return rows
