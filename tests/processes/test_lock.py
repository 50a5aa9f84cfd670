"""A run has its directory for itself, however another run that was there ended."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from jobs import environment

from recapp.errors import ConfigError
from recapp.processes import rank_environment
from recapp.processes.rank_environment import LOCK_FILE, locked

HOLD = """
import sys, time
from pathlib import Path
from recapp.processes.rank_environment import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path):
    """Return `hold()`, which starts a process that holds the lock of `tmp_path` until its input
    ends.
    """
    started = []

    def hold():
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", HOLD, str(tmp_path)],
                env=environment(),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield hold
    for process in started:
        process.communicate()


def test_who_holds_a_directory_is_named_and_it_is_free_when_he_ends(hold, tmp_path):
    holder = hold()
    with pytest.raises(ConfigError) as refused, locked(tmp_path):
        pass
    said = str(refused.value)
    assert re.search(
        (
            rf"is in use: process {holder.pid} on \S+, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d, "
            r"writes "
            r"there; choose"
        ),
        said,
    )
    holder.communicate()
    assert not (tmp_path / LOCK_FILE).exists()
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_locks_nothing(hold, tmp_path):
    holder = hold()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK_FILE).exists()
    with locked(tmp_path):
        pass
    assert not (tmp_path / LOCK_FILE).exists()


def test_one_process_may_take_its_own_lock_again(tmp_path):
    with locked(tmp_path / "run"):
        with locked(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / LOCK_FILE).exists()


def test_a_file_that_its_holder_removes_while_another_waits_for_it_is_not_taken_for_the_lock(
    tmp_path, monkeypatch
):
    flock = rank_environment.fcntl.flock
    path = tmp_path / LOCK_FILE

    def late(file, kind):
        if path.exists() and not seen:
            seen.append(os.fstat(file).st_ino)
            path.unlink()  # as the holder does, between our opening and our locking
        flock(file, kind)

    seen = []
    monkeypatch.setattr(rank_environment.fcntl, "flock", late)
    with locked(tmp_path):
        assert path.exists() and seen


def test_where_there_are_no_locks_it_is_said(tmp_path, monkeypatch, capsys):
    def none(file, kind):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(rank_environment.fcntl, "flock", none)
    with locked(tmp_path):
        pass
    (said,) = capsys.readouterr().err.splitlines()
    assert "cannot be locked (Function not implemented)" in said
