"""numba's cache on disk, shared by processes that need the same kernel at the same time.

Ranks call their kernels together. Where the cache is empty each would compile every kernel, and of
two forms of a kernel that are written at once numba's index would lose one. Here one process
compiles, while the others wait for what it leaves on disk.

A process claims a kernel with a lock on one byte of a file in the directory of the cache, which the
system takes back when the process ends. Nobody waits for ever for one that is stopped: after
`PATIENCE_S` a process compiles for itself, and so it does where files cannot be locked.
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
"""The event of numba's kind that surrounds waiting for another process."""

_files: dict[str, int | None] = {}
"""The open file of locks of each directory; closing it would end all claims."""


class SharedCache(FunctionCache):  # type: ignore[misc]
    """The compiled forms of one function on disk. One process at a time compiles them."""

    _claimed: tuple[int, int] | None = None

    def load_overload(self, sig: object, target_context: Any) -> Any:
        """Return the compiled form, or None where this process is the one to compile it."""
        found = super().load_overload(sig, target_context)
        if found is None and self._claim():
            found = super().load_overload(sig, target_context)
            if found is not None:
                self._let_go()
        return found

    def save_overload(self, sig: object, data: object) -> None:
        """Write what this process has compiled, and let those read it that wait."""
        try:
            super().save_overload(sig, data)
        finally:
            self._let_go()

    def _claim(self) -> bool:
        """Claim the function; return whether another process may have written a form meanwhile."""
        file = _lock_file(self.cache_path)
        byte = int.from_bytes(sha256(self._impl.filename_base.encode()).digest()[:7])
        if file is None:
            return False
        try:
            if not _locked(file, byte):
                with event.trigger_event(WAITING):
                    _wait_for(file, byte)
        except OSError:  # such as a file system without locks
            return False
        self._claimed = file, byte
        return True

    def _let_go(self) -> None:
        if self._claimed:
            file, byte = self._claimed
            self._claimed = None
            fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)


def _lock_file(directory: str) -> int | None:
    """Return the descriptor of the file of locks of a cache's directory, None if there is none."""
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
    """Lock a byte of a file for this process; return False where another has locked it.

    Raises:
        OSError: Files cannot be locked here.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True
