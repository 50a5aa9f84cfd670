"""A worker that trains nothing: each rank does what `model.ranks` says, and those without a word
wait to be ended.

`fine` leaves at once, `quiet` without a word, `mute` without a result; `raise`, `refuse`, `unread`,
`exit`, `kill`, `no_memory`, `abort` fail, each in its way; `late` fails when rank 1 has ended;
`stop` stops, and `in_vain` and `own_fault` fail when rank 1 has; `until_told` leaves when there is
a file `go`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recapp.errors import DataError, RankError

FOREVER_SECONDS = 120


def run(config: dict[str, Any], directory: Path) -> None:
    rank = int(os.environ["RANK"])
    number = directory / f"writing{rank}"
    number.write_text(str(os.getpid()))
    number.replace(directory / f"pid{rank}")  # whole: this rank may be ended at any moment
    (directory / f"env{rank}.json").write_text(json.dumps(dict(os.environ)))
    word = config["model"]["ranks"][rank]
    if word != "quiet":
        print(f"rank {rank} speaks")
    act(word, rank, directory)
    if rank == 0 and config["model"]["ranks"][0] != "mute":
        metrics = {
            "val_auc": 0.75,
            "ranks": int(os.environ["WORLD_SIZE"]),
            "plan": config["choices"].get("plan", "automatic"),
        }
        (directory / "metrics.json").write_text(json.dumps(metrics))


def act(word: str, rank: int, directory: Path) -> None:
    if word == "raise":
        raise RuntimeError(f"boom in rank {rank}")
    if word == "refuse":
        raise DataError("dataset.path=nowhere: there is no such directory")
    if word == "unread":
        reading, writing = os.pipe()
        os.close(reading)
        os.write(writing, b"a line")
    if word == "exit":
        print("about to leave", file=sys.stderr)
        sys.exit(3)
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "no_memory":
        bytearray(1 << 50)
    if word == "abort":
        print(
            "terminate called after throwing an instance of 'std::bad_alloc'",
            file=sys.stderr,
            flush=True,
        )
        os.abort()
    if word == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if word in ("in_vain", "own_fault"):
        _wait_for(lambda: _state(directory / "pid1") == "T")
        raise RankError("waited in vain") if word == "in_vain" else DataError("no such column")
    if word == "until_told":
        _wait_for((directory / "go").exists)
    if word == "late":
        _wait_for(lambda: _state(directory / "pid1") in ("Z", "gone"))
        raise ConnectionError("connection closed by peer")
    if word == "wait":
        time.sleep(FOREVER_SECONDS)


def _wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def _state(file: Path) -> str:
    """The state of the process whose number stands in a file, as /proc has it; `gone` once it is no
    more, and nothing before there is a file.
    """
    if not file.exists():
        return ""
    try:
        status = Path("/proc", file.read_text(), "stat").read_text()
    except FileNotFoundError:
        return "gone"
    return status.rpartition(")")[2].split()[0]
