"""Which cases of a test run: covers of grids, and in the default tier some that differ."""

from itertools import combinations, product

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
    columns = list(combinations(range(len(axes)), strength))
    bits: dict[tuple, int] = {}  # of each meeting of values
    left = {}
    for row in product(*(range(len(axis)) for axis in axes)):
        meetings = [(places, *(row[place] for place in places)) for places in columns]
        left[row] = sum(bits.setdefault(meeting, 1 << len(bits)) for meeting in meetings)
    rows = []
    while left:
        best = max(left, key=lambda row: left[row].bit_count())
        met = left.pop(best)
        rows.append(tuple(axis[place] for axis, place in zip(axes, best, strict=True)))
        left = {row: more for row, values in left.items() if (more := values & ~met)}
    return rows
