"""What several files of tests build once."""

import fcntl

import pytest

from recapp.inference.build_cpp import build


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The C++ program, built by whichever worker of pytest asks first."""
    shared = tmp_path_factory.getbasetemp().parent
    with (shared / "cpp.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build(shared / "cpp")
