"""The session of a benchmark, with which every measurement works on a rank: the settings, the other
ranks, files, progress, and the records made so far.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from recapp.benchmarks.setup import EPS, LEARNING_RATE
from recapp.benchmarks.timing import MOST_STEPS, Contender, Measured, interleave
from recapp.benchmarks.workloads import BATCHES, Workload
from recapp.console import note, progress
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import PoolingType
from recapp.transport.communicator import Comm

ROWS_FILE = "rows.json"  # in the run's directory: the records made so far


@dataclass
class Session:
    """One run of one verb on one rank.

    Args:
        settings: The checked settings of the command.
        comm: The ranks, through their process group.
        folder: The directory of temporary files, which all ranks share.
        directory: The directory of the run's records and pictures.
        rows: The records made so far.
        more: Records of another kind, by the name of their table in `recapp.benchmarks.columns`.
    """

    settings: dict[str, Any]
    comm: Comm
    folder: Path
    directory: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def print_note(self, text: str) -> None:
        """Print a note on standard error, on rank 0 alone."""
        if self.comm.rank == 0:
            note(text)

    def add(self, row: dict[str, Any]) -> None:
        """Add a record, and write all records so far, in case the next one never ends."""
        self.rows.append(row)
        if self.comm.rank == 0:
            (self.directory / ROWS_FILE).write_text(
                json.dumps({"rows": self.rows}, indent=1) + "\n"
            )

    def measure(
        self, title: str, contenders: Mapping[str, Contender], most: int = MOST_STEPS
    ) -> dict[str, Measured]:
        """Time contenders in rounds, with a progress bar on rank 0. Every rank calls it.

        Args:
            title: The title of the progress bar.
            contenders: The contenders by name.
            most: The most steps of a turn.
        """
        rounds = self.settings["rounds"]
        seconds = self.settings["round_seconds"]
        if self.comm.rank:
            return interleave(contenders, self.comm, rounds=rounds, seconds=seconds, most=most)
        with progress(f"{title}, rounds", rounds) as advance:
            return interleave(
                contenders,
                self.comm,
                rounds=rounds,
                seconds=seconds,
                most=most,
                advance=advance,
            )

    def batches(self, workload: Workload) -> list[KeyedJaggedTensor]:
        """Return this rank's batches, and write their ids to a file that rivals read.

        Every rank calls it.
        """
        return workload.features_of(self.ids_of(workload))

    def ids_of(self, workload: Workload, batches: int = BATCHES) -> Tensor:
        """Return the ids of this rank's batches, and write them to a file that rivals read.

        Every rank calls it.

        Args:
            workload: What is looked up.
            batches: The number of batches.
        """
        ids_NL = workload.draw(self.comm.rank, batches)
        path = self.ids_file(workload, self.comm.rank)
        if not path.exists():
            np.save(path, ids_NL.numpy())
        self.comm.barrier()
        return ids_NL

    def ids_file(self, workload: Workload, rank: int) -> Path:
        """Return the path of the file with a rank's ids."""
        return self.folder / f"{workload.name}_{rank}.npy"

    def specs(self, kind: str, workload: Workload, **more: Any) -> list[dict[str, Any]]:
        """Return what each process of a rival builds, one process for each rank.

        Args:
            kind: What is built: `kernels`, `quantised`, `step` or `train`; `torchrec_worker.py`
                says more.
            workload: The tables and batches.
            more: Further entries, such as the sharding.
        """
        tables = list(zip(workload.features, workload.rows_F, workload.dim_F, strict=True))
        return [
            {
                "kind": kind,
                "tables": tables,
                "batch_size": workload.batch_size,
                "bags": workload.bag_F,
                "pooled": workload.pooling is PoolingType.SUM,
                "ids": str(self.ids_file(workload, rank)),
                "learning_rate": LEARNING_RATE,
                "eps": EPS,
            }
            | more
            for rank in range(self.comm.world)
        ]
