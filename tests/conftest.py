"""Fixtures shared by all tests: the pools of ranks, and where real click logs lie."""

import gc
import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from jobs import Jobs
from ranks import Ranks, auto_means

pytest_plugins = ["affected"]  # the option `--affected`

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
    "test_predict",
    "test_readme",
    "test_cpp",
    "test_bench_runs",
    "test_run_ends",
    "test_disk_cache",
    "test_runs",
    "test_settings",
    "test_many_machines",
    "test_documents",
    "test_dynamic_semantics",
    "test_dynamic_tables",
    "test_quality",
    "test_memory_limit",
    "test_quantised",
    "test_plan_command",
    "test_same_run",
    "test_end_to_end",
    "test_every_path",
    "test_serve_command",
    "test_triton",
    "test_bad_input",
    "test_export",
    "test_bags_and_sequences",
    "test_launch",
)
"""Files of minutes in one tier or half a minute in the other, longest first."""


def pytest_collection_modifyitems(items):
    """Start long files first, so that no worker waits for another's at the end."""
    order = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish():
    """Whatever tests collect, they need not look through what is loaded by now."""
    gc.freeze()


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
def reference_kernels():
    """In this process too nothing is compiled: here it does not matter which kernels run."""
    with auto_means("torch"):
        yield
