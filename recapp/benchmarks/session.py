"""The session of a benchmark, which every measurement uses on its rank: settings, other ranks,
files, progress, the records so far, and the engine: plans, sharded tables and their row rule.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recapp.benchmarks.bench_settings import BenchSettings
from recapp.benchmarks.ranks import open_transports
from recapp.benchmarks.rivals import Absent, Rival, rivals
from recapp.benchmarks.timing import MOST_STEPS, Contender, Measured, interleave
from recapp.benchmarks.workloads import BATCHES, Workload
from recapp.console import note, progress
from recapp.engine.sharded_collection import ShardedEmbeddingBagCollection, shard_bags
from recapp.optim.rules import RowRule, rowwise_adagrad
from recapp.planner.choose_modes import SAMPLE_BATCHES, decide_modes, initial_plan
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import PlanRule, PlanSettings
from recapp.planner.topology import Topology
from recapp.settings.records import record
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sharding.sharding_types import COLUMN_WIDTH
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingConfig, PoolingType, TableLookup
from recapp.tables.listed import listed_tables
from recapp.tables.table_settings import ListedTables
from recapp.transport.communicator import Comm

ROWS_FILE = "rows.json"  # in the run's directory: the records so far
LEARNING_RATE = 0.01
EPS = 1e-8
WHOLE_NAME = "table_wise"
WHOLE = PlanSettings(rules=(PlanRule(WHOLE_NAME),))
"""The plan that does not cut tables, and its name."""


def rule() -> RowRule:
    """Return the row rule of every benchmark and every rival: row-wise Adagrad."""
    return rowwise_adagrad(LEARNING_RATE, EPS)


def make_plan(
    name: str,
    plan_settings: PlanSettings,
    tables: Sequence[EmbeddingConfig],
    comm: Comm,
    batches: Sequence[KeyedJaggedTensor],
    lookups: Sequence[TableLookup] | None = None,
) -> ShardingPlan:
    """Return a plan by rules for these ranks. Every rank calls this function.

    Modes that the settings leave open are decided as in training, on rank 0's batches. Strips are
    narrow enough that every rank can have one: at dim 64 the usual 64 columns would make one strip
    of a table, and on two ranks they become 32 columns.

    Args:
        name: The name of the plan.
        plan_settings: The `rules`, and `mode`, `column_width` and `row_order` where they are set.
        tables: The tables.
        comm: The ranks.
        batches: This rank's batches.
        lookups: The lookups of the tables; None takes the lookups that the tables declare.
    """
    widest = max(t.embedding_dim for t in tables)
    width = min(plan_settings.column_width or COLUMN_WIDTH, -(-widest // comm.world))
    make = partial(
        plan_by_rules,
        tables,
        Topology(comm.world),
        plan_settings.rules or (),
        name=name,
        mode=plan_settings.mode or "auto",
        column_width=width,
        row_order=plan_settings.row_order or "natural",
    )
    return initial_plan(
        make, comm, count=lambda plan: decide_modes(tables, plan, batches[:SAMPLE_BATCHES], lookups)
    )


@dataclass
class Session:
    """One run of one verb on one rank.

    Args:
        settings: The checked settings of the command.
        comm: The ranks, through their process group.
        folder: The directory of temporary files, which all ranks share.
        directory: The directory of the run's records and pictures.
        rows: The records so far.
        more: Records of another kind, by the name of their table in `recapp.benchmarks.columns`.
    """

    settings: BenchSettings
    comm: Comm
    folder: Path
    directory: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def print_note(self, text: str) -> None:
        """Print a note on standard error, only on rank 0."""
        if self.comm.rank == 0:
            note(text)

    def add(self, row: dict[str, Any], table: str | None = None) -> None:
        """Add a record, and write all records so far, in case a later measurement never ends.

        Args:
            row: The record.
            table: The name of its table in `more`; None adds it to `rows`.
        """
        (self.rows if table is None else self.more.setdefault(table, [])).append(row)
        if self.comm.rank == 0:
            (self.directory / ROWS_FILE).write_text(
                json.dumps({"rows": self.rows, **self.more}, indent=1) + "\n"
            )

    def measure(
        self,
        title: str,
        contenders: Mapping[str, Contender],
        threads: int | None = None,
        most: int = MOST_STEPS,
    ) -> dict[str, Measured]:
        """Time contenders in rounds, with a progress bar on rank 0. Every rank calls this method.

        Args:
            title: The title of the progress bar.
            contenders: The contenders by name.
            threads: The threads of each contender; None changes nothing.
            most: The largest number of steps in a turn.
        """
        rounds = self.settings.rounds
        if threads is not None:
            torch.set_num_threads(threads)
            for contender in contenders.values():
                if isinstance(contender, Rival):
                    contender.threads = threads
        bar = progress(f"{title}, rounds", rounds) if self.comm.rank == 0 else nullcontext(_nobody)
        with bar as advance:
            return interleave(
                contenders,
                self.comm,
                rounds=rounds,
                seconds=self.settings.round_seconds,
                most=most,
                advance=advance,
            )

    def rivals(
        self, name: str, specs: list[dict[str, Any]]
    ) -> AbstractContextManager[Mapping[str, Rival | Absent]]:
        """Return a context with the contenders `<name>` and `<name>_tuned` of another Python. It is
        empty where the settings name no Python or the rival refuses. Every rank calls this method.

        Args:
            name: The name of the contender as installed.
            specs: The spec of each process of the contender.
        """
        python = self.settings.torchrec_python
        threads = max(self.settings.threads)
        return rivals(name, python, specs, self.folder, self.comm, threads)

    def by_threads(
        self,
        title: str,
        contenders: Mapping[str, Contender],
        specs: list[dict[str, Any]],
    ) -> Iterator[tuple[int, dict[str, Measured]]]:
        """Time contenders and FBGEMM on each number of threads of the settings in turn. Every rank
        calls this method.

        Args:
            title: The beginning of the progress bars' titles.
            contenders: The contenders by name.
            specs: The spec of each process of FBGEMM.

        Yields:
            The number of threads, and the times of all contenders.
        """
        with self.rivals("fbgemm", specs) as others:
            for threads in self.settings.threads:
                everybody = {**contenders, **others}
                yield threads, self.measure(f"{title}, threads: {threads}", everybody, threads)

    def open_transports(self) -> dict[str, Comm]:
        """Set the threads of this rank, and return a Comm for each transport of the settings. Every
        rank calls this method.
        """
        torch.set_num_threads(self.settings.threads[0])
        return open_transports(self.settings.transport)

    def plan(
        self,
        name: str,
        tables: Sequence[EmbeddingConfig],
        batches: Sequence[KeyedJaggedTensor],
        lookups: Sequence[TableLookup] | None = None,
    ) -> ShardingPlan:
        """Return a plan of the settings for some tables. Every rank calls this method.

        Args:
            name: The name of the plan.
            tables: The tables.
            batches: This rank's batches, which decide modes that the settings leave open.
            lookups: The lookups of the tables; None takes the lookups that the tables declare.
        """
        settings = record(PlanSettings, self.settings.plans[name], "plan")
        return make_plan(name, settings, tables, self.comm, batches, lookups)

    def listed_tables(self) -> list[EmbeddingConfig]:
        """Return the tables that the settings list."""
        listed = self.settings.tables
        assert isinstance(listed, ListedTables)
        return listed_tables(listed).tables

    def shard(
        self, tables: Sequence[EmbeddingConfig], plan: ShardingPlan, comm: Comm
    ) -> ShardedEmbeddingBagCollection:
        """Return a sharded collection of bags. Every rank calls this method.

        Args:
            tables: The tables.
            plan: The plan of the tables.
            comm: The ranks, through the transport of the tables.
        """
        return shard_bags(tables, plan, comm, rule(), backend=self.settings.backend)

    def whole(
        self,
        tables: Sequence[EmbeddingConfig],
        batches: Sequence[KeyedJaggedTensor],
        comm: Comm,
        by: RowRule | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """Return a sharded collection of bags with uncut tables.

        Args:
            tables: The tables.
            batches: The batches that decide the modes of the tables.
            comm: The ranks; usually only this one.
            by: The rule that updates the rows; None takes the rule of all benchmarks.
        """
        plan = make_plan(WHOLE_NAME, WHOLE, tables, comm, batches)
        return shard_bags(tables, plan, comm, by or rule(), backend=self.settings.backend)

    def batches(self, workload: Workload) -> list[KeyedJaggedTensor]:
        """Return this rank's batches, and write their ids to a file that rivals read.

        Every rank calls this method.
        """
        return workload.features_of(self.ids_of(workload))

    def ids_of(self, workload: Workload, batches: int = BATCHES) -> Tensor:
        """Return the ids of this rank's batches, and write them to a file that rivals read.

        Every rank calls this method.

        Args:
            workload: The tables and the shape of batches.
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

    def specs(
        self, kind: str, workload: Workload, plan: ShardingPlan | None = None, **more: Any
    ) -> list[dict[str, Any]]:
        """Return the specs of a rival's processes, one for each rank.

        Args:
            kind: The kind of step: `kernels`, `quantised`, `step` or `train`, as
                `torchrec_worker.py` describes them.
            workload: The tables and batches.
            plan: The plan of the tables, of which a spec has the sharding type and the ranks of
                each table, one rank for each column strip; None for tables of one process.
            more: Further entries of each spec.
        """
        tables = list(zip(workload.features, workload.rows_F, workload.dim_F, strict=True))
        shardings = {} if plan is None else plan.tables
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
                "sharding": {
                    name: (sharding.sharding_type, [shard.rank for shard in sharding.shards])
                    for name, sharding in shardings.items()
                },
            }
            | more
            for rank in range(self.comm.world)
        ]


def _nobody(_: int) -> None:
    """Show no progress, because rank 0 shows it."""
