"""The numbers of rows of dynamic tables: logged at every validation, printed at the end."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from recapp.console import print_table
from recapp.engine.sharded_tables import ShardedTables
from recapp.trainer.strategy import EmbeddingShardingStrategy


class LogDynamicRows(Callback):
    """Logs for every dynamic table the number of its rows, and the numbers of new, admitted and
    evicted keys in this run: `rows/C3`, `new_keys/C3`, `admitted/C3`, `evicted/C3`.

    It is collective, and sends one small message.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the counts of all ranks."""
        if trainer.training:
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the counts once more, and print them on rank 0."""
        counted = self._log(trainer)
        if counted and trainer.is_global_zero:
            print()
            print_table(counted, title="Dynamic tables")

    def _log(self, trainer: Trainer) -> list[dict[str, Any]]:
        assert isinstance(trainer.strategy, EmbeddingShardingStrategy)
        counted = [row for t in trainer.strategy.sharded_tables() for row in counted_rows(t)]
        values = {
            f"{name}/{row['table']}": row[name]
            for row in counted
            for name in ("rows", "new_keys", "admitted", "evicted")
        }
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, trainer.global_step)
        return counted


def counted_rows(shared: ShardedTables) -> list[dict[str, Any]]:
    """Return a record for each dynamic table: the number of its rows, and the numbers of new,
    admitted and evicted keys in this run. It is collective.
    """
    rows = shared.stored.rows_of_runs()
    changes = shared.stored.changes() if rows else {}
    return [
        {
            "table": table,
            "rows": sum(counts["rows"]),
            "new_keys": changes[table].new,
            "admitted": changes[table].admitted,
            "evicted": changes[table].evicted,
        }
        for table, counts in rows.items()
    ]
