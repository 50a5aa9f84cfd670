"""numba's cache on disk for processes that need the same kernel at the same time.

Ranks call their kernels together. With an empty cache each rank would compile every kernel, and if
two ranks wrote forms of a kernel at once, numba's index would lose one form. Here one process
compiles, and the others wait for the file that it writes.

A process claims a kernel with a lock on one byte of a file in the cache's directory; the system
releases the lock when the process ends. The process that holds a lock may be stopped: so another
process waits at most `PATIENCE_S` and then compiles itself. It also compiles itself where files
cannot be locked.
"""

import fcntl
import os
import time
from hashlib import sha256
from typing import Any

from numba.core import event
from numba.core.caching import FunctionCache

PATIENCE_S = 60.0
POLL_S = 0.01
WAITING = "recapp:waits for a kernel"
"""The name of the numba event that lasts while this process waits for another."""

_files: dict[str, int | None] = {}
"""The open lock file of each directory; closing it would release all claims."""


class SharedCache(FunctionCache):  # type: ignore[misc]
    """The compiled forms of one function on disk. One process at a time compiles them."""

    _claimed: tuple[int, int] | None = None

    def load_overload(self, sig: object, target_context: Any) -> Any:
        """Return the compiled form, or None if this process has to compile it."""
        found = super().load_overload(sig, target_context)
        if found is None and self._claim():
            found = super().load_overload(sig, target_context)
            if found is not None:
                self._let_go()
        return found

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


def _lock_file(directory: str) -> int | None:
    """Return the descriptor of the lock file of a cache's directory; None if there is none."""
    if directory not in _files:
        try:
            os.makedirs(directory, exist_ok=True)
            path = os.path.join(directory, "compiling.lock")
            _files[directory] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            _files[directory] = None
    return _files[directory]


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
