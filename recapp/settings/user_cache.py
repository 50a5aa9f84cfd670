"""Facts that were measured before, in the user's cache directory: a run finds what an earlier run
computed from the same files.

    ~/.cache/recapp/<kind>/<key>.json     one entry; the key is a hash of all that it depends on

What depends on other files or settings has another key, so a stale entry is never read. A cache
writes nothing beside the data. One that cannot be read or written is no error: facts are measured
again.
"""

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from recapp.console import note
from recapp.settings.option_files import read_json
from recapp.settings.whole_file import write_whole

KEPT = 800  # entries of a kind: each job of a sweep may have its own
# by platform: the variable that names the directory of a user's caches, and the default below the
# home
_CACHES = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches")}


def cached_file(kind: str, identity: Sequence[Any]) -> Path | None:
    """Return the path of an entry; None for a user without a home.

    Args:
        kind: What the entry holds, as the name of a directory.
        identity: All that it depends on, as plain values.
    """
    named, usual = _CACHES.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
    try:
        cache = Path(os.environ.get(named) or Path.home() / usual)
    except RuntimeError:
        return None
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return cache / "recapp" / kind / f"{key}.json"


def read_cached_file(path: Path | None) -> Any:
    """Return the plain values of an entry; None if there is none that can be read."""
    if path is not None:
        with suppress(OSError, ValueError):
            return read_json(path)
    return None


def write_cached_file(path: Path | None, entry: Any) -> Path | None:
    """Write the plain values of an entry, and remove the oldest entries beyond `KEPT`.

    Returns:
        The path; None if the entry cannot be written.
    """
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(entry) + "\n")
        entries = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for old in entries[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        return None
    return path


@contextmanager
def in_turn(path: Path | None, what: str) -> Iterator[None]:
    """Let one process of this machine at a time measure what an entry holds, which the next ones
    then find there. The kernel gives the turn of a process that dies to the next one.

    Args:
        path: The entry; None lets all go on.
        what: What is measured, for the line that a waiting process prints.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # no place for a lock, or a file system without locks
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(open(path.with_suffix(".lock"), "w"))
                stack.callback(path.with_suffix(".lock").unlink, missing_ok=True)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    note(f"{what}: another process does that; waiting for it")
                    fcntl.flock(lock, fcntl.LOCK_EX)
        yield
