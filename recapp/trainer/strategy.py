"""The Lightning Strategy: tables are model parallel, the rest is DDP.

    setup_environment   the process group, and one of its own for embedding traffic
    setup               tables on the meta device become shards; DDP wraps the rest and ignores
                        them; optimisers
    backward            the loss is weighed by this rank's share of the global batch; tables are
                        updated inside
    save / load         a directory of rectangles (`recapp/stored`), read under any plan and
                        any number of ranks

Everything else is DDPStrategy. Where Lightning would do something that is wrong or slow for shards,
the docstring of the method here says why.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from recapp import console
from recapp.engine import sharded_state
from recapp.engine.row_store import RowStore, StoredGroup
from recapp.engine.shard_model import (
    compile_dense,
    shard_model,
    sharded_collections,
    sharded_tables,
    wrap_dense,
)
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError, PlanError
from recapp.optim.rules import rowwise_adagrad
from recapp.optim.rules_by_table import Rules
from recapp.optim.table_rule import table_rule
from recapp.planner.hardware import Hardware
from recapp.planner.initial_plan import initial_plan
from recapp.planner.problem import PlanningProblem
from recapp.planner.topology import Topology, hosts_in_blocks
from recapp.processes.data_workers import die_with_parent
from recapp.processes.rank_environment import rank_info
from recapp.processes.stopping import saving
from recapp.sharding.sharding_plan import Mode, ShardingPlan
from recapp.sparse.batch import Batch
from recapp.stored.checkpoint import (
    load_together,
    remove_checkpoint,
    write_checkpoint,
)
from recapp.stored.training_state import check_state, state_must_fit
from recapp.trainer.clip_tables import clip_tables_too
from recapp.trainer.data_protocols import KeepsPosition, datamodule_of
from recapp.trainer.environment import RankEnvironment, meeting_error
from recapp.trainer.forked_ranks import (
    FORK,
    TABLES_LEFT,
    ForkedRanks,
    check_tables_are_here,
    in_a_notebook,
)
from recapp.trainer.found_problem import found_problem, found_ranks, with_counted_modes
from recapp.trainer.lookahead import LookAhead
from recapp.trainer.model_summary import count_tables
from recapp.trainer.plan_source import PlanSource, check_source, plan_from, rule_of_planner
from recapp.trainer.saved_manifest import manifest_of
from recapp.trainer.stored_tables import StoredTables
from recapp.trainer.whole_checkpoint import read_for_lightning
from recapp.transport.choose_transport import make_comm
from recapp.transport.communicator import Comm
from recapp.transport.dense_gradients import AverageOverRanks, hook_of
from recapp.transport.waits import mean_hidden

read_for_lightning()  # here, as who loads a checkpoint has no strategy yet


def check_precision(precision: object) -> None:
    """Check that tables can be trained in a precision.

    Raises:
        ConfigError: It is 16-mixed: the loss is scaled there, and tables would be updated with the
            scaled gradient.
    """
    if precision == "16-mixed":
        raise ConfigError(
            "trainer.precision=16-mixed: tables are updated in backward, where the scaled loss "
            "would reach them; use bf16-mixed"
        )


class EmbeddingShardingStrategy(DDPStrategy):
    """Shards every collection of a LightningModule and wraps the rest in DDP. One process runs the
    same code.

        Trainer(strategy=EmbeddingShardingStrategy(), accelerator="cpu", devices=2)

    Ranks that were started from outside (`recapp.train`, torchrun, srun) are used. Otherwise
    Lightning starts `devices` ranks, as it does for `ddp`: a script runs once for each of them, and
    a notebook forks them.

    Args:
        planner: Where the plan comes from: None for the planner, an `EmbeddingShardingPlanner` with
            constraints, a `ShardingPlan`, the path of a plan file, or a function of a
            `PlanningProblem` that returns a plan. Rank 0 plans, with the model's tables and
            lookups, the topology found at start, the rule, id statistics of the first training
            rows and the dense part.
        rule: What an update does to a touched row, or rules by table name or glob. None takes that
            of an optimiser applied in backward, or of the planner, else row-wise Adagrad.
        hosts: The number of hosts that the plan assumes; None takes the real ones.
        memory_bytes: The memory of a rank for tables and their optimiser, in bytes; None takes what
            is free at start.
        reserve_bytes: The bytes of it that tables may not use.
        hardware: What steps cost, for the planner; None takes the default of the device.
        transport: How the tables' messages are sent (`recapp/transport/choose_transport.py`).
        backend: Which kernels run (`recapp/kernels/backend.py`).
        payload: The type of the vectors and gradients that are sent; None takes the compute type.
        modes: The modes of tables whose plan leaves the mode open; any that is still open is
            decided by counting the first training batches.
        look_ahead: The training batches whose input exchange runs before their turn
            (`recapp/trainer/lookahead.py`); 0 for none.
        clip_tables: Whether Lightning's `gradient_clip_val` clips gradients of table rows, too, by
            one norm of all: then tables are updated in the step of the module's `HybridOptimizer`,
            and not in backward.
        compiled: Whether the dense part is compiled by `torch.compile` in training.
        timeout: How long a rank waits for a silent one, with every transport; None for torch's half
            an hour.
        make_store: Makes the rows of each group, of tables that are only read; None makes rows that
            are trained or loaded.
        stored: Returns plain values that the manifest of every checkpoint keeps (the settings of
            the run).
        ddp: Arguments of DistributedDataParallel, and Lightning's `start_method` of ranks.

    Raises:
        ConfigError: A plan cannot come from `planner`.
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
        timeout: timedelta | None = None,
        stored: Callable[[], Mapping[str, Any]] = dict,
        make_store: Callable[[StoredGroup], RowStore] | None = None,
        **ddp: Any,
    ) -> None:
        check_source(planner)
        info = rank_info()
        self.exchange_timeout = timeout or default_pg_timeout
        if info is None and in_a_notebook():
            ddp.setdefault("start_method", FORK)
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
        self.hardware = hardware
        self.plan: ShardingPlan | None = None
        self.problem: PlanningProblem | None = None  # that the plan was made for; rank 0 alone
        self.ranks: list[dict[str, Any]] = []
        self.average: AverageOverRanks | None = None
        self.comm = Comm()
        self._newest: Path | None = None  # the checkpoint that was saved last

    def _configure_launcher(self) -> None:
        """Let Lightning start the ranks, unless there is one alone or they have been started."""
        assert self.cluster_environment is not None
        if self.num_processes == 1:
            return
        if self.cluster_environment.creates_processes_externally:
            if rank_info() is None and self.cluster_environment.local_rank():
                die_with_parent()  # the script's first process is rank 0 and has started this one
            return
        if self._start_method == FORK:
            self._launcher = ForkedRanks(self, FORK)
        else:
            super()._configure_launcher()

    @property
    def root_device(self) -> torch.device:
        """Return the device of this rank: one of its host's, or the only one that it sees where a
        launcher shows each rank its own.
        """
        devices = self.parallel_devices or []
        return devices[self.local_rank if len(devices) > 1 else 0]

    def sharded_tables(self) -> list[ShardedTables]:
        """Return the sharded tables of the module; none before it was set up."""
        return sharded_tables(self.lightning_module) if self.lightning_module is not None else []

    def sparse_groups(self) -> list[dict[str, Any]]:
        """Return the param groups of the tables, one of each rule, for `HybridOptimizer`."""
        return [group for shared in self.sharded_tables() for group in shared.param_groups]

    def without_tables(self) -> AbstractContextManager[None]:
        """Leave tables out of the module's state dict for a while."""
        module = self.lightning_module
        return sharded_state.without_tables([] if module is None else sharded_collections(module))

    def hidden_share(self) -> dict[str, float]:
        """Return by phase the share of the time this rank's messages were under way in which the
        host did other work.

        The phases are those of the tables' messages, and `dense` where the ranks' gradients are
        averaged through shared memory. Of several exchanges it is the mean.
        """
        waits = [shared.waits for shared in self.sharded_tables()]
        return mean_hidden([*waits, *([self.average.waits] if self.average else [])])

    def setup_environment(self) -> None:
        """Make the process group, and one of its own for embedding traffic, so that its messages
        keep their own order.

        Raises:
            LaunchError: The ranks do not meet, because a port is taken or an address cannot be
                reached; or they cannot share memory though they should.
            RankError: They do not meet in time.
        """
        try:
            super().setup_environment()
        except dist.DistError as e:
            cluster = self.cluster_environment
            assert cluster is not None
            raise meeting_error(e, cluster) from e
        if self.comm.group is None:
            self.comm = make_comm(
                dist.new_group(timeout=self.exchange_timeout),
                self.root_device,
                self.transport,
                self.exchange_timeout.total_seconds(),
            )

    def setup(self, trainer: Trainer) -> None:
        """Shard the tables first, so that no rank ever holds a whole one; then wrap the rest in
        DDP.
        """
        assert (
            self.accelerator is not None
            and self.model is not None
            and self.lightning_module is not None
        )
        self.accelerator.setup(trainer)
        self._check_settings(trainer)
        count_tables(trainer.callbacks)  # type: ignore[attr-defined]
        self._shard(self.lightning_module)
        if self.compiled and trainer.state.fn == TrainerFn.FITTING:
            self._compile(self.lightning_module)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.model = self._setup_model(self.lightning_module)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if self.clip_tables and trainer.state.fn == TrainerFn.FITTING:
            clip_tables_too(trainer, self.optimizers, self.sharded_tables())
        self._remove_stop_broadcast(trainer)

    def _check_settings(self, trainer: Trainer) -> None:
        check_precision(trainer.precision)
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: tables are "
                "updated in every backward; use a larger dataset.batch_size instead"
            )

    def _shard(self, module: LightningModule) -> None:
        if not self.rule:
            named = table_rule(module) or rule_of_planner(self.planner)
            self.rule = named or rowwise_adagrad()
        if self.plan is None:
            self.ranks = found_ranks(self.comm, self.root_device, self.memory_bytes)
            free = [r["free_bytes"] for r in self.ranks]
            topology = Topology(
                self.comm.world,
                self.hosts or hosts_in_blocks([r["host_id"] for r in self.ranks]),
                self.root_device.type,
                None if None in free else free,
                self.reserve_bytes,
                self.hardware,
            )
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

    def _make_plan(self, module: LightningModule, topology: Topology) -> ShardingPlan:
        """Return the plan; called on rank 0, which alone looks at the data."""
        assert self.rule is not None
        self.problem = found_problem(module, topology, self.rule)
        return plan_from(self.planner, self.problem)

    def _compile(self, module: LightningModule) -> None:
        parts = compile_dense(module)
        if self.is_global_zero:
            console.note(
                f"torch.compile has {', '.join(parts)}: first calls of a shape take seconds"
            )

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        """Wrap the dense part in DDP, on the default stream.

        Lightning 2.6 wraps on a side stream, which makes gradients wait for the wrong one.
        """
        wrapped = wrap_dense(
            model, self.comm, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs
        )
        self.average = hook_of(wrapped)
        return wrapped

    def _remove_stop_broadcast(self, trainer: Trainer) -> None:
        """Remove Lightning's broadcast of a stop flag before every step, which waits for all ranks;
        the header of the counts message carries the flag here.

        Lightning's handler of SIGTERM goes, too: it would start another broadcast wherever it
        interrupts this rank (`recapp/trainer/ending.py` handles signals).
        """
        connector = trainer._signal_connector
        connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, "_broadcast_sigterm_tensor"):
            loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Weigh the loss so that ranks with batches of different size train as one process on the
        whole batch would, and run its backward.
        """
        return super().backward(closure_loss * self._share(), optimizer, *args, **kwargs)

    def _share(self) -> float:
        """Return the rows of this rank times W over the rows of all ranks: 1 where batches are
        equal.
        """
        for shared in self.sharded_tables():
            rows_W = shared.header.rows_W
            if rows_W and sum(rows_W):
                return rows_W[self.comm.rank] * self.comm.world / sum(rows_W)
        return 1.0

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Copy a `Batch` without waiting; Lightning would wait for every tensor of a type it does
        not know.
        """
        if isinstance(batch, Batch):
            return batch.to(device or self.root_device, non_blocking=True)
        return super().batch_to_device(batch, device, dataloader_idx)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Wrap the loader of training batches in `LookAhead`.

        A loader that keeps its own position is returned as it is, because it would count batches
        that were only read. So is that of an evaluation: without a backward, and with every row
        read once, there is too little work to hide an exchange behind.
        """
        assert self.lightning_module is not None
        check_tables_are_here(self.lightning_module)  # first here is it known what was loaded
        if (
            not self.look_ahead
            or not self.lightning_module.trainer.training
            or hasattr(dataloader, "state_dict")
        ):
            return dataloader
        return LookAhead(
            dataloader, self.look_ahead, self.sharded_tables, self._to_device, self.comm.side
        )

    def _to_device(self, batch: Any) -> Any:
        """Copy a batch to the device; a module's own transfer hooks run later, in its turn."""
        return (
            self.batch_to_device(batch)
            if isinstance(batch, Batch)
            else move_data_to_device(batch, self.root_device)
        )

    def on_train_end(self) -> None:
        """End the exchanges of batches that were looked ahead to beyond a limit or a stop.

        It is not called after an exception: another rank may be gone, and waiting for it would
        hang. A next `fit` clears what is left.
        """
        for shared in self.sharded_tables():
            shared.forget_ahead()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True, because rows can be read into shards only once there are shards."""
        return True

    @saving()
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint directory: every rank its rectangles, rank 0 the rest. It is
        collective.
        """
        assert self.lightning_module is not None and self.plan is not None
        module = self.lightning_module
        manifest = dict(self.stored()) | manifest_of(module.trainer, module, self.plan)
        parameters = dict(module.named_parameters())
        path = Path(self.broadcast(str(filepath)))
        write_checkpoint(
            path,
            [b for shared in self.sharded_tables() for b in shared.blocks()],
            comm=self.comm,
            meta=checkpoint,
            manifest=manifest,
            parameters=parameters,
        )
        self._newest = path

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the dense part; tables are saved as rectangles beside it."""
        with self.without_tables():
            return super().lightning_module_state_dict()

    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill this rank's rectangles from a checkpoint of any plan, optimiser state only in
        training, and return the rest of it.
        """
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        data = datamodule_of(self.lightning_module.trainer)
        if isinstance(data, KeepsPosition):
            data.check_ids(checkpoint_path)
        tables = StoredTables(self.sharded_tables(), fitting, self.is_global_zero)
        setattr(self.lightning_module, TABLES_LEFT, False)
        parameters = [name for name, _ in self.lightning_module.named_parameters()]
        manifest, meta = load_together(checkpoint_path, tables.to_fill, parameters, self.comm)
        tables.filled(manifest)
        check_state(meta, checkpoint_path)
        return meta

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the dense part; tables are loaded from rectangles.

        Raises:
            CheckpointError: It is the dense part of another model.
        """
        with state_must_fit("the dense part", "model"), self.without_tables():
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of the dense part's optimiser.

        Raises:
            CheckpointError: It is the state of another optimiser.
        """
        with state_must_fit("the optimizer's state", "optimizer"):
            super().load_optimizer_state_dict(checkpoint)

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a checkpoint directory, on rank 0; a `last.ckpt` that leads to it then leads to
        what was saved last.
        """
        if self.is_global_zero:
            remove_checkpoint(filepath, instead=self._newest)

    def teardown(self) -> None:
        """End the run, and leave tables and optimiser state on their device: the base class would
        copy all of it to the CPU.
        """
        assert self.cluster_environment is not None and self.accelerator is not None
        if self.lightning_module is not None:
            self.model = self.lightning_module
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
