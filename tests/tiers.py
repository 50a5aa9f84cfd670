"""Which cases of a test run in the default tier: some that differ. The others are full."""

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
