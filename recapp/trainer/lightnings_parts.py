"""Lightning's own parts, adapted to sharded tables, whoever has made the trainer and the module.

    check_trainer        refuses a precision and callbacks that cannot train tables
    limit_waits          no wait for other ranks before every step, and none without a limit
    reach_tables         a module's own methods reach its tables, which are no parameters of it:
                         self.freeze(), self.unfreeze(), self.toggle_optimizer(optimizer)
    count_tables         Lightning's table of a module's parameters has the rows of all ranks, like
                         the parameters of the unsharded module: shards are no parameters, and
                         Lightning would print 0. A dynamic table counts its expected rows

`requires_grad_` of any module around tables is that of `shard_model`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

from lightning.fabric.utilities.distributed import _distributed_is_initialized, _InfiniteBarrier
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary as SummaryCallback
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_summary.model_summary import LayerSummary, ModelSummary
from torch import nn

from recapp.engine.sharded_collection import (
    ShardedCollection,
    modules_around_tables,
    sharded_collections,
    sharded_tables,
)
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.table_weights import MethodOf
from recapp.errors import ConfigError
from recapp.optim.optimizer import HybridOptimizer
from recapp.trainer.trainer_settings import refuse_class


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
    fitting = trainer.state.fn == TrainerFn.FITTING
    for callback in trainer.callbacks if fitting else ():  # type: ignore[attr-defined]
        refuse_class(type(callback), "Trainer(callbacks=...)")


def limit_waits(trainer: Trainer, make_group: Callable[[], Any]) -> None:
    """Remove Lightning's waits of a step, and end its wait for the rank that prepares data after a
    time.

    Args:
        trainer: The trainer, before it prepares data.
        make_group: Makes a process group, with the timeout of all waits.
    """
    _remove_stop_broadcast(trainer)
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


def _remove_stop_broadcast(trainer: Trainer) -> None:
    """Remove Lightning's broadcast of a stop flag before every step, because it waits for all
    ranks. In recapp the header of the counts message carries the flag (`recapp/trainer/ending.py`).

    Remove Lightning's handler of SIGTERM too: it would start another broadcast at any point at
    which it interrupts this rank.
    """
    connector = trainer._signal_connector
    connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def reach_tables(module: LightningModule) -> None:
    """Let `freeze`, `unfreeze` and the toggling of optimisers reach the sharded tables of a module
    and of LightningModules inside. A method that a class of its own has stays as it is.
    """
    modules = [m for m in modules_around_tables(module) if isinstance(m, LightningModule)]
    for around, (name, function) in product(modules, METHODS.items()):
        if getattr(type(around), name) is getattr(LightningModule, name):
            setattr(around, name, MethodOf(around, function))


def _freeze(module: LightningModule) -> LightningModule:
    for collection in sharded_collections(module):
        collection.requires_grad_(False)
    return LightningModule.freeze(module)


def _unfreeze(module: LightningModule) -> LightningModule:
    for collection in sharded_collections(module):
        collection.requires_grad_(True)
    return LightningModule.unfreeze(module)


def _toggle(module: LightningModule, optimizer: Any) -> None:
    LightningModule.toggle_optimizer(module, optimizer)
    own = getattr(optimizer, "optimizer", optimizer)
    others = [o for o in module.trainer.optimizers if o is not own]
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
    "freeze": _freeze,
    "unfreeze": _unfreeze,
    "toggle_optimizer": _toggle,
    "untoggle_optimizer": _untoggle,
}


def numbers_in_tables(module: nn.Module, *, frozen: bool = True) -> int:
    """Return the number of weights in the sharded tables of a module, over all ranks. A table that
    collections share counts once.

    Args:
        module: The module.
        frozen: Whether frozen tables count.
    """
    tables = {
        (id(part.shared), table.name): table
        for part in module.modules()
        if isinstance(part, ShardedCollection)
        for table in part.tables()
        if frozen or not part.shared.is_frozen(table.name)
    }
    return sum(table.num_embeddings * table.embedding_dim for table in tables.values())


class _LayerSummary(LayerSummary):
    @property
    def num_parameters(self) -> int:
        """Return the number of weights in the layer's parameters and tables."""
        return super().num_parameters + numbers_in_tables(self._module)


class TableSummary(ModelSummary):
    """The summary of a module with sharded tables; it takes the arguments of Lightning's
    `ModelSummary`.
    """

    def summarize(self) -> dict[str, LayerSummary]:
        """Return the summary of every layer."""
        found = super().summarize()
        for layer in found.values():
            layer.__class__ = _LayerSummary
        return found

    @property
    def total_parameters(self) -> int:
        """Return the number of weights in all parameters and tables."""
        return super().total_parameters + numbers_in_tables(self._model)

    @property
    def trainable_parameters(self) -> int:
        """Return the number of weights in all parameters and tables that train."""
        return super().trainable_parameters + numbers_in_tables(self._model, frozen=False)


def count_tables(callbacks: Iterable[Any]) -> None:
    """Make Lightning's summary callbacks of a trainer count the sharded tables."""
    for callback in callbacks:
        if isinstance(callback, SummaryCallback):
            summary = partial(_summary, callback._max_depth)
            callback._summary = summary  # type: ignore[method-assign]


def _summary(max_depth: int, trainer: Trainer, module: LightningModule) -> ModelSummary:
    return TableSummary(module, max_depth=max_depth)
