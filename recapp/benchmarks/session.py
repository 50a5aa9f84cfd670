"""What every measurement works with on a rank: the settings, the other ranks, files, progress, and
the records made so far.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recapp.benchmarks.setup import EPS, LEARNING_RATE
from recapp.benchmarks.timing import Contender, Measured, interleave
from recapp.benchmarks.workloads import Workload
from recapp.console import note, progress
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.transport.communicator import Comm

ROWS_FILE = "rows.json"  # in the run's directory: what has been measured so far


@dataclass
class Session:
    """One run of one verb on one rank.

    Args:
        settings: of the command, checked.
        comm: the ranks, through their process group.
        folder: for files of this run only; all ranks have the same.
        directory: where the run leaves its records and pictures.
    """

    settings: dict[str, Any]
    comm: Comm
    folder: Path
    directory: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Rank 0 speaks, on standard error."""
        if self.comm.rank == 0:
            note(text)

    def add(self, row: dict[str, Any]) -> None:
        """One more record; all so far are in the run's directory, should the next never end."""
        self.rows.append(row)
        if self.comm.rank == 0:
            (self.directory / ROWS_FILE).write_text(
                json.dumps({"rows": self.rows}, indent=1) + "\n"
            )

    def measure(self, title: str, contenders: Mapping[str, Contender]) -> dict[str, Measured]:
        """Time contenders in rounds, with progress."""
        rounds = self.settings["rounds"]
        seconds = self.settings["round_seconds"]
        if self.comm.rank:
            return interleave(contenders, self.comm, rounds=rounds, seconds=seconds)
        with progress(f"{title}, rounds", rounds) as advance:
            return interleave(
                contenders, self.comm, rounds=rounds, seconds=seconds, advance=advance
            )

    def batches(self, workload: Workload) -> list[KeyedJaggedTensor]:
        """This rank's batches; their ids are left in a file that rivals read."""
        ids_NL = workload.draw(self.comm.rank)
        path = self.ids_file(workload, self.comm.rank)
        if not path.exists():
            np.save(path, ids_NL.numpy())
        self.comm.barrier()
        return workload.features_of(ids_NL)

    def ids_file(self, workload: Workload, rank: int) -> Path:
        """Where a rank's ids lie."""
        return self.folder / f"{workload.name}_{rank}.npy"

    def specs(self, kind: str, workload: Workload, **more: Any) -> list[dict[str, Any]]:
        """What the rivals' processes, one for each rank, are told to build."""
        tables = list(zip(workload.features, workload.rows_F, workload.dim_F, strict=True))
        return [
            {
                "kind": kind,
                "tables": tables,
                "batch_size": workload.batch_size,
                "bags": workload.bag_F,
                "ids": str(self.ids_file(workload, rank)),
                "learning_rate": LEARNING_RATE,
                "eps": EPS,
            }
            | more
            for rank in range(self.comm.world)
        ]
