"""Find the rank that failed first, and report its failure as one error."""

import json
import os
import resource
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recapp import errors
from recapp.console import tracebacks_wanted
from recapp.errors import LaunchError, RecappError
from recapp.processes.faults import explain_output, full_disk_error, is_full, last_lines
from recapp.processes.launched_ranks import RankFailure, log_of
from recapp.processes.stopping import SIGNALS, Stopped

LOST = 255  # multiprocessing's exit code of a process whose fork server is gone
LAST_LINES = 60  # of the output of a rank that died without an error file
STOPPED_BY = {code: number for number in SIGNALS for code in (128 + number, -number)}
"""The signal that has ended a rank, by the rank's exit code."""


def explain_failures(
    failures: Sequence[RankFailure], logs: Path, limit: str
) -> RecappError | Stopped:
    """Return the error to raise for ranks that failed.

    If a rank is stopped (SIGSTOP), name that rank, unless another rank has failed by an error of
    its own. A rank that a signal ended, that missed the stopped rank, or that the launcher killed
    has no error of its own.

    Args:
        failures: One for each rank that has failed.
        logs: The directory of the ranks' logs, in the job's directory.
        limit: Words for the time that a rank may be stopped.
    """
    failure = first_failure(failures)
    error = _explain(failure, logs)
    stopped = [one for one in failures if one.stopped]
    if stopped and (failure.ended or isinstance(error, Stopped) or error.secondhand):
        who = " and ".join(
            f"rank {one.rank} is stopped (SIGSTOP, process {one.pid})" for one in stopped
        )
        return LaunchError(
            f"{who}: ranks wait for one that is stopped no longer than {limit}; let it go on in "
            f"time (kill -CONT {stopped[0].pid})"
        )
    return error


def _explain(failure: RankFailure, logs: Path) -> RecappError | Stopped:
    """Return the error of a rank that failed."""
    if failure.exitcode in STOPPED_BY:
        return Stopped(STOPPED_BY[failure.exitcode])
    who = f"rank {failure.rank} on {socket.gethostname()} (process {failure.pid})"
    if failure.error_file.exists():
        return _reported(failure, who)
    if is_full(logs):
        return full_disk_error(logs.parent)
    lines = last_lines(log_of(logs, failure.rank), LAST_LINES)
    aborted = failure.exitcode == -signal.SIGABRT
    known_fault = explain_output(lines, failure.rank) if aborted else None
    error = known_fault or LaunchError(f"{who} {_how(failure.exitcode)}")
    if lines and (known_fault is None or tracebacks_wanted()):
        error.add_note(f"the last lines of rank {failure.rank}:\n{lines}")
    return error


def _reported(failure: RankFailure, who: str) -> RecappError:
    """Return the error that a rank has written to its error file."""
    message: dict[str, Any] = json.loads(failure.error_file.read_text())["message"]
    calls = message["extraInfo"]["py_callstack"]
    kind, _, text = message["message"].partition(": ")
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, RecappError):
        error = known(text)
        if tracebacks_wanted():
            error.add_note(calls)
        return error
    unknown = LaunchError(f"{who} failed: {message['message']}")
    unknown.add_note(calls.rstrip())
    return unknown


def _how(code: int) -> str:
    """Return words for the end of a rank that wrote no error file."""
    if code == LOST:
        return (
            "was ended with the fork server that it came from (killed, or memory ran out); "
            "launch.start_method=spawn does without one"
        )
    if code > 0:
        return f"exited with code {code}"
    said = f"was ended by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        return f"{said}; the system does that to a process when memory runs out"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if code == -signal.SIGABRT and limit != resource.RLIM_INFINITY:
        return (
            f"{said}; memory is limited to {limit:,} bytes here (ulimit -v), and libraries end a "
            "process so when it runs out"
        )
    return said


def first_failure(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the failure of the rank that failed first.

    The order of the exits does not decide: the failed rank may be slow to exit, and a peer that
    lost its connection may exit earlier. A rank that died without an error file counts as first: a
    peer's failure raises an exception, which the rank would have reported. Among ranks with an
    error file, the rank with the oldest file failed first.
    """
    reported = [failure for failure in failures if failure.error_file.exists()]
    reported.sort(key=lambda failure: os.stat(failure.error_file).st_mtime_ns)
    silent = [
        failure
        for failure in failures
        if failure not in reported and not failure.ended and failure.exitcode not in STOPPED_BY
    ]
    return [*silent, *reported, *failures][0]
