"""The lock of a run's directory: a process that writes there holds the lock, and a second run gets
an error.

    DIR/.lock     {"pid": 4711, "host": "node07", "since": "2026-01-31 18:05:11"},
                  and the kernel's lock (flock) on it

The kernel frees the lock at every end of its holder, so a file that a killed run leaves behind does
not block the next run. The holder removes the file. If a file system has no locks (some network
file systems), a note warns that the directory is not locked.
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
    """Hold the lock of a directory inside the `with`; make the directory if it does not exist.

    A process that holds the lock may take it again.

    Args:
        directory: The directory of a run or of a sweep.
        setting: The setting that chooses another directory, for the error text.

    Raises:
        ConfigError: Another process holds the lock; the text names the process.
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
                (
                    directory / LOCK_FILE
                ).unlink()  # before the close, so that no other process holds it
            os.close(file)


def locked_as_named(
    flags: Sequence[str], overrides: Sequence[str], writes: bool
) -> AbstractContextManager[None]:
    """Return the lock of the directory that a command line names, for the time before Hydra runs.

    The lock does nothing if the command line names no directory, or if the directory does not exist
    yet, so that no process can write there. Each job of a sweep also locks its own directory.

    Args:
        flags: Hydra's flags on the command line; `-m` starts a sweep.
        overrides: The settings on the command line, as `key=value`.
        writes: Whether the command writes into its directory.
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


def new_directory(first: str) -> str:
    """Make a new directory and return its path. Two runs that begin in the same second get
    different directories.

    Args:
        first: The path. If it exists, `_2`, `_3` and so on are appended. If no directory can be
            made, this path is returned, and the first write there raises the error.
    """
    with suppress(OSError):
        Path(first).parent.mkdir(parents=True, exist_ok=True)
        for path in chain([first], (f"{first}_{number}" for number in count(2))):
            with suppress(FileExistsError):
                Path(path).mkdir()
                return path
    return first


_held: set[Path] = set()


def _take(directory: Path, setting: str) -> int | None:
    """Lock the directory's file and return its descriptor; None if the file system has no locks.

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
                f"{short_path(directory)} cannot be locked ({error.strerror}): make sure that no "
                "other run writes there"
            )
            return None
        if _is_still_there(file, path):
            now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
            holding = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
            with suppress(OSError):  # on a full disk the lock still holds
                os.truncate(file, 0)
                os.pwrite(file, json.dumps(holding).encode(), 0)
            return file
        os.close(file)  # the earlier holder has just removed the file


def _is_still_there(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(file: int) -> str:
    """Return the holder of the lock, as the subject of a sentence."""
    try:
        owner = json.loads(os.pread(file, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']},"
    except (ValueError, KeyError, TypeError, RecursionError):  # the file is not written yet
        return "another run"
