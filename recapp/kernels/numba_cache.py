"""How kernels are compiled, and when one that lies on disk is taken instead.

numba knows a kernel on disk by the file that it stands in, and by its code and all that it closes
over, pickled.

- Kernels are put together from several files. If one of these changed alone, kernels of two
  versions would work on the same arrays: so each carries the digest of all of them (`compiled`).
- Compiled functions and intrinsics pickle differently in every process, and with them in a closure
  each process would compile anew. So kernels close over numbers and over plain functions that
  pickle knows by their name (`part`); numba compiles those into them.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import event
from numba.extending import register_jitable

Function = Callable[..., Any]

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
SOURCES = ("kernels/*.py", "optim/rules.py")  # below the package
# names become names of files, and pickle reads a dot as "of"
NO_PATH = str.maketrans(".", "p", "(), '")


@lru_cache(None)
def digest() -> str:
    """Of all files that kernels are made of."""
    package = Path(__file__).parents[1]
    return sha256(
        b"".join(path.read_bytes() for pattern in SOURCES for path in sorted(package.glob(pattern)))
    ).hexdigest()


def compiled(**more: Any) -> Callable[[Function], Function]:
    """A decorator for a kernel: compiled at its first call, or taken from disk if no source has
    changed since.

    Args:
        more: numba's options beside ours.
    """

    def compile(function: Function) -> Function:
        kernel = njit(**OPTIONS, cache=True, **more)(function)
        # numba's own: of this function's file alone
        kernel._cache._cache_file._source_stamp = digest()
        return kernel  # type: ignore[no-any-return]

    return compile


def part(*made_for: Any) -> Callable[[Function], Function]:
    """A decorator for a function that kernels are made with: plain, and its module's own under a
    name that says what it was made for.
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


class _CompilationListener(event.Listener):  # type: ignore[misc]
    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins

    def on_start(self, event: object) -> None:
        self._begins()

    def on_end(self, event: object) -> None:
        pass


def listen_to_compilations(begins: Callable[[], None]) -> AbstractContextManager[Any]:
    """Call a function whenever numba begins to compile a kernel, while this lasts; not when it
    reads one from disk.
    """
    listener = _CompilationListener(begins)
    return event.install_listener("numba:compile", listener)  # type: ignore[no-any-return]
