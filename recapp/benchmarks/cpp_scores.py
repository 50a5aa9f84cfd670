"""The C++ program as a contender: one process for a number of threads, with its own clock.

    --- "64 32 40\n" --->  recapp_score ARTEFACT ROWS --turns --threads=1
    <-- {"us": [...]} ---

It maps the artefact once and then waits for its turns, using no core.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recapp.benchmarks.timing import Times
from recapp.errors import LaunchError

US_OF_MS = 1e3


class CppScores:
    """Batches that the C++ program scores.

    Args:
        program: The process, which waits for its turns.
        size: The samples of a batch.
        batches: How many batches are taken in turn.
    """

    def __init__(self, program: "subprocess.Popen[str]", size: int, batches: int) -> None:
        self.program = program
        self.size = size
        self.batches = batches

    def run(self, steps: int) -> Times:
        """Score so many batches, and return how long each took.

        Raises:
            LaunchError: The program has ended.
        """
        assert self.program.stdin is not None and self.program.stdout is not None
        with suppress(OSError):  # it has died, which its missing answer shows
            self.program.stdin.write(f"{self.size} {self.batches} {steps}\n")
            self.program.stdin.flush()
        line = self.program.stdout.readline()
        if not line:
            assert self.program.stderr is not None
            why = self.program.stderr.read().strip() or "it said nothing"
            raise LaunchError(f"the C++ program has ended: {why}")
        return {"step": [us / US_OF_MS for us in json.loads(line)["us"]]}


@contextmanager
def started(
    program: Path, artefact: Path, rows: Path, threads: int
) -> Iterator["subprocess.Popen[str]"]:
    """Start the program, and end it with the context.

    Args:
        program: The path of the program.
        artefact: The artefact.
        rows: A file of the raw rows, in Arrow.
        threads: The threads of torch.
    """
    process = subprocess.Popen(
        [program, artefact, rows, "--turns", f"--threads={threads}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.communicate()  # closes its standard input, with which it ends
