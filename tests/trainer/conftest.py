"""The logs on which the tests of training run."""

import pytest
from runs import make_logs


def make_set(folder):
    """Write the tiny set of `make_logs` into a directory of the store."""
    make_logs(folder / "set")


@pytest.fixture(scope="session")
def logs(stored):
    """The tiny set, which no test changes."""
    return stored.made(make_set) / "set"
