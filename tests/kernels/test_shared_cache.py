"""Processes that need the same kernel at the same time compile it once."""

import errno
import os
import signal
import sys
import time
from importlib import import_module

import pytest
from ranks import context

numba = pytest.importorskip("numba")
from numba.core import event  # noqa: E402

from recapp.kernels import numba_cache  # noqa: E402

KERNEL = """
from recapp.kernels.numba_cache import compiled

@compiled()
def twice(number):
    return 2 * number
"""


def calls_when_told(pipe, folder, patience, numbers):
    """In a process of its own: call a kernel, and wait for a word before each compilation."""
    from recapp.kernels.numba_cache import listen_to_compilations

    sys.path.append(str(folder))
    numba.core.config.CACHE_DIR = str(folder / "cache")
    numba_cache.PATIENCE_S = patience
    twice = import_module("kernel_of_test").twice
    noted = []

    class Compilations(event.Listener):
        def on_start(self, said):
            pipe.send("compiles")
            pipe.recv()

        def on_end(self, said):
            pass

    pipe.send("ready")
    pipe.recv()
    with (
        event.install_listener("numba:compile", Compilations()),
        listen_to_compilations(lambda: noted.append(1)),
    ):
        answers = [twice(number) for number in numbers]
    pipe.send((answers, len(noted)))


class Caller:
    """A process that calls the kernel."""

    def __init__(self, folder, patience, numbers):
        forked = context()
        self.pipe, there = forked.Pipe()
        self.process = forked.Process(
            target=calls_when_told, args=(there, folder, patience, numbers), daemon=True
        )
        self.process.start()
        assert self.hears() == "ready"

    def hears(self):
        assert self.pipe.poll(60)
        return self.pipe.recv()

    def go(self):
        self.pipe.send("go")


@pytest.fixture
def caller(tmp_path):
    """A function that starts a process which is ready to call a kernel that nobody has compiled."""
    (tmp_path / "kernel_of_test.py").write_text(KERNEL)
    callers = []

    def start(patience=60, numbers=(21,)):
        callers.append(Caller(tmp_path, patience, numbers))
        return callers[-1]

    yield start
    for each in callers:
        each.process.kill()
        each.process.join()


def test_one_compiles_and_the_others_wait_which_is_noted(caller):
    first, *others = [caller() for _ in range(3)]
    first.go()
    assert first.hears() == "compiles"
    for other in others:
        other.go()
    time.sleep(0.3)  # they look at the disk, and wait
    first.go()
    assert [each.hears() for each in (first, *others)] == [([42], 1)] * 3


def test_who_comes_later_reads_the_disk_and_notes_nothing(caller):
    first, later = (caller(numbers=(21, 1.5)) for _ in range(2))
    for said in ("compiles", "compiles", ([42, 3.0], 2)):
        first.go()
        assert first.hears() == said
    later.go()
    assert later.hears() == ([42, 3.0], 0)


@pytest.mark.parametrize(("end", "patience"), [(signal.SIGKILL, 60), (signal.SIGSTOP, 0.2)])
def test_nobody_waits_for_a_process_that_is_killed_or_stopped(caller, end, patience):
    first, second = caller(), caller(patience)
    first.go()
    assert first.hears() == "compiles"
    second.go()
    time.sleep(0.1)
    os.kill(first.process.pid, end)
    assert second.hears() == "compiles"
    second.go()
    assert second.hears() == ([42], 2)


@pytest.mark.parametrize("broken", ["os.open", "fcntl.lockf"])
def test_a_kernel_is_compiled_where_files_cannot_be_locked(tmp_path, monkeypatch, broken):
    def three():
        return 3

    module, _, name = broken.partition(".")
    works = getattr(import_module(module), name)

    def fails(file, *arguments):
        if isinstance(file, int) or file.endswith(".lock"):
            raise OSError(errno.ENOLCK, "No locks available")
        return works(file, *arguments)

    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    numba_cache._lock_file.cache_clear()
    monkeypatch.setattr(broken, fails)
    kernel = numba.njit(three)
    kernel._cache = numba_cache.SharedCache(three)
    began = time.monotonic()
    assert kernel() == 3 and time.monotonic() - began < numba_cache.PATIENCE_S / 2
    assert kernel.stats.cache_misses and list(tmp_path.rglob("*.nbc"))
