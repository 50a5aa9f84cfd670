"""A run has its directory for itself: whoever writes there holds a lock, and a second run is
refused.

    DIR/.lock     {"pid": 4711, "host": "node07", "since": "2026-01-31 18:05:11"},
                  and the kernel's lock (flock) on it

The kernel frees the lock however its holder ends, so a file that a killed run has left locks
nothing. The file is removed by its holder. Where a file system has no locks (some network file
systems), it is said that nothing is locked.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path

from recapp.console import note, short_path
from recapp.errors import ConfigError

LOCK_FILE = ".lock"
PRINTING_FLAGS = (
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--help",
    "-h",
    "--hydra-help",
    "--version",
    "--shell-completion",
    "-sc",
)


@contextmanager
def locked(directory: Path, setting: str = "hydra.run.dir") -> Iterator[None]:
    """Hold the lock of a directory, which is made if it is not there. A process that holds it
    already may take it again.

    Args:
        directory: of a run, or of a sweep.
        setting: what chooses another directory.

    Raises:
        ConfigError: another process holds it; the text says which one.
        OSError: the directory cannot be written.
    """
    directory = directory.absolute()
    if directory in _held:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    file = _take(directory, setting)
    _held.add(directory)
    try:
        yield
    finally:
        _held.discard(directory)
        if file is not None:
            with suppress(OSError):
                (directory / LOCK_FILE).unlink()  # while it is locked: nobody else can hold it
            os.close(file)


def locked_as_named(
    flags: Sequence[str], overrides: Sequence[str], writes: bool
) -> AbstractContextManager[None]:
    """`locked` for the directory that a command line names, before Hydra writes there; each job
    locks its own.

    Where it is not there yet, nobody writes there.

    Args:
        flags: of Hydra: `-m` for a sweep.
        overrides: `key=value`.
        writes: whether the command writes there at all.
    """
    setting = "hydra.sweep.dir" if {"-m", "--multirun"} & set(flags) else "hydra.run.dir"
    named = [
        override.partition("=")[2].strip("'\"")
        for override in overrides
        if override.startswith(f"{setting}=")
    ]
    prints = any(flag.partition("=")[0] in PRINTING_FLAGS for flag in flags)
    if not writes or prints or not named or not Path(named[-1]).is_dir():
        return nullcontext()
    return locked(Path(named[-1]), setting)


_held: set[Path] = set()


def _take(directory: Path, setting: str) -> int | None:
    """The descriptor of the locked file; None where the file system has no locks."""
    path = directory / LOCK_FILE
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(file)
            os.close(file)
            raise ConfigError(
                f"{short_path(directory)} is in use: {holder} writes there; choose another "
                f"{setting}, or wait"
            ) from None
        except OSError as error:
            os.close(file)
            note(
                f"{short_path(directory)} cannot be locked ({error.strerror}): see to it that "
                "no "
                "other run writes there"
            )
            return None
        if _is_still_there(file, path):
            _sign(file)
            return file
        os.close(file)  # its holder has removed it meanwhile


def _is_still_there(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _sign(file: int) -> None:
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
    with suppress(OSError):  # a full disk: it is locked all the same
        os.truncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode(), 0)


def _holder(file: int) -> str:
    try:
        found = json.loads(os.pread(file, 4096, 0))
        return f"process {found['pid']} on {found['host']}, since {found['since']},"
    except (ValueError, KeyError, TypeError):  # it has not signed yet
        return "another run"
