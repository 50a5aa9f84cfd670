"""The C++ program as a contender: one process for each number of threads, with its own clock.

    --- "64 32 40\n" --->  recapp_score ARTEFACT ROWS --turns --threads=1
    <-- {"us": [...]} ---

The program maps the artefact once and then waits for its turns.
"""

import json
from dataclasses import dataclass

from recapp.benchmarks.line_process import LineProcess
from recapp.benchmarks.timing import Times

US_OF_MS = 1e3


@dataclass(frozen=True)
class CppScores:
    """Batches that the C++ program scores.

    Args:
        program: The process, which waits for its turns.
        size: The samples of a batch.
        batches: The number of different batches, which steps take in turn.
    """

    program: LineProcess
    size: int
    batches: int

    def run(self, steps: int) -> Times:
        """Score batches, and return the time of each.

        Raises:
            LaunchError: The program has ended.
        """
        self.program.send(f"{self.size} {self.batches} {steps}")
        return {"step": [us / US_OF_MS for us in json.loads(self.program.answer())["us"]]}
