"""The compilation of kernels by numba, and its cache on disk.

numba finds a kernel on disk by the file of its function, by its code, and by the pickled values of
its closure.

- A kernel is put together from several files. If one of them changed alone, kernels of two versions
  would work on the same arrays. So each kernel carries the digest of its source files
  (`digest`). A change in any other file does not compile it again. numba's cache itself tells
  versions of Python, numba and the processor apart.
- Compiled functions and intrinsics pickle differently in every process: with one of them in a
  closure, each process would compile the kernel again. So kernels close over numbers and over plain
  functions that pickle finds by name (`inlined`); numba inlines these functions.

A kernel consists of its function and the functions in its closure, such as a row rule, which may be
a user's. They use numbers and functions of their modules and of imported modules. So the sources of
a kernel are all files of the packages of those modules, in recapp of their rooms.

Ranks call their kernels together. With an empty cache each rank would compile every kernel, and if
two ranks wrote forms of a kernel at once, numba's index would lose one form. Here one process
compiles, and the others wait for the file that it writes (`SharedCache`). A process claims a kernel
with a lock on one byte of a file in the cache's directory; the system releases the lock when the
process ends. The process that holds a lock may be stopped: so another process waits at most
`PATIENCE_S` and then compiles itself. It also compiles itself where files cannot be locked.
"""

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any

from numba import njit
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target
from numba.extending import register_jitable

Function = Callable[..., Any]

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
# Names of functions become names of files, and pickle takes the text before a dot for an owner.
NO_PATH = str.maketrans(".", "p", "(), '")
PATIENCE_S = 60.0
POLL_S = 0.01
# The name of the numba event that lasts while this process waits for another.
WAITING = "recapp:waits for a kernel"


@lru_cache(None)
def kept_on_disk() -> bool:
    """Return whether numba finds a directory for kernels: `NUMBA_CACHE_DIR`, the directory of the
    sources or one of the user's. In a container all of them may be read-only.
    """
    try:
        FunctionCache(digest)
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
        names = vars(sys.modules[function.__module__])
        jitable: Function = register_jitable(**OPTIONS, forceinline=True)(function)
        return names.setdefault(function.__name__, jitable)  # type: ignore[no-any-return]

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


# ---- one process compiles


class SharedCache(FunctionCache):  # type: ignore[misc]
    """The compiled forms of one function on disk. One process at a time compiles them."""

    _claimed: tuple[int, int] | None = None

    def load_overload(self, sig: object, target_context: Any) -> Any:
        """Return the compiled form, or None if this process has to compile it."""
        overload = super().load_overload(sig, target_context)
        if overload is None and self._claim():
            overload = super().load_overload(sig, target_context)
            if overload is not None:
                self._let_go()
        return overload

    def save_overload(self, sig: object, data: object) -> None:
        """Write the form that this process has compiled, and release the claim for waiting
        processes.
        """
        try:
            super().save_overload(sig, data)
        finally:
            self._let_go()

    def _claim(self) -> bool:
        """Claim the function; return whether another process may have written a form in the
        meantime.
        """
        file = _lock_file(self.cache_path)
        byte = int.from_bytes(sha256(self._impl.filename_base.encode()).digest()[:7])
        if file is None:
            return False
        try:
            if not _locked(file, byte):
                with event.trigger_event(WAITING):
                    _wait_for(file, byte)
        except OSError:  # a file system without locks, for example
            return False
        self._claimed = file, byte
        return True

    def _let_go(self) -> None:
        if self._claimed:
            file, byte = self._claimed
            self._claimed = None
            fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)


@lru_cache(None)
def _lock_file(directory: str) -> int | None:
    """Return the descriptor of the lock file of a cache's directory; None if there is none. It
    stays open: closing it would release all claims.
    """
    with suppress(OSError):
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, "compiling.lock")
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    return None


def _wait_for(file: int, byte: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while not _locked(file, byte):
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(POLL_S)


def _locked(file: int, byte: int) -> bool:
    """Lock a byte of a file for this process; return False if another process has locked it.

    Raises:
        OSError: The file system cannot lock files.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


# ---- the sources of a kernel


def digest(function: Callable[..., Any]) -> str:
    """Return the SHA-256 of the source files of a kernel.

    Args:
        function: The compiled function, with its closure.
    """
    each = [_digest_of_file(file) for file in sorted(sources(function))]
    return sha256(b"".join(each)).hexdigest()


def sources(function: Callable[..., Any]) -> set[Path]:
    """Return the source files of a kernel.

    Args:
        function: The compiled function, with its closure.
    """
    modules = {inner.__module__ for inner in _functions_in(function, set())}
    return {file for module in modules for file in files_of_module(module)}


def _functions_in(value: object, seen: set[int]) -> Iterator[FunctionType]:
    """Yield a function and the functions in its closure, alone or in tuples, compiled or plain."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, tuple):
        for part in value:
            yield from _functions_in(part, seen)
    plain = getattr(value, "py_func", value)
    if isinstance(plain, FunctionType):
        yield plain
        for cell in plain.__closure__ or ():
            with suppress(ValueError):  # an empty cell: a function that is being defined
                yield from _functions_in(cell.cell_contents, seen)


@lru_cache(None)
def files_of_module(name: str) -> frozenset[Path]:
    """Return the files of the package of a loaded module; in recapp those of its room. A module
    alone is one file.

    A notebook has no such files: numba compares the code of functions that are typed there.

    Args:
        name: The name of the module.
    """
    path = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    if not path.is_file():
        return frozenset()
    packages = name.count(".") + (path.stem == "__init__")
    above = path.resolve().parents[: 1 if name.startswith("recapp.") else packages]
    files = above[-1].rglob("*.py") if above else [path.resolve()]
    return frozenset(file for file in files if file.is_file())


@lru_cache(None)
def _digest_of_file(file: Path) -> bytes:
    return sha256(file.read_bytes()).digest()
