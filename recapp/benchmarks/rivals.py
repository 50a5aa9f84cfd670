"""Rivals: TorchRec and FBGEMM in a Python of their own, started once, timed whenever it is their
turn.

    rank 0  --- {"steps": 12} --->  torchrec_worker.py, rank 0     a process per rank and
            --- {"steps": 12} --->  torchrec_worker.py, rank 1     allocator setting
            <-- {"step": [...]} ---

They are told what to build by a file, read the very ids that recapp looks up, and then wait on
their standard input, using no core, until they are told to run some steps. recapp's rank 0 leads
them; other ranks hold a contender that does nothing.

They run twice: as installed, and with glibc's malloc told never to give memory back, which spares
TorchRec a page fault per fresh 4 KB.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recapp.benchmarks.timing import Times
from recapp.console import note
from recapp.errors import ConfigError, LaunchError
from recapp.transport.communicator import Comm

WORKER = Path(__file__).with_name("torchrec_worker.py")
TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
ALLOCATORS: dict[str, dict[str, str]] = {"": {}, "_tuned": TUNED}
"""What is added to a rival's name, and to its environment."""
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
SECONDS_TO_IMPORT = 180


def check_python(path: str | None) -> None:
    """Raises ConfigError where `bench.torchrec_python` is given and is no Python that has
    TorchRec.
    """
    if path is None:
        return
    setting = f"bench.torchrec_python={path}"
    how = "docs/benchmarks.md (Beside TorchRec) has the lines that make one"
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise ConfigError(
            f"{setting}: there is no such program; name the Python of an environment with "
            f"TorchRec; {how}"
        )
    try:
        found = subprocess.run(
            [path, "-c", "import torchrec, fbgemm_gpu"],
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_IMPORT,
            env=_environment({}, 1),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{setting}: cannot be run ({' '.join(str(error).split())}); {how}"
        ) from None
    if found.returncode:
        said = (found.stderr.strip().splitlines() or ["no word"])[-1]
        raise ConfigError(f"{setting}: cannot import torchrec there ({said}); {how}")


class Refused(Exception):
    """A rival does not do what was asked of it; its own words."""


@dataclass
class Absent:
    """A contender in which this rank has no part: another rank leads it."""

    threads: int = 1

    def run(self, steps: int) -> Times:
        """Nothing."""
        return {}


class Rival:
    """Processes that a rank leads: one, or one per rank of theirs.

    Args:
        python: their interpreter.
        specs: what each of them builds; see `torchrec_worker.py`.
        folder: for their files.
        environment: added to theirs.
        threads: of each.

    Raises:
        Refused: they cannot build it.
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
        own = Path(tempfile.mkdtemp(dir=folder))
        self._said = own / "stderr.txt"
        self._processes: list[subprocess.Popen[str]] = []
        try:
            with self._said.open("w") as log:
                for rank, spec in enumerate(specs):
                    text = json.dumps(
                        spec
                        | {
                            "rank": rank,
                            "world": len(specs),
                            "store": str(own / "store"),
                            "threads": threads,
                        }
                    )
                    self._processes.append(
                        subprocess.Popen(
                            [python, str(WORKER)],
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            stderr=log,
                            text=True,
                            env=_environment(environment, threads),
                        )
                    )
                    self._tell(self._processes[-1], text)
            refusals = [answer["refused"] for answer in self._answers() if "refused" in answer]
            if refusals:
                raise Refused(refusals[0])
        except BaseException:
            self.close()
            raise

    def run(self, steps: int) -> Times:
        """Run so many steps; each as long as its slowest process took."""
        for process in self._processes:
            self._tell(process, json.dumps({"steps": steps, "threads": self.threads}))
        answers = self._answers()
        return {
            part: [max(step) for step in zip(*(answer[part] for answer in answers), strict=True)]
            for part in answers[0]
        }

    def close(self) -> None:
        """End the processes; those that do not take the hint are killed."""
        for process in self._processes:
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    @staticmethod
    def _tell(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        with suppress(OSError):  # it has died, which its missing answer tells
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise LaunchError(
                    "bench.torchrec_python: the process that runs TorchRec ended without a "
                    "word: "
                    f"{self._last_words()}"
                )
            answers.append(json.loads(line))
        return answers

    def _last_words(self) -> str:
        lines = [
            line for line in self._said.read_text(errors="replace").splitlines() if line.strip()
        ]
        return lines[-1].strip() if lines else "nothing on its standard error"


def _environment(added: Mapping[str, str], threads: int) -> dict[str, str]:
    """What a rival inherits: nothing that says how recapp's ranks meet or how their memory is
    allocated.
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
) -> Iterator[dict[str, Rival | Absent]]:
    """Contenders `<name>` and `<name>_tuned` while this lasts; none where no Python is given or it
    refuses. Every rank calls it.

    Args:
        name: of the contender as installed.
        python: `bench.torchrec_python`, or None.
        specs: what each of their processes builds.
        folder: for files.
        comm: recapp's ranks; rank 0 leads.
        threads: of each process.
    """
    with ExitStack() as stack:
        led: dict[str, Rival | Absent] = {}
        try:
            if python is not None and comm.rank == 0:
                for suffix, environment in ALLOCATORS.items():
                    rival = Rival(python, specs, folder, environment, threads)
                    stack.callback(rival.close)
                    led[f"{name}{suffix}"] = rival
        except Refused as refused:
            led = {}
            note(f"  {name} refuses: {refused}")
        names = comm.broadcast(list(led))
        yield led if comm.rank == 0 else {n: Absent() for n in names}
