"""Fixtures of the server's tests."""

from contextlib import ExitStack

import pytest
from serving.processes import ServerProcess


@pytest.fixture
def start_server():
    """`start_server(folder, artefact, *settings)`; no server outlives its test."""
    with ExitStack() as started:
        yield lambda *given, **more: started.enter_context(ServerProcess(*given, **more))
