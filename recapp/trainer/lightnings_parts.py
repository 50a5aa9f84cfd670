"""Lightning's own parts, adapted to sharded tables, whoever has made the trainer and the module.

    check_trainer        refuses a precision and callbacks that cannot train tables
    limit_waits          no wait for other ranks before every step, and none without a limit
    reach_tables         a module's own methods reach its tables, which are no parameters of it:
                         self.freeze(), self.unfreeze(), self.toggle_optimizer(optimizer)
    count_tables         Lightning's table of a module's parameters has the rows of all ranks, like
                         the parameters of the unsharded module: shards are no parameters, and
                         Lightning would print 0. A dynamic table counts its expected rows

    RankEnvironment      ranks that were started from outside
    ForkedRanks          ranks that a notebook forks, because a new interpreter cannot run its cells
                         again

    BatchCallback        the base of callbacks that run after every training step (a batch, or
                         several with `accumulate_grad_batches`), or after every other batch
    skip_idle_hooks      spares the calls of hooks that do nothing

`requires_grad_` of any module around tables is that of `shard_model`.

Lightning's cluster environment tells Lightning the rank of this process. recapp's takes the rank
from `recapp/processes/rank_environment.py`, so that all of recapp uses the same rank. Lightning's
own environments accept other launches. Its SLURM environment refuses `srun -n 2`, installs a
handler that requeues the job, and uses one port for all steps of a job. Ranks that were started by
hand are ranks for Lightning only if LOCAL_RANK is set.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import _distributed_is_initialized, _InfiniteBarrier
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary as SummaryCallback
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from typing_extensions import override

from recapp.engine.sharded_collection import (
    modules_around_tables,
    sharded_collections,
    sharded_tables,
)
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.table_weights import MethodOf
from recapp.errors import ConfigError
from recapp.optim.optimizer import HybridOptimizer
from recapp.processes.rank_environment import RankInfo, external_rank
from recapp.processes.stopping import die_with_parent
from recapp.trainer.trainer_settings import refuse_class

FORK: Literal["fork"] = "fork"
TABLES_LEFT = "tables_left_in_ranks"
"""The attribute of a module whose tables were trained in forked ranks and are not in this
process."""


def check_trainer(trainer: Trainer) -> None:
    """Check the precision and, where it trains, the callbacks of a trainer.

    Raises:
        ConfigError: The trainer cannot train tables; the error gives the reason.
    """
    if trainer.precision == "16-mixed":
        raise ConfigError(
            "trainer.precision=16-mixed: tables are updated in backward, where the scaled loss "
            "would reach them; use bf16-mixed"
        )
    trains = trainer.state.fn == TrainerFn.FITTING
    for callback in trainer.callbacks if trains else ():  # type: ignore[attr-defined]
        refuse_class(type(callback), "Trainer(callbacks=...)")


def limit_waits(trainer: Trainer, make_group: Callable[[], Any]) -> None:
    """Remove Lightning's broadcast before every step, and end its wait for the rank that prepares
    data after a time.

    Args:
        trainer: The trainer, before it prepares data.
        make_group: Makes a process group, with the timeout of all waits.
    """
    # A stop flag goes to all ranks before every step, which would wait for them; the header of the
    # counts message carries it (`recapp/trainer/ending.py`). The handler of SIGTERM would start
    # another broadcast at any point at which it interrupts this rank.
    trainer._signal_connector.register_signal_handlers = (  # type: ignore[method-assign]
        lambda: None
    )
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    connector = trainer._data_connector
    prepare = type(connector).prepare_data

    def prepare_data() -> None:
        names = vars(data_connector)
        names[_InfiniteBarrier.__name__] = partial(_Barrier, make_group)
        try:
            prepare(connector)
        finally:
            names[_InfiniteBarrier.__name__] = _InfiniteBarrier

    connector.prepare_data = prepare_data  # type: ignore[method-assign]


class _Barrier(_InfiniteBarrier):
    """Lightning's barrier around `prepare_data`, with a limit; its own is 10,000 days."""

    def __init__(self, make_group: Callable[[], Any]) -> None:
        super().__init__()
        self.make_group = make_group

    def __enter__(self) -> "_Barrier":
        if _distributed_is_initialized():
            group = self.make_group()
            self.group = group
            self.barrier = group.monitored_barrier
        return self


def reach_tables(module: LightningModule) -> None:
    """Let `freeze`, `unfreeze` and the toggling of optimisers reach the sharded tables of a module
    and of LightningModules inside. A method that a class of its own has stays as it is.
    """
    modules = [m for m in modules_around_tables(module) if isinstance(m, LightningModule)]
    for around, (name, function) in product(modules, METHODS.items()):
        if getattr(type(around), name) is getattr(LightningModule, name):
            setattr(around, name, MethodOf(around, function))


def _set_trained(method: str, trained: bool, module: LightningModule) -> None:
    for collection in sharded_collections(module):
        collection.requires_grad_(trained)
    getattr(LightningModule, method)(module)


def _toggle(module: LightningModule, optimizer: Any) -> None:
    LightningModule.toggle_optimizer(module, optimizer)
    inner = getattr(optimizer, "optimizer", optimizer)
    others = [other for other in module.trainer.optimizers if other is not inner]
    for shared in sharded_tables(module):
        shared.update.ignores = any(_has(other, shared) for other in others)


def _untoggle(module: LightningModule, optimizer: Any) -> None:
    LightningModule.untoggle_optimizer(module, optimizer)
    for shared in sharded_tables(module):
        shared.update.ignores = False


def _has(optimizer: Any, shared: ShardedTables) -> bool:
    """Return whether the step of an optimiser, or its param groups, train sharded tables."""
    if not isinstance(optimizer, HybridOptimizer):
        return False
    groups = [id(group) for group in optimizer.sparse_groups]
    return shared.update in optimizer.table_gradients or any(
        id(group) in groups for group in shared.param_groups
    )


METHODS: dict[str, Callable[..., Any]] = {
    "freeze": partial(_set_trained, "freeze", False),
    "unfreeze": partial(_set_trained, "unfreeze", True),
    "toggle_optimizer": _toggle,
    "untoggle_optimizer": _untoggle,
}


def count_tables(callbacks: Iterable[Any]) -> None:
    """Make Lightning's summary callbacks of a trainer count the sharded tables."""
    for callback in callbacks:
        if isinstance(callback, SummaryCallback):
            summarize = partial(type(callback).on_fit_start, callback)
            callback.on_fit_start = partial(  # type: ignore[method-assign]
                _with_tables, summarize
            )


def _with_tables(summarize: Callable[..., None], trainer: Trainer, pl_module: Any) -> None:
    """Call Lightning's summary while each sharded table is a parameter of its whole shape, without
    memory. A table that collections share is one parameter.
    """
    collections = sharded_collections(pl_module)
    parameters: dict[tuple[int, str], nn.Parameter] = {}
    for part in collections:
        for table in part.tables():
            rows = torch.empty(table.num_embeddings, table.embedding_dim, device="meta")
            parameter = nn.Parameter(rows, not part.shared.is_frozen(table.name))
            key = (id(part.shared), table.name)
            part._parameters[table.name] = parameters.setdefault(key, parameter)
    try:
        summarize(trainer, pl_module)
    finally:
        for part in collections:
            part._parameters.clear()


class RankEnvironment(ClusterEnvironment):
    """A cluster whose ranks were all started from outside.

    Args:
        info: The number, host and address of this rank.
    """

    def __init__(self, info: RankInfo) -> None:
        self.info = info

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self.info.address

    @property
    @override
    def main_port(self) -> int:
        return self.info.port

    @staticmethod
    @override
    def detect() -> bool:
        return external_rank() is not None

    @override
    def world_size(self) -> int:
        return self.info.world

    def set_world_size(self, size: int) -> None:
        """Ignore Lightning's product of devices and nodes, because hosts may have different numbers
        of ranks.
        """

    @override
    def global_rank(self) -> int:
        return self.info.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore Lightning's number, which follows from its product of devices and nodes."""

    def local_rank(self) -> int:
        """Return the number of this rank among the ranks of its host; its GPU has the same
        number.
        """
        return self.info.local_rank

    @override
    def node_rank(self) -> int:
        return self.info.node


class ForkedRanks(_MultiProcessingLauncher):
    """Lightning's launcher of forked ranks, for sharded tables.

    A rank computes on one thread, because the notebook's OpenMP threads do not exist after a fork,
    and a rank that waits for them hangs. Tables stay in the ranks and are lost when the ranks end.
    So the launcher marks the notebook's own module as a module without trained tables.
    """

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        die_with_parent()
        os.environ["OMP_NUM_THREADS"] = "1"  # if it is not set, Lightning sets more threads
        torch.set_num_threads(1)
        super()._wrapping_function(process_idx, *args, **kwargs)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        super()._recover_results_in_main_process(worker_output, trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            setattr(trainer.lightning_module, TABLES_LEFT, True)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        strategy: Any = self._strategy
        with strategy.without_tables():
            return super()._collect_rank_zero_results(trainer, results)


def ends_step(trainer: Trainer, done: int) -> bool:
    """Return whether a training batch ends a step.

    Args:
        trainer: The trainer of the run.
        done: The number of batches of the epoch so far, this one included.
    """
    return done % trainer.accumulate_grad_batches == 0 or ends_epoch(trainer, done)


def ends_epoch(trainer: Trainer, done: int) -> bool:
    """Return whether a training batch ends an epoch. Arguments as for `ends_step`."""
    return bool(trainer.is_last_batch) or done >= trainer.num_training_batches


BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    *(f"on_{s}_batch_{end}" for s in ("validation", "test", "predict") for end in ("start", "end")),
)
"""The hooks that Lightning calls for each batch."""


def skip_idle_hooks(callbacks: Iterable[Callback]) -> None:
    """Make Lightning pass over the hooks of a batch that a callback leaves as `Callback` has them.

    Lightning calls all hooks of all callbacks, each in a section of its profiler: 80 calls a step
    that do nothing, .5 ms. It passes over a hook that is not callable.

    Args:
        callbacks: The callbacks of a trainer.
    """
    for callback in callbacks:
        for name in BATCH_HOOKS:
            if getattr(callback, name) == getattr(Callback, name).__get__(callback):
                setattr(callback, name, None)


class BatchCallback(Callback):
    """Calls `on_step` after every training step, and `on_batch` after every other batch.

    Lightning has one hook for each stage, with arguments that most callbacks do not need. Each
    stage of recapp has one loader, so the methods get no index of the loader.
    """

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Act on the end of a training step.

        Args:
            trainer: The trainer of the run.
            done: The number of batches of the epoch so far, this one included.
        """

    def on_batch(self, trainer: Trainer, done: int) -> None:
        """Act on the end of a batch that was validated, tested or scored.

        Args:
            trainer: The trainer of the run.
            done: The number of batches of the stage so far, this one included.
        """

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if ends_step(trainer, batch_idx + 1):
            self.on_step(trainer, batch_idx + 1)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.on_batch(trainer, batch_idx + 1)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end
