"""What several tests of the engine ask for."""

import pytest

from recapp.engine import sharded_embedding_bag


@pytest.fixture
def reference_kernels(monkeypatch):
    """In this process too nothing is compiled: here it does not matter which kernels run."""
    choose = sharded_embedding_bag.choose_backend

    def chosen(asked, device):
        return choose("torch" if asked == "auto" else asked, device)

    monkeypatch.setattr(sharded_embedding_bag, "choose_backend", chosen)
