"""Lightning's table of a module's parameters, including the sharded tables.

Shards are not parameters, so Lightning would print 0 for every collection. The summary counts the
rows of all ranks, like the parameters of the unsharded module. For a dynamic table it counts the
expected rows.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary as SummaryCallback
from lightning.pytorch.utilities.model_summary.model_summary import LayerSummary, ModelSummary
from torch import nn

from recapp.engine.sharded_collection import ShardedCollection


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
