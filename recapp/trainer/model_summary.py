"""Lightning's table of a module's parameters, with the sharded tables counted.

Shards are no parameters, so Lightning would print 0 for every collection. Rows are those of all
ranks, as the parameters of the unsharded module would be; dynamic tables count the rows that are
expected.
"""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary as SummaryCallback
from lightning.pytorch.utilities.model_summary.model_summary import LayerSummary, ModelSummary
from torch import nn

from recapp.engine.sharded_collection import ShardedCollection


def numbers_in_tables(module: nn.Module) -> int:
    """Return how many numbers the sharded tables of a module have on all ranks together; a table
    that collections share counts once.
    """
    tables = {
        (id(part.shared), table.name): table
        for part in module.modules()
        if isinstance(part, ShardedCollection)
        for table in part.tables()
    }
    return sum(table.num_embeddings * table.embedding_dim for table in tables.values())


class _LayerSummary(LayerSummary):
    @property
    def num_parameters(self) -> int:
        """Return the numbers of the layer's parameters and tables."""
        return super().num_parameters + numbers_in_tables(self._module)


class TableSummary(ModelSummary):
    """The summary of a module whose tables are sharded; arguments as of Lightning's."""

    def summarize(self) -> dict[str, LayerSummary]:
        """Return the summary of every layer."""
        found = super().summarize()
        for layer in found.values():
            layer.__class__ = _LayerSummary
        return found

    @property
    def total_parameters(self) -> int:
        """Return the numbers of all parameters and tables."""
        return super().total_parameters + numbers_in_tables(self._model)

    @property
    def trainable_parameters(self) -> int:
        """Return the numbers of all parameters and tables that train."""
        return super().trainable_parameters + numbers_in_tables(self._model)


def count_tables(callbacks: Iterable[Any]) -> None:
    """Let Lightning's summary callbacks of a trainer count sharded tables."""
    for callback in callbacks:
        if isinstance(callback, SummaryCallback):
            callback._summary = _summary_of(callback._max_depth)  # type: ignore[method-assign]


def _summary_of(max_depth: int) -> Any:
    def summary(trainer: Trainer, module: LightningModule) -> ModelSummary:
        return TableSummary(module, max_depth=max_depth)

    return summary
