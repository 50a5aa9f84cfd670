"""The session of a benchmark on one rank: settings, other ranks, plans, sharded tables and rows of
results.

JOB/resolved.yaml -> run -> a measurement -> JOB/rows.json, JOB/metrics.json
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recapp.benchmarks.timing import MOST_STEPS, Contender, Measured, interleave
from recapp.console import progress
from recapp.engine.sharded_collection import ShardedEmbeddingBagCollection, shard_bags
from recapp.optim.rules import RowRule, rowwise_adagrad
from recapp.planner.choose_modes import SAMPLE_BATCHES, decide_modes, initial_plan
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import PlanSettings
from recapp.planner.problem import Topology
from recapp.processes.process_memory import keep_freed_memory
from recapp.processes.rank_environment import device_of, rank_info
from recapp.run.recipe import recipe_of
from recapp.settings.records import record
from recapp.settings.whole_file import write_whole
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sharding.sharding_types import COLUMN_WIDTH
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingConfig, TableLookup
from recapp.transport.communicator import Comm, leave_process_group
from recapp.transport.join_ranks import make_comm

ROWS_FILE = "rows.json"  # in the run's directory: the rows of results so far
LEARNING_RATE = 0.01
EPS = 1e-8
CPU = torch.device("cpu")


def rule() -> RowRule:
    """Return the row rule of every benchmark: row-wise Adagrad."""
    return rowwise_adagrad(LEARNING_RATE, EPS)


def listed(value: Any) -> tuple[Any, ...]:
    """Return the values of a setting that takes one or several."""
    return value if isinstance(value, tuple) else (value,)


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
    make = partial(
        plan_by_rules,
        tables,
        Topology(comm.world),
        plan_settings.rules or (),
        name=name,
        mode=plan_settings.mode or "auto",
        column_width=min(plan_settings.column_width or COLUMN_WIDTH, -(-widest // comm.world)),
        row_order=plan_settings.row_order or "natural",
    )
    return initial_plan(
        make, comm, count=lambda plan: decide_modes(tables, plan, batches[:SAMPLE_BATCHES], lookups)
    )


@dataclass
class Session:
    """One run of one verb on one rank.

    Args:
        settings: The record of the verb's settings.
        comm: The ranks, through their process group.
        directory: The directory of `rows.json`.
        rules: The settings of each plan, by its name.
        rows: The rows of results so far.
        device: The device of the tables and of the model.
    """

    settings: Any
    comm: Comm
    directory: Path
    rules: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    device: torch.device = CPU

    def add(self, row: dict[str, Any]) -> None:
        """Add a row of results, and write all so far, in case a later measurement never ends."""
        self.rows.append(row)
        self.write(ROWS_FILE)

    def write(self, name: str) -> None:
        """Write all rows into a file of the run's directory, on rank 0."""
        if self.comm.rank == 0:
            text = json.dumps({"rows": self.rows}, indent=1)
            write_whole(self.directory / name, text + "\n")

    def measure(
        self, title: str, contenders: Mapping[str, Contender], most: int = MOST_STEPS
    ) -> dict[str, Measured]:
        """Time contenders in rounds, with a progress bar on rank 0. Every rank calls this method.

        Args:
            title: The title of the progress bar.
            contenders: The contenders by name.
            most: The largest number of steps in a turn.
        """
        rounds = self.settings.rounds
        nobody: Callable[[int], None] = lambda _: None  # noqa: E731
        bar = progress(f"{title}, rounds", rounds) if self.comm.rank == 0 else nullcontext(nobody)
        with bar as advance:
            return interleave(
                contenders,
                self.comm,
                rounds=rounds,
                seconds=self.settings.round_seconds,
                most=most,
                advance=advance,
            )

    def transport(self, name: str) -> Comm:
        """Return the ranks through a transport. Every rank calls this method.

        Args:
            name: The name of the transport; `auto` chooses one.

        Raises:
            LaunchError: The transport does not work here.
        """
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        group = dist.new_group(backend=backend) if dist.is_initialized() else None
        return make_comm(group, self.device, name)

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
        settings = record(PlanSettings, self.rules[name], "plan")
        return make_plan(name, settings, tables, self.comm, batches, lookups)

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


def run(plain: dict[str, Any], job_dir: Path) -> None:
    """Measure on this rank. Every rank calls this function.

    Args:
        plain: The plain settings; and `command`, the name of their record in `COMMANDS`; `measure`,
            the dotted name of the function that measures in a session; `rules`, the settings of
            each plan by its name.
        job_dir: The directory of the results.
    """
    more = {key: plain.pop(key, {}) for key in ("command", "measure", "rules")}
    settings = recipe_of(plain, more["command"])
    if getattr(settings, "engine", settings).keep_freed_memory:
        keep_freed_memory()  # as the worker of training does
    if isinstance(threads := getattr(settings, "threads", None), int):
        torch.set_num_threads(threads)
    here = rank_info()
    device = device_of(getattr(settings, "device", "cpu"), here)
    if here is not None and here.world > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    session = Session(settings, Comm(), job_dir, more["rules"], device=device)
    module, _, function = more["measure"].rpartition(".")
    getattr(import_module(module), function)(session)
    session.comm.barrier()
    session.write("metrics.json")
    leave_process_group()
