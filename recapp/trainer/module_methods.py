"""A LightningModule's own methods reach its sharded tables, which are no parameters of it.

    self.freeze(), self.unfreeze()       all tables of the module are frozen, or trained again
    self.toggle_optimizer(optimizer)     backward adds no gradients to tables of other optimisers

`requires_grad_` of any module around tables is that of `shard_model`.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from lightning.pytorch import LightningModule

from recapp.engine.sharded_collection import (
    modules_around_tables,
    sharded_collections,
    sharded_tables,
)
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.table_weights import MethodOf
from recapp.optim.optimizer import HybridOptimizer


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
