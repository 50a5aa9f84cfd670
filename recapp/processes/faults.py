"""Explain errors of the machine in one line: no memory, a full disk, a missing package, a rank that
is silent or has ended.

Libraries raise these errors in their own words, which seldom name a remedy. This file turns them
into errors that name the setting to change.
"""

import errno
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

from recapp.errors import LaunchError, RankError, RecappError

FULL = (errno.ENOSPC, errno.EDQUOT)
PROBE_BYTES = 1 << 16  # written to test whether a disk is full
SHARED_MEMORY = Path("/dev/shm")
TIMEOUT = "launch.timeout"

NO_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|Unable to allocate|out of "
    r"memory|bad_alloc|MemoryError|failed to map segment",
    re.IGNORECASE,
)
NO_THREADS = re.compile(r"Resource temporarily unavailable|can't start new thread")
TRIED = re.compile(r"(?:tried to allocate|Unable to allocate) ([\d.,]+ ?\w+)", re.IGNORECASE)
NO_SHARED_MEMORY = re.compile(
    r"torch_\d+_\d+|shared memory \(shm\)|insufficient shared memory|out of shared memory",
    re.IGNORECASE,
)
SILENT = re.compile(
    r"Timed out waiting (\d+)ms|wait timeout after (\d+)ms|"
    r"collective operation timeout.*?Timeout\(ms\)=(\d+)",
    re.DOTALL,
)
GONE = re.compile(r"Connection (?:closed|reset) by peer|Connection closed by remote peer")


def explain_error(error: Exception, rank: int, directory: Path | None = None) -> Exception:
    """Return the error that explains an exception in one line, or the exception itself.

    Args:
        error: The exception of the rank.
        rank: The rank's number.
        directory: The directory of the run.
    """
    if isinstance(error, RecappError):
        return error
    if isinstance(error, OSError) and error.errno in FULL:
        if (
            not error.filename
            and SHARED_MEMORY.is_dir()
            and is_full(SHARED_MEMORY)
            and not (directory and is_full(directory))
        ):
            return _no_shared_memory_error(rank)
        return full_disk_error(error.filename or directory or "the run's directory")
    # a failed import sets `name`; a library that checks for a package itself raises only a text
    if isinstance(error, ModuleNotFoundError) and error.name is None:
        return LaunchError(f"rank {rank} lacks a package: {error}")
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    memory = any(
        isinstance(e, MemoryError) or getattr(e, "errno", 0) == errno.ENOMEM for e in causes
    )
    return (
        explain_output("\n".join(f"{type(e).__name__}: {e}" for e in causes), rank, memory) or error
    )


def explain_output(text: str, rank: int, memory: bool = False) -> RecappError | None:
    """Return the error that explains a text in one line; None where the text shows no known fault.

    Args:
        text: The text of an exception, or the last lines of the log of a rank that died.
        rank: The rank's number.
        memory: Whether the caller knows that memory has run out.
    """
    if NO_SHARED_MEMORY.search(text):
        return _no_shared_memory_error(rank)
    if memory or NO_MEMORY.search(text):
        tried = TRIED.search(text)
        what = f": it tried to allocate {tried[1]}" if tried else ""
        return LaunchError(
            f"rank {rank} is out of memory{what}; use a smaller dataset.batch_size or tables.dim, "
            "or more ranks (trainer.devices) with +plan=row_wise"
        )
    if NO_THREADS.search(text):
        return LaunchError(
            f"rank {rank} cannot start another thread: the limit of memory or of processes is "
            "reached (ulimit -v, ulimit -u, or the container's limits); use fewer ranks "
            "(trainer.devices) here"
        )
    if silence := SILENT.search(text):
        seconds = int(next(filter(None, silence.groups()))) / 1000
        return RankError(timeout_message(rank, "another rank", seconds))
    if GONE.search(text):
        return RankError(f"another rank has ended while rank {rank} waited for it")
    return None


def describe_exit(code: int) -> str:
    """Return words for the end of a process that has reported no error.

    Args:
        code: Its exit code; after a signal, minus the number of the signal.
    """
    if code >= 0:
        return f"exited with code {code}"
    hint = "; the system does that to a process when memory runs out"
    return f"was ended by {signal.Signals(-code).name}{hint if code == -signal.SIGKILL else ''}"


def timeout_message(rank: int, other: int | str, seconds: float) -> str:
    """Return the error text for a rank that has waited for another rank for `launch.timeout`.

    Args:
        rank: The rank that has waited.
        other: The number of the awaited rank, or words for it.
        seconds: The time of waiting.
    """
    silent = f"rank {other}" if isinstance(other, int) else other
    return (
        f"rank {rank} has waited for {silent} for {seconds:g} seconds ({TIMEOUT}): it is stopped "
        f"or stuck; raise {TIMEOUT} if it only needs longer"
    )


def full_disk_error(path: object) -> LaunchError:
    """Return the error for a full disk under a directory or file."""
    return LaunchError(
        f"the disk under {path} is full, or its quota is used up: make room there, or choose "
        "another hydra.run.dir"
    )


def fault_of_compiler() -> str:
    """Return why torch cannot compile for the CPU here, with a way out; empty if it can."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler} here: install one, or name it in CXX"
    folder = tempfile.gettempdir()
    blanks = "torch gives its compiler names of temporary files without quotes, and TMPDIR"
    return f"{blanks}={folder} has blanks: set another TMPDIR" if " " in folder else ""


def is_full(directory: Path) -> bool:
    """Return whether nothing more can be written below a directory."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return error.errno in FULL
    return False


def _no_shared_memory_error(rank: int) -> LaunchError:
    try:
        room = f"{SHARED_MEMORY} has {shutil.disk_usage(SHARED_MEMORY).total:,} bytes"
    except OSError:
        room = f"there is no {SHARED_MEMORY}"
    return LaunchError(
        f"the data workers of rank {rank} found no room in shared memory ({room}): give "
        f"{SHARED_MEMORY} more (docker run --shm-size=1g), or use fewer workers"
    )
