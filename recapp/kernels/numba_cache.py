"""The compilation of kernels by numba, and its cache on disk.

numba finds a kernel on disk by the file of its function, and by its code and all that it closes
over, pickled.

- A kernel is put together from several files. If one of these changed alone, kernels of two
  versions would work on the same arrays: so each carries the digest of the files that it is made of
  (`kernel_sources.py`), and a change in any other file leaves it as it is.
- Compiled functions and intrinsics pickle differently in every process, and with them in a closure
  each process would compile anew. So kernels close over numbers and over plain functions that
  pickle knows by their name (`inlined`); numba compiles those into them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from numba import njit
from numba.core import event
from numba.core.registry import cpu_target
from numba.extending import register_jitable

from recapp.kernels.kernel_sources import digest
from recapp.kernels.shared_cache import WAITING, SharedCache

Function = Callable[..., Any]

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
# Names of functions become names of files, and pickle takes what stands before a dot for the owner.
NO_PATH = str.maketrans(".", "p", "(), '")


@lru_cache(None)
def kept_on_disk() -> bool:
    """Return whether numba finds a directory to keep kernels in: `NUMBA_CACHE_DIR`, that of the
    sources or one of the user. In a container all of them may be read-only.
    """

    def nothing() -> None:
        pass

    try:
        njit(cache=True)(nothing)
    except RuntimeError:
        return False
    return True


def compiled(**more: Any) -> Callable[[Function], Function]:
    """Return a decorator for a kernel: it is compiled at its first call, or read from disk where it
    was kept and none of its sources has changed since.

    Args:
        more: Options of numba beside `OPTIONS`.
    """

    def compile(function: Function) -> Function:
        kernel = njit(**OPTIONS, **more)(function)
        if kept_on_disk():
            kernel._cache = SharedCache(function)
            # numba would look at this function's file alone
            kernel._cache._cache_file._source_stamp = digest(function)
        return kernel  # type: ignore[no-any-return]

    return compile


def inlined(*made_for: Any) -> Callable[[Function], Function]:
    """Return a decorator for a function that numba compiles into kernels.

    The function stays a plain one. It becomes an attribute of its module under a name that says
    what it was made for, so that pickle finds it and the cache on disk tells it from others.

    Args:
        made_for: The numbers and functions that the function closes over.
    """

    def name(function: Function) -> Function:
        words = [f"{x.__module__}.{x.__qualname__}" if callable(x) else str(x) for x in made_for]
        function.__name__ = function.__qualname__ = "_".join([function.__name__, *words]).translate(
            NO_PATH
        )
        home = vars(sys.modules[function.__module__])
        made: Function = register_jitable(**OPTIONS, forceinline=True)(function)
        return home.setdefault(function.__name__, made)  # type: ignore[no-any-return]

    return name


def load_compiler() -> None:
    """Have numba load what it otherwise loads at the first call of a kernel, half a second of it.

    For a process that is forked later; it compiles nothing.
    """
    for context in (cpu_target.typing_context, cpu_target.target_context):
        context.refresh()


class _CompilationListener(event.Listener):  # type: ignore[misc]
    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins

    def on_start(self, event: object) -> None:
        self._begins()

    def on_end(self, event: object) -> None:
        pass


@contextmanager
def listen_to_compilations(begins: Callable[[], None]) -> Iterator[None]:
    """Call a function whenever numba begins to compile a kernel inside of this context, or to wait
    for another process that compiles it.

    It is not called when numba reads a kernel from disk.

    Args:
        begins: The function.
    """
    listener = _CompilationListener(begins)
    with (
        event.install_listener("numba:compile", listener),
        event.install_listener(WAITING, listener),
    ):
        yield
