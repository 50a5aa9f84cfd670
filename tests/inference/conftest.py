"""What several files of tests share."""

import pytest


@pytest.fixture(scope="session")
def program(stored):
    """The C++ program."""
    return stored.program()
