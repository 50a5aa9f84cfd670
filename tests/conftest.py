"""Fixtures shared by all tests: the pools of ranks, and where real click logs lie."""

import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from jobs import Jobs
from ranks import Ranks

from recapp.engine import sharded_tables

settings.register_profile(
    "busy machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("busy machine")
if not torch.cuda.is_available():
    # read where triton is imported: its kernels run on CPU tensors then
    os.environ.setdefault("TRITON_INTERPRET", "1")


LONG_FILES = (
    "test_settings",
    "test_many_machines",
    "test_run_ends",
    "test_runs",
    "test_disk_cache",
    "test_bad_input",
    "test_readme",
    "test_plan_command",
    "test_quality",
    "test_documents",
    "test_memory_limit",
)
"""Files of minutes, in either tier, longest first."""


def pytest_collection_modifyitems(items):
    """Start long files first, so that no worker waits for another's at the end."""
    order = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """Commands that run in this process set up logging on streams that pytest closes after the
    test.
    """
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    yield
    root.handlers[:] = handlers
    root.level = level


@pytest.fixture(scope="session")
def ranks(request):
    """`ranks.run(fn, world, *args)`: see tests/ranks.py."""
    pool = Ranks("auto" if request.config.option.markexpr == "full" else "torch")
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def jobs():
    """Jobs of the product on a pool of ranks: see tests/jobs.py."""
    pool = Jobs()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def real_data():
    """The folder of real click logs, or a skip with its reason."""
    path = os.environ.get("RECAPP_REAL_DATA")
    if not path or not Path(path, "criteo_kaggle_137k", "train").is_dir():
        pytest.skip(
            "no real click logs: set RECAPP_REAL_DATA to a folder that holds "
            "criteo_kaggle_137k/train"
        )
    return Path(path)


@pytest.fixture
def reference_kernels(monkeypatch):
    """In this process too nothing is compiled: here it does not matter which kernels run."""
    choose = sharded_tables.choose_backend

    def chosen(asked, device):
        return choose("torch" if asked == "auto" else asked, device)

    monkeypatch.setattr(sharded_tables, "choose_backend", chosen)
