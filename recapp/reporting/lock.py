"""A run has its directory for itself: whoever writes there holds a lock, and a second run is
refused.

    DIR/.lock     {"pid": 4711, "host": "node07", "since": "2026-01-31 18:05:11"},
                  and the kernel's lock (flock) on it

The kernel frees the lock however its holder ends, so a file that a killed run has left locks
nothing. The file is removed by its holder. Where a file system has no locks (some network file
systems), a note says that nothing is locked.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from itertools import chain, count
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
    """Hold the lock of a directory inside the `with`; make the directory if it is not there.

    A process that holds the lock already may take it again.

    Args:
        directory: The directory of a run or of a sweep.
        setting: The setting that chooses another directory, for the error text.

    Raises:
        ConfigError: Another process holds the lock; the text says which one.
        OSError: The directory cannot be written.
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
    """Return the lock of the directory that a command line names, for the time before Hydra runs.

    Nothing is locked where the command line names no directory, or one that is not there yet: then
    nobody writes there. Each job of a sweep locks its own directory besides.

    Args:
        flags: Hydra's flags on the command line; `-m` starts a sweep.
        overrides: The settings on the command line, as `key=value`.
        writes: Whether the command writes into its directory at all.
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


def new_directory(wanted: str) -> str:
    """Make a directory that was not there, and return its path: two runs that begin in the same
    second get one each.

    Args:
        wanted: Its path. Where that exists, `_2`, `_3` and so on stand behind it. Where none can be
            made it is returned, and whoever writes there meets the error.
    """
    with suppress(OSError):
        Path(wanted).parent.mkdir(parents=True, exist_ok=True)
        for path in chain([wanted], (f"{wanted}_{number}" for number in count(2))):
            with suppress(FileExistsError):
                Path(path).mkdir()
                return path
    return wanted


_held: set[Path] = set()


def _take(directory: Path, setting: str) -> int | None:
    """Lock the directory's file and return its descriptor; None where the file system has no locks.

    Raises:
        ConfigError: Another process holds the lock.
    """
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
                f"{short_path(directory)} cannot be locked ({error.strerror}): see to it that no "
                "other run writes there"
            )
            return None
        if _is_still_there(file, path):
            _write_holder(file)
            return file
        os.close(file)  # its holder has removed it meanwhile


def _is_still_there(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _write_holder(file: int) -> None:
    """Write process, host and time of the lock into its file."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
    with suppress(OSError):  # a full disk: it is locked all the same
        os.truncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode(), 0)


def _holder(file: int) -> str:
    """Return who holds the lock, as the subject of a sentence."""
    try:
        found = json.loads(os.pread(file, 4096, 0))
        return f"process {found['pid']} on {found['host']}, since {found['since']},"
    except (ValueError, KeyError, TypeError):  # it has not written its name yet
        return "another run"
