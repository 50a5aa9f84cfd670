"""What `auto` means in pytest's own process, as in its pool of ranks: see tests/ranks.py.

A plugin, because a fixture of conftest.py that imports the engine would make every test one that a
change in a kernel affects (tests/reach.py).
"""

import pytest
from ranks import auto_means, kernels_of


@pytest.fixture(scope="session", autouse=True)
def kernels_of_the_tier(pytestconfig):
    with auto_means(kernels_of(pytestconfig)):
        yield
