"""The Lightning Strategy: tables are model parallel, the rest is DDP.

    setup_environment   make two process groups: Lightning's, and one for embedding traffic (one
                        rank needs Lightning's alone)
    setup               turn tables on the meta device into shards; wrap the rest in DDP, which
                        ignores the tables; make optimisers
    backward, step      train as one process with the global batch does
                        (`recapp/trainer/step_of_ranks.py`)
    save / load         a directory of rectangles (`recapp/stored`), readable under any plan and
                        any number of ranks

The plan follows from the facts that the ranks find at start:

    Comm, device                    -> a record for each rank -> Topology
    module, Topology, rule, data    -> PlanningProblem
    PlanningProblem, PlanSource     -> ShardingPlan

All other methods are DDPStrategy's. If Lightning's behaviour would be wrong or slow for shards, the
docstring of the method here explains why.
"""

import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from recapp import console
from recapp.data_parallel import compile_dense, group_of_trainers, wrap_dense
from recapp.engine.row_store import RowStore, StoredGroup
from recapp.engine.sharded_collection import (
    embedding_collections,
    shard_model,
    sharded_collections,
    sharded_tables,
    without_tables,
)
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError, LaunchError, PlanError, RankError
from recapp.graphs.several_ranks import OfRanks
from recapp.optim.named_rules import Rules
from recapp.optim.rules import rowwise_adagrad
from recapp.optim.table_rule import table_rule, with_frozen_of
from recapp.planner.choose_modes import SAMPLE_BATCHES, decide_modes, initial_plan
from recapp.planner.embedding_planner import EmbeddingShardingPlanner, plan_tables
from recapp.planner.hardware import Hardware
from recapp.planner.problem import PlanningProblem, Topology, dense_of, hosts_in_blocks
from recapp.planner.rank_memory import check_memory
from recapp.processes.process_memory import free_memory_bytes, host_id, memory_pools
from recapp.processes.rank_environment import rank_info
from recapp.processes.stopping import die_with_parent, saving
from recapp.settings.uris import path_to
from recapp.sharding.layout import Block
from recapp.sharding.plan_file import load_plan
from recapp.sharding.sharding_plan import Mode, ShardingPlan
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.stored.checkpoint import remove_checkpoint, with_absolute_paths, write_checkpoint
from recapp.stored.manifest import RUN, SAVED_AS, CheckpointManifest
from recapp.stored.plain_parts import check_state, state_must_fit
from recapp.stored.stored_model import load_together
from recapp.tables.collections import embedding_lookups, embedding_tables, read_from_data
from recapp.trainer.data_protocols import KeepsPosition, ProvidesStatistics, datamodule_of
from recapp.trainer.lightnings_parts import (
    RankEnvironment,
    WeightAverage,
    check_trainer,
    count_tables,
    limit_waits,
    reach_tables,
    read_when_shown,
)
from recapp.trainer.lookahead import LookAhead
from recapp.trainer.recorded_steps import recorded_steps
from recapp.trainer.restore import restore_in_one_line
from recapp.trainer.sharded_checkpoint import (
    SavedRun,
    StoredTables,
    dense_states,
    manifest_of,
    plain_part_of,
)
from recapp.trainer.step_of_ranks import StepOfRanks, rules_of_optimizers, running_statistics
from recapp.transport.batch_slots import BatchSlots
from recapp.transport.communicator import average_over_ranks, mean_hidden
from recapp.transport.join_ranks import make_comm
from recapp.transport.step_messages import hook_of

# The text of torch's error after some ranks have waited in vain for others.
LATE = re.compile(r"timed? ?out", re.IGNORECASE)
# The source of a plan beside None: a planner, whose arguments that are left open the run fills in;
# a plan or the path of one, checked against the tables and ranks of the run; or a function.
PlanSource = (
    EmbeddingShardingPlanner | ShardingPlan | str | Path | Callable[[PlanningProblem], ShardingPlan]
)


class EmbeddingShardingStrategy(StepOfRanks):
    """Shards every collection of a LightningModule and wraps the rest in DDP. One process runs the
    same code.

        Trainer(strategy=EmbeddingShardingStrategy(), accelerator="cpu", devices=2)

    The strategy uses ranks that were started from outside (`recapp.train`, torchrun, srun). If
    there are none, Lightning starts `devices` ranks, as for `ddp`: it runs a script once for each
    rank. A notebook starts ranks by `recapp.run_ranks`.

    Args:
        planner: The source of the plan: None for the planner, an `EmbeddingShardingPlanner` with
            constraints, a `ShardingPlan`, the path of a plan file, or a function of a
            `PlanningProblem` that returns a plan. Rank 0 plans, with the model's tables and
            lookups, the topology found at start, the row rule, id statistics of the first training
            rows and the dense part.
        rule: The row rule of all tables, or row rules by table name or glob. None takes the rule of
            an optimiser that is applied in backward, else the rule of the planner, else the rules
            that the module's optimisers say (`recapp/trainer/step_of_ranks.py`). Tables that the
            module trains by `sparse_groups()` alone have row-wise Adagrad.
        hosts: The number of hosts that the plan assumes; None takes the real number.
        memory_bytes: The memory of a rank for tables and their optimiser, in bytes; None takes the
            memory that is free at start.
        reserve_bytes: The bytes of this memory that tables may not use.
        hardware: The rates by which the planner estimates times; None takes the default of the
            device.
        transport: The transport of the tables' messages (`recapp/transport/join_ranks.py`).
        backend: The backend of the kernels (`recapp/kernels/backend.py`).
        payload: The dtype of the vectors and gradients that are sent; None takes the compute dtype.
        modes: The modes of tables whose plan leaves the mode open. Modes that stay open are decided
            by a count on the first training batches.
        look_ahead: The number of training batches whose input exchange runs early
            (`recapp/trainer/lookahead.py`); 0 for none.
        clip_tables: Whether Lightning's `gradient_clip_val` also clips gradients of table rows, by
            one norm over all gradients. Tables are then updated in the step of the module's
            `HybridOptimizer`, not in backward.
        compiled: Whether to compile the dense part by `torch.compile` in training.
        graphs: Whether to record the steps of a `TaskModule` on GPUs as CUDA graphs
            (`recapp/trainer/recorded_steps.py`).
        timeout: The longest time that a rank waits for another rank, with every transport; None
            takes torch's half an hour.
        make_store: Makes the store of each group, for tables that are only read; None makes stores
            whose rows are trained or loaded from a checkpoint.
        stored: Returns plain values that the manifest of every checkpoint keeps (the settings of
            the run).
        ddp: Arguments of DistributedDataParallel.

    Raises:
        ConfigError: `planner` is not a source of plans.
    """

    def __init__(
        self,
        planner: PlanSource | None = None,
        rule: Rules | None = None,
        *,
        hosts: int | None = None,
        memory_bytes: int | None = None,
        reserve_bytes: int = 0,
        hardware: Hardware | None = None,
        transport: str = "auto",
        backend: str = "auto",
        payload: torch.dtype | None = None,
        modes: Mapping[str, Mode] | None = None,
        look_ahead: int = 1,
        clip_tables: bool = False,
        compiled: bool = False,
        graphs: bool = True,
        timeout: timedelta | None = None,
        stored: Callable[[], Mapping[str, Any]] = dict,
        make_store: Callable[[StoredGroup], RowStore] | None = None,
        **ddp: Any,
    ) -> None:
        sources = (EmbeddingShardingPlanner, ShardingPlan, str, Path)
        if not (planner is None or callable(planner) or isinstance(planner, sources)):
            raise ConfigError(
                f"planner={planner!r}: must be an EmbeddingShardingPlanner, a ShardingPlan, the "
                "path of a plan file, a function that returns a plan for a PlanningProblem, or None"
            )
        info = rank_info()
        if (method := ddp.get("start_method", "popen")) != "popen":
            raise ConfigError(
                f"start_method={method}: the ranks would take the trained tables with them: leave "
                "it out, or start ranks by recapp.run_ranks(function, ranks=N)"
            )
        self.exchange_timeout = timeout or default_pg_timeout
        super().__init__(
            cluster_environment=RankEnvironment(info) if info else None,
            timeout=self.exchange_timeout,
            **(
                {"static_graph": True, "gradient_as_bucket_view": True, "broadcast_buffers": False}
                | ddp
            ),
        )
        self.planner = planner
        self.rule = rule
        self.named_rule = rule
        self.hosts = hosts
        self.stored = stored
        self.make_store = make_store
        self.memory_bytes = memory_bytes
        self.reserve_bytes = reserve_bytes
        self.transport = transport
        self.backend = backend
        self.payload = payload
        self.modes = dict(modes or {})
        self.look_ahead = look_ahead
        self.clip_tables = clip_tables
        self.compiled = compiled
        self.graphs = graphs
        self.hardware = hardware
        self.plan: ShardingPlan | None = None
        self.problem: PlanningProblem | None = None  # the problem of `plan`; on rank 0 alone
        self.ranks: list[dict[str, Any]] = []
        self.weight_average = WeightAverage()  # of the callback that updates it
        self._tables: list[ShardedTables] | None = None
        self.saved = SavedRun()

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.num_processes == 1:
            return
        if self.cluster_environment.creates_processes_externally:
            if rank_info() is None and self.cluster_environment.local_rank():
                die_with_parent()  # the script's first process is rank 0 and has started this one
        elif hasattr(sys, "ps1"):
            raise ConfigError(
                f"devices={self.num_processes}: no other process can run the cells of a notebook: "
                "train in a function, and start its ranks by recapp.run_ranks(function, ranks="
                f"{self.num_processes})"
            )
        else:
            super()._configure_launcher()

    @property
    def root_device(self) -> torch.device:
        """Return the device of this rank: one of the host's devices, or the only visible device if
        the launcher shows each rank its own device.
        """
        devices = self.parallel_devices or []
        return devices[self.local_rank if len(devices) > 1 else 0]

    def sharded_tables(self) -> list[ShardedTables]:
        """Return the sharded tables of the module; an empty list before `setup`.

        A step asks several times. So the walk over all modules is kept from `setup` on.
        """
        return (
            sharded_tables(self.lightning_module or nn.Module())
            if self._tables is None
            else self._tables
        )

    def sparse_groups(self) -> list[dict[str, Any]]:
        """Return the param groups of the tables, one per row rule, for `HybridOptimizer`."""
        return [group for shared in self.sharded_tables() for group in shared.param_groups]

    def without_tables(self) -> AbstractContextManager[None]:
        """Return a context manager that leaves tables out of the module's state dict."""
        module = self.lightning_module
        return without_tables([] if module is None else sharded_collections(module))

    def hidden_share(self) -> dict[str, float]:
        """Return the hidden share of this rank's messages by phase: of the time in which messages
        were under way, the share in which the host did other work.

        The phases are the phases of the tables' messages, and `dense` if dense gradients are
        averaged through shared memory. The share is the mean over all exchanges.
        """
        waits = [shared.waits for shared in self.sharded_tables()]
        return mean_hidden(
            [*waits, *([self.gradient_average.waits] if self.gradient_average else [])]
        )

    def setup_environment(self) -> None:
        """Make the process group; several ranks have a second one for embedding traffic, so that
        its messages keep their own order.

        Raises:
            LaunchError: The ranks cannot meet, because a port is taken or an address cannot be
                reached; or `transport` asks for shared memory and the ranks cannot share memory.
            RankError: The ranks do not meet in time.
        """
        assert self.lightning_module is not None
        check_trainer(self.lightning_module.trainer)  # before a callback copies the module
        read_when_shown(self.lightning_module.trainer)
        limit_waits(
            self.lightning_module.trainer,
            partial(dist.new_group, backend="gloo", timeout=self.exchange_timeout),
        )
        try:
            super().setup_environment()
        except dist.DistError as e:
            cluster = self.cluster_environment
            assert cluster is not None
            kind = RankError if LATE.search(str(e)) else LaunchError
            raise kind(
                f"the ranks could not meet at {cluster.main_address}:{cluster.main_port} "
                f"(MASTER_ADDR, MASTER_PORT): {' '.join(str(e).split())}"
            ) from e
        if self.comm.group is None:
            self.comm = make_comm(
                group_of_trainers(self.exchange_timeout),
                self.root_device,
                self.transport,
                self.exchange_timeout.total_seconds(),
            )

    def setup(self, trainer: Trainer) -> None:
        """Shard the tables first, so that no rank ever holds a whole table; then wrap the rest in
        DDP.
        """
        assert (
            self.accelerator is not None
            and self.model is not None
            and self.lightning_module is not None
        )
        self.accelerator.setup(trainer)
        count_tables(trainer.callbacks)  # type: ignore[attr-defined]
        self._shard(self.lightning_module)
        self._tables = sharded_tables(self.lightning_module)
        self.recorded = None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.compiled and fitting:
            parts = ", ".join(compile_dense(self.lightning_module))
            if self.is_global_zero:
                console.note(f"torch.compile has {parts}: first calls of a shape take seconds")
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if fitting:
            self.model = self._setup_model(self.lightning_module)
            self.setup_optimizers(trainer)
            self._tables = sharded_tables(self.lightning_module)
        self.setup_precision_plugin()
        if fitting:
            self.update_in_step(trainer)
        restore_in_one_line(trainer)

    def _shard(self, module: LightningModule) -> None:
        of_planner = (
            self.planner.rule if isinstance(self.planner, EmbeddingShardingPlanner) else None
        )
        self.named_rule = self.named_rule or table_rule(module) or of_planner
        asked = embedding_collections(module) and module.trainer.state.fn == TrainerFn.FITTING
        of_module = rules_of_optimizers(module) if asked and self.named_rule is None else None
        self.rule = self.named_rule or of_module or self.rule or rowwise_adagrad()
        if self.plan is None:
            topology = self._find_topology()
            self.plan = initial_plan(
                partial(self._make_plan, module, topology),
                self.comm,
                modes=self.modes,
                count=partial(with_counted_modes, module),
            )
        for name, sharding in self.plan.tables.items():
            if sharding.as_parameter:
                raise PlanError(
                    f"table {name} is to be a parameter (as_parameter), which "
                    "DistributedModelParallel alone makes it: leave as_parameter out"
                )
        shard_model(
            module,
            self.plan,
            self.comm,
            self.rule,
            self.backend,
            self.payload,
            module.trainer.training,
            self.make_store,
        )
        reach_tables(module)

    def _find_topology(self) -> Topology:
        """Find `host`, `host_id`, `device`, `backend` and `free_bytes` of every rank, `ranks`, and
        return their topology. It is collective.
        """
        here = {
            "host": socket.gethostname(),
            "host_id": host_id(),
            "device": str(self.root_device),
            "backend": dist.get_backend(self.comm.group),
        }
        pools_W = self.comm.all_gather(memory_pools(self.root_device))
        free = self.memory_bytes
        if free is None:
            free = free_memory_bytes(pools_W)[self.comm.rank]
        self.ranks = self.comm.all_gather(here | {"free_bytes": free})
        free_W = [rank["free_bytes"] for rank in self.ranks]
        return Topology(
            len(self.ranks),
            self.hosts or hosts_in_blocks([rank["host_id"] for rank in self.ranks]),
            self.root_device.type,
            None if None in free_W else free_W,
            self.reserve_bytes,
            self.hardware,
        )

    def _make_plan(self, module: LightningModule, topology: Topology) -> ShardingPlan:
        """Return the plan; called on rank 0, because only rank 0 reads the data for it.

        Id statistics are measured only if several ranks train. Batch sizes, payload and look-ahead
        have their defaults.
        """
        assert self.rule is not None
        tables = embedding_tables(module)
        data = _data_to_look_at(module, topology.world_size) if tables else None
        self.problem = PlanningProblem(
            tables,
            topology,
            rule=with_frozen_of(self.rule, module),
            statistics={} if data is None else data.statistics(*read_from_data(module)),
            dense=dense_of(module),
            lookups=embedding_lookups(module),
            average_every=self.weight_average.every,
            graphs=self.graphs,
        )
        return plan_from(self.planner, self.problem)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        """Wrap the dense part in DDP, on the default stream.

        Lightning 2.6 wraps on a side stream, and gradients then wait for the wrong stream.
        """
        wrapped = wrap_dense(
            model, self.comm, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs
        )
        self.gradient_average = hook_of(wrapped)
        self._statistics = running_statistics(model)
        return wrapped

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Copy a `Batch` in one copy, without waiting for it. Lightning does not know the type, and
        would wait for each of its tensors.
        """
        if isinstance(batch, Batch) and device in (None, self.root_device):
            return self.batch_slots.to_device(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @cached_property
    def batch_slots(self) -> BatchSlots:
        """The memory through which batches reach the device."""
        return BatchSlots(self.root_device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Wrap the loader of training batches in `LookAhead`. A step that is recorded with its
        tables finds the rows of its own batch alone, so only the copy of a batch is early there.

        Lightning calls it once all is restored, and before it reads a batch: so steps that are to
        be recorded are made here.

        Return a loader with a `state_dict` unchanged, because it would count batches that were read
        but not trained. Return the loader of an evaluation unchanged too: without a backward there
        is too little work to hide an exchange.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        if self.graphs and self.recorded is None:
            self.recorded = recorded_steps(
                trainer,
                self.sharded_tables(),
                self.capture,
                OfRanks(self.share, average_over_ranks) if self.comm.world > 1 else None,
            )
        if not self.look_ahead or hasattr(dataloader, "state_dict"):
            return dataloader
        early = self.recorded is None or self.recorded.exchanges
        exchanging = self.sharded_tables if early else list
        return LookAhead(dataloader, self.look_ahead, exchanging, self._to_device, self.comm.side)

    def _to_device(self, batch: Any) -> Any:
        """Copy a batch to the device. A module's own transfer hooks run later, in the batch's
        step.
        """
        return (
            self.batch_to_device(batch)
            if isinstance(batch, Batch)
            else move_data_to_device(batch, self.root_device)
        )

    def on_train_end(self) -> None:
        """End the early exchanges of batches that a limit or a stop leaves untrained, and recorded
        steps.

        Lightning does not call it after an exception. It would hang then, because another rank may
        be gone; the next `fit` ends the exchanges.
        """
        for shared in self.sharded_tables():
            shared.forget_ahead()
        if self.recorded is not None:
            self.recorded.end()
        self.recorded = None

    @saving()
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint directory: every rank writes its rectangles, rank 0 writes the rest.
        It is collective.
        """
        assert self.lightning_module is not None and self.plan is not None
        if self.recorded is not None:
            self.recorded.finish()
        module = self.lightning_module
        path = path_to(self.broadcast(os.fspath(filepath)))
        step = module.trainer.global_step
        stored = {**self.stored(), RUN: self.saved.run, SAVED_AS: path.name}
        parameters = dict(module.named_parameters()) | self.weight_average.tensors()
        write_checkpoint(
            path,
            [
                b
                for shared in self.sharded_tables()
                for b in shared.blocks(self.weight_average.updates > 0)
            ],
            comm=self.comm,
            meta=plain_part_of(module.trainer, checkpoint, path.parent)
            | self.weight_average.entries(),
            manifest=stored | manifest_of(module.trainer, module, self.plan),
            parameters=parameters,
            states=dense_states(module),
            saved=self.saved.newest if self.saved.step == step else None,
        )
        self.saved = SavedRun(self.saved.run, path, step)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the dense part, without tables: they are saved as rectangles. Where
        weights are averaged, it has their average.
        """
        with self.without_tables():
            state = super().lightning_module_state_dict()
        return self.weight_average.averaged(state)

    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill this rank's rectangles from a checkpoint of any plan, and return the rest of the
        checkpoint. Load optimiser state only for training.
        """
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        data = datamodule_of(self.lightning_module.trainer)
        tables = StoredTables(self.sharded_tables(), fitting, self.is_global_zero)
        parameters = [name for name, _ in self.lightning_module.named_parameters()]

        def to_fill(manifest: CheckpointManifest) -> Iterable[Block]:
            if isinstance(data, KeepsPosition):
                data.check_ids(checkpoint_path, manifest.info)
            return tables.to_fill(manifest)

        stored, meta = load_together(checkpoint_path, to_fill, parameters, self.comm)
        tables.filled(stored.manifest)
        check_state(meta, checkpoint_path, trains=fitting)
        meta = with_absolute_paths(meta, checkpoint_path)
        if not fitting:
            return meta
        self.saved.run = stored.manifest.run
        return self.weight_average.loaded(meta, self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the dense part, without tables: `load_checkpoint` has loaded their rectangles.

        Raises:
            CheckpointError: The state belongs to another model.
        """
        with state_must_fit("the dense part", "model"), self.without_tables():
            super().load_model_state_dict(checkpoint, strict)

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a checkpoint directory, on rank 0. If `last.ckpt` points to this directory, point
        it to the newest checkpoint.
        """
        if self.is_global_zero:
            remove_checkpoint(filepath, instead=self.saved.newest)

    def teardown(self) -> None:
        """End the run, and keep tables and optimiser state on their device: the base class would
        copy them to the CPU.
        """
        assert self.cluster_environment is not None and self.accelerator is not None
        self._tables = None
        if self.lightning_module is not None:
            self.model = self.lightning_module
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def strategy_of(trainer: Trainer) -> EmbeddingShardingStrategy:
    """Return the strategy of a trainer that shards tables."""
    assert isinstance(trainer.strategy, EmbeddingShardingStrategy)
    return trainer.strategy


def with_counted_modes(module: LightningModule, plan: ShardingPlan) -> ShardingPlan:
    """Return the plan with its open modes decided: count the bytes that each mode exchanges in the
    first training batches.

    Return the plan unchanged if there are no batches to count.
    """
    data = _data_to_look_at(module, plan.world_size)
    batches = [] if data is None else [batch.sparse for batch in data.sample(SAMPLE_BATCHES)]
    if not batches:
        return plan
    tables, lookups = read_from_data(module)
    part = decide_modes(tables, plan.part([t.name for t in tables]), batches, lookups)
    return plan.with_modes({n: part.tables[n].mode for n in plan.undecided if n in part.tables})


def _data_to_look_at(module: LightningModule, world: int) -> ProvidesStatistics | None:
    data = datamodule_of(module.trainer)
    fitting = module.trainer.state.fn == TrainerFn.FITTING
    return data if world > 1 and fitting and isinstance(data, ProvidesStatistics) else None


def plan_from(source: PlanSource | None, problem: PlanningProblem) -> ShardingPlan:
    """Return the plan of a run.

    Args:
        source: The source of the plan.
        problem: The planning problem, with the hardware and data that the ranks have found.

    Raises:
        PlanError: No plan fits, or the plan is for other tables or ranks.
        ConfigError: A function returned no `ShardingPlan`.
    """
    if source is None:
        return plan_tables(problem).plan
    if isinstance(source, EmbeddingShardingPlanner):
        plan = source.plan_problem(problem)
        _check_ranks(plan, problem, "planner=EmbeddingShardingPlanner(topology=...)")
        return plan
    if isinstance(source, str | Path):
        plan = load_plan(source, problem.tables, problem.topology.world_size, problem.lookups)
    elif isinstance(source, ShardingPlan):
        plan = source
        _check_ranks(plan, problem, "planner=ShardingPlan(...)")
        plan.check(problem.tables)
    else:
        plan = source(problem)
        if not isinstance(plan, ShardingPlan):
            raise ConfigError(
                f"planner: the function returned a {type(plan).__name__}: it must return a "
                "ShardingPlan, as EmbeddingShardingPlanner().plan_problem(problem) does"
            )
        return plan
    check_memory(problem.tables, plan, problem.rule, problem.topology, problem.averaged)
    return plan


def _check_ranks(plan: ShardingPlan, problem: PlanningProblem, where: str) -> None:
    ranks = problem.topology.world_size
    if plan.world_size != ranks:
        raise PlanError(
            f"{where}: its plan is for {plan.world_size} ranks, and the run has {ranks}: start "
            f"{plan.world_size} ranks, or plan for {ranks}"
        )
