"""Fixtures shared by all tests: the pools of ranks, and where real click logs lie."""

import gc
import logging
import os
import signal
from pathlib import Path

import proof_cost
import pytest
import torch
from hypothesis import HealthCheck, settings
from interpreter import quicken
from jobs import Jobs
from quick_disk import force_nothing
from quick_settings import parse_once
from ranks import Ranks, auto_means, kernels_of, serve_workers, use_server
from stored import Stored

from recapp.transport.communicator import leave_process_group

TESTS = Path(__file__).parent

pytest_plugins = ["affected", "kernels_of_tier"]  # the option `--affected`; what `auto` means

settings.register_profile(
    "busy machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("busy machine")
if not torch.cuda.is_available():
    # read where triton is imported: its kernels run on CPU tensors then
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    """Let signals reach what tests start: a shell starts commands in its background, and many a CI
    all of them, with SIGINT ignored, nohup with SIGHUP, and children inherit that. And compute on
    one thread: where all cores are at work, threads of small arrays wait for each other.
    """
    torch.set_num_threads(1)
    force_nothing()
    parse_once()
    if address := getattr(config, "workerinput", {}).get("fork_server"):
        use_server(address)
    config.pluginmanager.register(proof_cost)
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Let the workers of a whole tier fork from one process: each of its own would take seconds."""
    if node.config.args == node.config.getini("testpaths"):
        node.workerinput["fork_server"] = serve_workers()


def pytest_xdist_auto_num_workers():
    """One worker more than cores: tests wait for processes that they start, and for their ends."""
    return os.cpu_count() + 1


def pytest_collection_modifyitems(items):
    """Begin with the longest test: at the end the other workers would wait for it alone. The others
    have one order, wherever a worker has begun to collect.
    """
    items.sort(key=lambda item: (item.name != "test_a_newcomer_types_the_readme", str(item.path)))


def pytest_collection(session):
    """Looking for garbage in what is being imported takes a third of the time. And each worker
    begins with files of its own, whose asserts it rewrites for all: the others find its bytecode.
    """
    gc.disable()
    config = session.config
    if hasattr(config, "workerinput") and config.args == config.getini("testpaths"):
        places = sorted({path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")})
        worker = int(config.workerinput["workerid"].removeprefix("gw"))
        first = len(places) * worker // config.workerinput["workercount"]
        config.args = [str(TESTS / place) for place in places[first:] + places[:first]]


def pytest_collection_finish():
    """Whatever tests collect, they need not look through what is loaded by now."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup():
    """Tests of Triton's kernels spend most of their time in its interpreter."""
    quicken()


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


@pytest.fixture
def no_process_group():
    """Trainers of other tests leave a group in this process, beside which no ranks are forked."""
    leave_process_group()
    gc.collect()  # modules and DDP hold it, and its sockets with it


@pytest.fixture(scope="session")
def ranks(request):
    """`ranks.run(fn, world, *args)`: see tests/ranks.py."""
    pool = Ranks(kernels_of(request.config))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def jobs():
    """Jobs of the product on a pool of ranks: see tests/jobs.py."""
    pool = Jobs()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def stored(jobs, tmp_path_factory):
    """What several tests read and none changes, made once for all workers: see tests/stored.py."""
    own = tmp_path_factory.getbasetemp()
    of_session = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    store = Stored(of_session / "stored", jobs)
    yield store
    store.check()


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


@pytest.fixture(scope="session")
def foreign_programs():
    """The folder of programs written for other systems, or a skip with its reason."""
    path = os.environ.get("RECAPP_PROGRAMS")
    if not path or not Path(path, "dlrm_train.txt").is_file():
        pytest.skip(
            "no programs of other systems: set RECAPP_PROGRAMS to a folder that holds "
            "dlrm_train.txt, generate_plans.txt and sharding_strategies.txt"
        )
    return Path(path)


@pytest.fixture
def reference_kernels():
    """In the full tier too nothing is compiled: here it does not matter which kernels run."""
    with auto_means("torch"):
        yield
