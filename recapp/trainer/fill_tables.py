"""Start values of tables from files, before the first step of a run that does not resume."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from recapp.console import note
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import RecappError
from recapp.sharding.layout import WEIGHT
from recapp.stored.start_values import check_filled, values_file
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


def _fill(shared: ShardedTables, table: EmbeddingConfig, key: str, given: str, schema: Any) -> None:
    blocks = [b for b in shared.blocks() if (b.table, b.tensor) == (table.name, WEIGHT)]
    failure: RecappError | None = None
    rows = values = 0
    try:
        rows, values = values_file(table, given, schema, key).fill(blocks)
        check_filled(table.name, given, blocks)
    except RecappError as error:
        failure = error
    error_W = shared.comm.all_gather(failure and str(failure))
    raise_together(failure, error_W, f"could not read {given}")
    if not shared.comm.rank:
        said = f"table {table.name} has {rows:,} rows from {given}"
        if values > rows:
            said += (
                f"; {values - rows:,} of its {values:,} vectors are not used, because a later id "
                f"has the same row: more rows for {table.name} keep ids apart"
            )
        if left := table.num_embeddings - rows:
            said += f"; {left:,} rows keep their start values"
        note(said)
