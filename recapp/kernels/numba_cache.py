"""The compilation of kernels by numba, and its cache on disk.

numba finds a kernel on disk by the file of its function, by its code, and by the pickled values of
its closure.

- A kernel is put together from several files. If one of them changed alone, kernels of two versions
  would work on the same arrays. So each kernel carries the digest of its source files
  (`kernel_sources.py`). A change in any other file does not compile it again.
- Compiled functions and intrinsics pickle differently in every process: with one of them in a
  closure, each process would compile the kernel again. So kernels close over numbers and over plain
  functions that pickle finds by name (`inlined`); numba inlines these functions.
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
# Names of functions become names of files, and pickle takes the text before a dot for an owner.
NO_PATH = str.maketrans(".", "p", "(), '")


@lru_cache(None)
def kept_on_disk() -> bool:
    """Return whether numba finds a directory for kernels: `NUMBA_CACHE_DIR`, the directory of the
    sources or one of the user's. In a container all of them may be read-only.
    """

    def nothing() -> None:
        pass

    try:
        njit(cache=True)(nothing)
    except RuntimeError:
        return False
    return True


def compiled(**more: Any) -> Callable[[Function], Function]:
    """Return a decorator that compiles a kernel at its first call, or reads the kernel from disk if
    none of its sources has changed since.

    Args:
        more: Options of numba in addition to `OPTIONS`.
    """

    def compile(function: Function) -> Function:
        kernel = njit(**OPTIONS, **more)(function)
        if kept_on_disk():
            kernel._cache = SharedCache(function)
            # numba would check the file of this function alone
            kernel._cache._cache_file._source_stamp = digest(function)
        return kernel  # type: ignore[no-any-return]

    return compile


def inlined(*made_for: Any) -> Callable[[Function], Function]:
    """Return a decorator for a function that numba compiles into kernels.

    The function stays a plain one. It becomes an attribute of its module, and its name lists
    `made_for`: so pickle finds it, and the cache on disk tells it from others.

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
    """Load the parts of numba that it otherwise loads at the first call of a kernel (half a
    second).

    A process calls this before it forks others. This compiles nothing.
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
    """Call a function whenever numba, inside of this context, begins to compile a kernel or begins
    to wait for another process that compiles it.

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
