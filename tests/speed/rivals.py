"""Rivals: TorchRec and FBGEMM in a Python of their own. They start once, and are timed in turns.

    rank 0  --- {"steps": 12} --->  torchrec_worker.py, rank 0     a process per rank and
            --- {"steps": 12} --->  torchrec_worker.py, rank 1     allocator setting
            <-- {"step": [...]} ---

The first line on the standard input of such a process is a spec: the module to build. The process
reads the ids that recapp looks up from a file, and then waits for the next line, which asks for
some steps. recapp's rank 0 leads the processes; the other ranks hold a contender that does nothing.

Each rival runs twice: as installed, and with glibc's malloc set to keep freed memory, which saves
TorchRec a page fault for each new 4 KB.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recapp.benchmarks.timing import Measured, Times
from recapp.console import note
from recapp.errors import ConfigError
from recapp.transport.communicator import Comm

from .line_process import LineProcess
from .other_python import versions

WORKER = Path(__file__).with_name("torchrec_worker.py")
TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
ALLOCATORS: dict[str, dict[str, str]] = {"": {}, "_tuned": TUNED}
"""The environment variables of each way to run a rival, by the suffix of the rival's name."""
NOT_FOR_RIVALS = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "MALLOC_",
    "PYTHONPATH",
    "RECAPP_",
)
"""The beginnings of the environment variables that a rival does not inherit."""


def check_python(path: str | None) -> None:
    """Check that `--torchrec_python` is a Python that has TorchRec and FBGEMM.

    Args:
        path: The path of the Python; None passes the check.

    Raises:
        ConfigError: There is no such program, or it cannot import TorchRec and FBGEMM.
    """
    if path is not None:
        try:
            versions(path, ("torchrec", "fbgemm_gpu"), ("torchrec",))
        except ConfigError as error:
            how = "docs/benchmarks.md (Beside TorchRec) has the lines that make one"
            raise ConfigError(f"--torchrec_python={error}; {how}") from None


def beside(name: str, measured: Mapping[str, Measured]) -> dict[str, Measured | None]:
    """Return the times of a rival as installed and with its allocator tuned; None where it was
    absent.

    Args:
        name: The name of the rival.
        measured: The times of all contenders.
    """
    return {key: measured.get(key) for key in (name, f"{name}_tuned")}


class Refused(Exception):
    """A rival cannot build the module of its spec; the message is the rival's own."""


@dataclass
class Absent:
    """A contender on a rank that has no part in it, because rank 0 leads it.

    Args:
        threads: Not used; it matches `Rival`.
        batches: Not used; it matches `Rival`.
    """

    threads: int = 1
    batches: str | None = None

    def run(self, steps: int) -> Times:
        """Run nothing and return no times."""
        return {}


class Rival:
    """A contender that runs in processes of another Python: one process, or one for each rank.

    Args:
        python: The path of the interpreter.
        specs: The spec of each process; see `torchrec_worker.py`.
        folder: The directory of the processes' files.
        environment: Additional environment variables of the processes.
        threads: The threads of each process.

    Raises:
        Refused: A process cannot build the module of its spec.
        LaunchError: A process ended without an answer.
    """

    def __init__(
        self,
        python: str,
        specs: list[dict[str, Any]],
        folder: Path,
        environment: Mapping[str, str],
        threads: int,
    ) -> None:
        self.threads = threads
        self.batches: str | None = None  # the name of a list of batches, where there are several
        own = Path(tempfile.mkdtemp(dir=folder))
        self._processes: list[LineProcess] = []
        try:
            for rank, spec in enumerate(specs):
                process = LineProcess(
                    "--torchrec_python: the process that runs TorchRec",
                    [python, WORKER],
                    own / f"stderr_{rank}.txt",
                    _environment(environment, threads),
                )
                self._processes.append(process)
                shared = {"world": len(specs), "store": str(own / "store"), "threads": threads}
                process.send(json.dumps({**spec, "rank": rank, **shared}))
            refusals = [answer["refused"] for answer in self._answers() if "refused" in answer]
            if refusals:
                raise Refused(refusals[0])
        except BaseException:
            self.close()
            raise

    def run(self, steps: int) -> Times:
        """Run steps, and return the time of the slowest process for each step.

        Raises:
            LaunchError: A process ended without an answer.
        """
        request = {"steps": steps, "threads": self.threads, "batches": self.batches}
        for process in self._processes:
            process.send(json.dumps(request))
        answers = self._answers()
        return {
            part: [max(step) for step in zip(*(each[part] for each in answers), strict=True)]
            for part in answers[0]
        }

    def profiled(self, steps: int) -> dict[str, float]:
        """Return what a step of the first process gives its GPU to do.

        Raises:
            LaunchError: A process ended without an answer.
        """
        for process in self._processes:
            process.send(json.dumps({"profiled": steps}))
        return self._answers()[0]

    def close(self) -> None:
        """End the processes. Close all inputs first, because the processes may wait for each
        other.
        """
        for process in self._processes:
            process.end_input()
        for process in self._processes:
            process.close()

    def _answers(self) -> list[dict[str, Any]]:
        return [json.loads(process.answer()) for process in self._processes]


def _environment(added: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the environment of a rival.

    It has no variables for the meeting point or the memory allocator of recapp's ranks.
    """
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(NOT_FOR_RIVALS)
    }
    return (
        kept
        | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONWARNINGS": "ignore",
            "KMP_DUPLICATE_LIB_OK": "TRUE",
        }
        | dict(added)
    )


@contextmanager
def rivals(
    name: str,
    python: str | None,
    specs: list[dict[str, Any]],
    folder: Path,
    comm: Comm,
    threads: int = 1,
    tuned: bool = True,
) -> Iterator[dict[str, Rival | Absent]]:
    """Start the contenders `<name>` and `<name>_tuned`, and end them with the context.

    The context is empty where no Python is given, or where the rival refuses the specs. Every rank
    calls this function.

    Args:
        name: The name of the contender as installed.
        python: The setting `--torchrec_python`, or None.
        specs: The spec of each process.
        folder: The directory of the processes' files.
        comm: The ranks of recapp; rank 0 leads the processes.
        threads: The threads of each process.
        tuned: Whether there is the second one.
    """
    with ExitStack() as stack:
        led: dict[str, Rival | Absent] = {}
        try:
            if python is not None and comm.rank == 0:
                for suffix, environment in [*ALLOCATORS.items()][: 1 + tuned]:
                    rival = Rival(python, specs, folder, environment, threads)
                    stack.callback(rival.close)
                    led[f"{name}{suffix}"] = rival
        except Refused as refused:
            led = {}
            note(f"  {name} refuses: {refused}")
        names = comm.broadcast(list(led))
        yield led if comm.rank == 0 else {n: Absent() for n in names}
