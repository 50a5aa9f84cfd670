"""A pool of gloo ranks that lives as long as the pytest session: starting processes costs seconds,
a test costs milliseconds.

`ranks.run(fn, world, *args)` calls `fn(comm, *args)` on the first `world` ranks and returns their
results in rank order; an exception in any rank fails the test with that rank's traceback. `fn` must
be importable.

In the default tier `backend="auto"` means the reference kernels, here and in pytest's own process:
compiling numba's for every width and rule that tests think of takes minutes. Parity, the kernels'
own suite and all jobs run compiled kernels in both tiers; the full tier runs nothing else.
"""

import os
import sys
import tempfile
import traceback
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ForkServer
from multiprocessing.popen_forkserver import Popen
from pathlib import Path
from unittest.mock import patch

import proof_cost

from recapp.processes.fork_server import DEFAULTS, OWN_VARIABLES
from recapp.processes.stopping import redirected

SIZE = 4
TIMEOUT_S = 120
IMPORTED = ["torch", "lightning.pytorch", "recapp.train", "recapp.engine.sharded_tables"]
# of whole commands (warm_commands.py); put together, as no test reaches what is only imported early
IMPORTED_FOR_COMMANDS = "train eval predict export serve plan bench report cli.training_modules"
IMPORTED_FOR_COMMANDS += " run.trained_model model_export"
TESTS = str(Path(__file__).parent)
PATIENCE_S = 2  # with the others, once a rank has failed: they wait for it


class _Server(ForkServer):
    """Of this process, or of the session, which started it for all workers of xdist."""

    of_session = False

    def ensure_running(self):
        if not self.of_session:
            super().ensure_running()


_server = _Server()  # not that of the product, which tests use in this process too


class _Context(ForkServerContext):
    """Processes that are forked from the server of pytest."""

    class Process(ForkServerProcess):
        @staticmethod
        def _Popen(process):
            proof_cost.count("processes")
            with patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
                return Popen(process)


def early_modules():
    """What the fork server of the tests imports, which says nothing of a module that is gone."""
    return [*IMPORTED, *("recapp." + name for name in IMPORTED_FOR_COMMANDS.split())]


def context():
    """Of the processes of pools and of commands: each is forked from one that has imported torch
    and Lightning, which takes seconds.
    """
    # and with it `early_modules`; in two words, as no test needs what it only has sooner by it
    # (`reach.py` follows whole ones)
    _server.set_forkserver_preload(["_".join(["warm", "imports"])])
    # as a command starts one: no library starts threads when it is imported
    found = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))
    of_server = DEFAULTS | dict(os.environ) | OWN_VARIABLES | {"PYTHONPATH": found}
    with patch.dict(os.environ, of_server):
        _server.ensure_running()
    return _Context()


def serve_workers():
    """Start the fork server of a session; its address. What forks print that have no files of their
    own is as little shown as what a test prints.
    """
    with open(os.devnull, "w") as file, redirected(1, file.fileno()), redirected(2, file.fileno()):
        context()
    return _server._forkserver_address


def use_server(address):
    """Fork from the server at this address."""
    _server.of_session = True
    _server._forkserver_address = address
    _server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the session's keeps it alive


def kernels_of(config):
    """The kernels that `auto` means in a tier."""
    return "auto" if config.option.markexpr == "full" else "torch"


@contextmanager
def auto_means(kernels):
    """Inside the `with`, this process takes those kernels where `auto` is asked for."""
    from recapp.engine import sharded_tables

    choose = sharded_tables.choose_backend

    def chosen(asked, device):
        return choose(kernels if asked == "auto" else asked, device)

    sharded_tables.choose_backend = chosen
    try:
        yield
    finally:
        sharded_tables.choose_backend = choose


def _serve(rank, path, python_path, kernels, pipe):
    sys.path[:] = python_path
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist
    from interpreter import quicken
    from quick_disk import force_nothing

    from recapp.processes.stopping import freeze_loaded_objects
    from recapp.transport.communicator import Comm

    freeze_loaded_objects()
    torch.set_num_threads(1)
    force_nothing()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=SIZE)
    groups = {world: dist.new_group(list(range(world))) for world in range(1, SIZE + 1)}
    with auto_means(kernels):
        while (job := pipe.recv()) is not None:
            fn, world, args = job
            quicken()
            try:
                pipe.send((True, fn(Comm(groups[world]), *args)))
            except BaseException:
                pipe.send((False, f"rank {rank} of {world}:\n{traceback.format_exc()}"))
    dist.destroy_process_group()


def stop(workers, kill=False):
    """End processes that serve a pipe each, and forget them."""
    for process, pipe in workers:
        if kill:
            process.kill()
        else:
            pipe.send(None)
    for process, _ in workers:
        process.join(10)
    workers.clear()


class Ranks:
    """The pool. A rank that fails inside a collective leaves the others waiting, so after any
    failure the pool starts afresh.
    """

    def __init__(self, kernels="auto"):
        self._workers = []
        self._kernels = kernels

    def _start(self):
        forked = context()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(SIZE):
            here, there = forked.Pipe()
            arguments = (rank, f"{self._folder.name}/store", list(sys.path), self._kernels, there)
            process = forked.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._workers.append((process, here))

    def run(self, fn, world, *args):
        if not self._workers:
            self._start()
        for _, pipe in self._workers[:world]:
            pipe.send((fn, world, args))
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world])}
        answers = {}
        failed = []
        while waiting:
            heard = wait(list(waiting), TIMEOUT_S if not failed else PATIENCE_S)
            if not heard:
                failed += [f"rank {rank} of {world}: no answer" for rank in waiting.values()]
                break
            for pipe in heard:
                rank = waiting.pop(pipe)
                fine, answers[rank] = pipe.recv()
                failed += [] if fine else [answers[rank]]
        if failed:
            self.stop(kill=True)
            raise AssertionError("\n".join(failed))
        return [answers[rank] for rank in range(world)]

    def stop(self, kill=False):
        stop(self._workers, kill)
