"""The costs of a loaded artefact: the time to load it, and the memory of two processes that map it.

process 1  python -m tests.speed.mapped_memory ARTEFACT     maps all rows and reads them
process 2  the same command
While both run, /proc/PID/smaps of each shows the resident pages of rows, shared and private.
"""

import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from recapp.engine.read_only_store import values_of
from recapp.inference.held_tables import mapped_tables
from recapp.inference.scorer import Scorer
from recapp.stored.stored_model import Artefact

from .line_process import LineProcess

LOADS = 5  # the median of these counts
PROCESSES = 2
READY = "ready"
PAGE_BYTES = 4096
KB = 1024
HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .*$")


LoadModel = Callable[..., Scorer]
"""A function that loads an artefact into this process, with the arguments of `recapp.load_model`.
"""


def cost_of_loading(artefact: Path, load: LoadModel) -> dict[str, Any]:
    """Return the results of loading an artefact: medians of a few loads, and memory.

    Args:
        artefact: The artefact.
        load: The function that loads an artefact.
    """
    return {
        "rows_bytes": sum(
            int(entry["bytes"])
            for name, entry in Artefact.at(artefact).manifest.files.items()
            if name.startswith("rows/")
        ),
        "map_ms": _median_ms(lambda: mapped_tables(Artefact.at(artefact))),
        "load_ms": _median_ms(lambda: load(artefact, check_rows=False)),
        "load_checked_ms": _median_ms(lambda: load(artefact, check_rows=True)),
        **memory_of_two(artefact),
    }


def _median_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(LOADS):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def memory_of_two(artefact: Path) -> dict[str, int | None]:
    """Return the resident bytes of rows in one process (`rows_resident_bytes`) and in two processes
    together (`two_resident_bytes`, with shared pages counted once), after both have read all rows.

    The values are None where the system does not report them.

    Args:
        artefact: The artefact.
    """
    command = [sys.executable, "-m", "tests.speed.mapped_memory", str(artefact)]
    with TemporaryDirectory() as folder, ExitStack() as stack:
        processes = [
            stack.enter_context(
                closing(LineProcess(f"process {n}", command, Path(folder) / f"{n}.txt"))
            )
            for n in range(PROCESSES)
        ]
        for process in processes:
            process.answer()
        found = [_of_rows(process.pid, artefact) for process in processes]
    known = [f for f in found if f is not None]
    if len(known) < PROCESSES:
        return {"rows_resident_bytes": None, "two_resident_bytes": None}
    return {
        "rows_resident_bytes": max(f["Rss"] for f in known),
        "two_resident_bytes": max(f["Rss"] - f["Private"] for f in known)
        + sum(f["Private"] for f in known),
    }


def _of_rows(pid: int, artefact: Path) -> dict[str, int] | None:
    """Return the bytes of the row files that are resident in a process (`Rss`), and the part that
    no other process maps (`Private`); None where the system does not report them.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return None
    found = {"Rss": 0, "Private": 0}
    folder = str(Artefact.at(artefact).manifest.folder.resolve() / "rows")
    of_rows = False
    for line in lines:
        if HEAD.match(line):
            of_rows = folder in line
        key, _, value = line.partition(":")
        key = key.removesuffix("_Clean").removesuffix("_Dirty")
        if of_rows and key in found:
            found[key] += int(value.split()[0]) * KB
    return found


def main() -> None:
    """Map the rows of an artefact, read them, and wait until standard input ends."""
    artefact = Artefact.at(sys.argv[1])
    tables = mapped_tables(artefact)
    read = {id(t.rows): values_of(t.rows) for t in tables.tables.values()}
    for rows in read.values():
        rows.view(-1).view(torch.uint8)[::PAGE_BYTES].sum()
    print(READY, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
