"""The logs on which the tests of training run."""

import pytest
from runs import make_logs


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The tiny set of `make_logs`."""
    return make_logs(tmp_path_factory.mktemp("logs") / "set")
