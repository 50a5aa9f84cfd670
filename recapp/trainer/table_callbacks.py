"""Callbacks of tables: start values from files, tables that begin anew at each epoch, and counts of
the rows of dynamic tables.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from recapp.console import note, print_table
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import RecappError
from recapp.optim.named_rules import tables_that_restart
from recapp.sharding.layout import WEIGHT
from recapp.stored.start_values import fill_values
from recapp.tables.config import EmbeddingConfig
from recapp.trainer.data_protocols import datamodule_of
from recapp.trainer.strategy import strategy_of
from recapp.transport.communicator import raise_together


class FillTables(Callback):
    """Fills tables from files when training begins (`recapp/stored/start_values.py`).

    Args:
        values: The files by table. In an ensemble the file of a table is that of all members.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fill this rank's rectangles. Every rank calls it.

        Raises:
            RecappError: A file cannot be read, or does not fit its table.
        """
        schema = datamodule_of(trainer).schema
        for shared in strategy_of(trainer).sharded_tables():
            for table in shared.tables():
                key = table.name if table.name in self.values else table.member_of
                if key in self.values:
                    _fill(shared, table, str(key), self.values[str(key)], schema)


def _fill(shared: ShardedTables, table: EmbeddingConfig, key: str, file: str, schema: Any) -> None:
    blocks = [b for b in shared.blocks() if (b.table, b.tensor) == (table.name, WEIGHT)]
    failure: RecappError | None = None
    rows = values = 0
    try:
        rows, values = fill_values(table, file, schema, key, blocks)
    except RecappError as error:
        failure = error
    error_W = shared.comm.all_gather(failure and str(failure))
    raise_together(failure, error_W, f"could not read {file}")
    if not shared.comm.rank:
        text = f"table {table.name} has {rows:,} rows from {file}"
        if values > rows:
            text += (
                f"; {values - rows:,} of its {values:,} vectors are not used, because a later id "
                f"has the same row: more rows for {table.name} keep ids apart"
            )
        if left := table.num_embeddings - rows:
            text += f"; {left:,} rows keep their start values"
        note(text)


class RestartTables(Callback):
    """Gives tables the start values of the epoch before the first step of each epoch but the first.

    Click models overfit when the second epoch begins: rows of rare ids have learnt the labels of
    their few samples, and the dense part learns to trust these rows. Here rows and the state of
    their optimiser return to start values at the start of each later epoch, while the dense part
    and its optimiser keep what they have learnt (MEDA, arXiv 2305.19531).

        epoch 0    start values of (seed, table, row, column)           dense part at its start
        epoch e    start values of (seed, e, table, row, column)        dense part as it is

    The values do not depend on ranks or plan, so a run is the same under every plan, and a resumed
    run is the same as an unbroken one. Rows of a dynamic table stay and get start values; what is
    known of the use of their keys stays too.

    Args:
        tables: The names or globs of the tables; `["*"]` is all of them.

    Raises:
        ConfigError: When training begins, if a name or glob matches no table, or if the tables of
            one rule whose step size depends on the number of steps (such as Adam) do not begin
            anew together.
    """

    def __init__(self, tables: Sequence[str]) -> None:
        self.tables = tuple(tables)
        self._names: list[str] = []
        self._epoch = -1  # the epoch in which the tables have begun

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch in which the tables have begun. The manifest has the updates then."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the epoch in which the tables of a checkpoint have begun."""
        self._epoch = int(state_dict["epoch"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the tables. After a resume, go on counting from the step in which they began.

        A checkpoint of a run without this callback counts as one whose tables began with its epoch.
        """
        shared_tables = strategy_of(trainer).sharded_tables()
        rules = {name: rule for shared in shared_tables for name, rule in shared.rules.items()}
        self._names = tables_that_restart(self.tables, rules)
        if self._epoch < 0:
            over = not trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._epoch = max(trainer.current_epoch - over, 0)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the tables anew, if this step is the first of a later epoch."""
        if trainer.current_epoch <= self._epoch:
            return
        self._epoch = trainer.current_epoch
        shared_tables = strategy_of(trainer).sharded_tables()
        for shared in shared_tables:
            shared.begin_anew(self._names, self._epoch)


class LogDynamicRows(Callback):
    """Logs for every dynamic table the number of its rows, and the numbers of new, admitted and
    evicted keys in this run: `rows/C3`, `new_keys/C3`, `admitted/C3`, `evicted/C3`.

    It is collective, and sends one small message.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the counts of all ranks."""
        if trainer.state.fn == TrainerFn.FITTING:  # `training` is False in a validation
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the counts once more, and print them on rank 0."""
        counted = self._log(trainer)
        if counted and trainer.is_global_zero:
            print()
            print_table(counted, title="Dynamic tables")

    def _log(self, trainer: Trainer) -> list[dict[str, Any]]:
        counted = [row for t in strategy_of(trainer).sharded_tables() for row in counted_rows(t)]
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
