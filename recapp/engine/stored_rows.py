"""The rows of a rank in the view of a checkpoint: rectangles to write, and rectangles to fill. Rows
of dynamic tables are numbered over all ranks (`recapp/engine/dynamic_keys.py`).
"""

from collections.abc import Iterator, Mapping
from itertools import chain

from recapp.engine.admission import Changes
from recapp.engine.dynamic_keys import RowsOfRuns, merge_rows_of_runs
from recapp.engine.dynamic_store import DynamicStore
from recapp.engine.fused_update import FusedUpdate
from recapp.engine.row_store import FloatStore, RowStore, StoredGroup
from recapp.engine.state import EngineState
from recapp.errors import CheckpointError, ConfigError
from recapp.optim.rules import RowRule
from recapp.sharding.layout import Block
from recapp.transport.communicator import together


class StoredRows:
    """Save and load the rows of sharded tables.

    Args:
        state: The engine state of the tables.
        update: The fused update of the tables. Before rows are read, a step that waits for another
            lookup ends, and all rows take the steps that they have missed.
    """

    def __init__(self, state: EngineState, update: FusedUpdate) -> None:
        self.layout = state.layout
        self.comm = state.comm
        self.stores = state.stores
        self.dynamic_stores = [s for s in state.stores if isinstance(s, DynamicStore)]
        self.update = update

    def blocks(self, averaged: bool = False) -> Iterator[Block]:
        """Yield this rank's rectangles, as views, for a checkpoint to write. Every rank calls it.

        Args:
            averaged: Whether the weights are the average (`RowStore.blocks`).
        """
        counts = self.rows_of_runs()
        for store in self.stores:
            yield from (
                store.blocks(averaged, counts)
                if isinstance(store, DynamicStore)
                else store.blocks(averaged)
            )

    def rows_of_runs(self) -> RowsOfRuns:
        """End the step, and return the number of rows in each run of the dynamic tables, over all
        ranks. The manifest of a checkpoint stores these numbers. Every rank calls it.
        """
        self.update.complete()
        counts: RowsOfRuns = {}
        if self.dynamic_stores:
            here = [store.rows_of_runs() for store in self.dynamic_stores]
            for of_store in chain.from_iterable(self.comm.all_gather(here)):
                merge_rows_of_runs(counts, of_store)
        return counts

    def changes(self) -> dict[str, Changes]:
        """Return the counts of new, admitted and evicted keys of each dynamic table, over all
        ranks. Every rank calls it.
        """
        here = [pair for store in self.dynamic_stores for pair in store.changes().items()]
        total: dict[str, Changes] = {}
        for table, changes in chain.from_iterable(self.comm.all_gather(here)):
            total[table] = total.get(table, Changes()) + changes
        return total

    def blocks_to_load(
        self,
        rows_of_runs: RowsOfRuns,
        updates: int,
        table: str | None = None,
        averaged: bool = False,
    ) -> Iterator[Block]:
        """Forget the rows of dynamic tables, and yield this rank's rectangles for a checkpoint to
        fill. `loaded` ends the load. Every rank calls both.

        Args:
            rows_of_runs: The rows of the dynamic tables in the checkpoint, by run.
            updates: The number of updates of the stored rows.
            table: The name of the only table to load; None loads all.
            averaged: Whether to fill the average, too (`RowStore.blocks_to_fill`).

        Raises:
            CheckpointError: A table is dynamic only in the model, or only in the checkpoint.
        """
        self.update.complete()
        for t in self.layout.tables:
            if table is None and t.dynamic is not None and t.name not in rows_of_runs:
                raise CheckpointError(
                    f"table {t.name}: the table is dynamic in the model, and static or absent in "
                    "the checkpoint: train it anew, or set num_embeddings to the number of its "
                    "rows"
                )
            if table is None and t.dynamic is None and t.name in rows_of_runs:
                raise CheckpointError(
                    f"table {t.name}: the table is static in the model and dynamic in the "
                    "checkpoint, where its rows have another order: set "
                    'num_embeddings="dynamic", or copy the rows of recapp.static_table into it'
                )
        for store in self.stores:
            blocks = (
                store.blocks_to_load(rows_of_runs, updates, averaged)
                if isinstance(store, DynamicStore)
                else store.blocks_to_fill(averaged)
            )
            yield from (b for b in blocks if table in (None, b.table))

    def loaded(self) -> None:
        """End the load after all blocks of `blocks_to_load` were filled.

        Raises:
            CheckpointError: Keys of this rank do not belong to it, or occur twice.
            RankError: The same fault on another rank.
        """

        def load() -> None:
            for store in self.dynamic_stores:
                store.loaded()

        if self.dynamic_stores:
            together(self.comm, load, "could not load its keys")


def started_store(group: StoredGroup, rule: RowRule | None, seeds: Mapping[str, int]) -> RowStore:
    """Return a store with start values.

    Args:
        group: The group of the rows, and the kernels that compute with them.
        rule: The row rule; None for read-only rows.
        seeds: The seed of the start values, by table.

    Raises:
        ConfigError: The group's rows are quantised, so they cannot be trained.
    """
    layout = group.layout
    table = next(layout.tables[s.table] for s in layout.strips if s.group == group.number)
    if table.data_type.bits is not None:
        raise ConfigError(
            f"tables.{table.name}.data_type={table.data_type}: rows of 8 or 4 bits are "
            f"read-only: train fp32, then export the checkpoint with quantize={table.data_type}"
        )
    dynamic = group.layout.groups[group.number].dynamic
    return DynamicStore(group, rule, seeds) if dynamic else FloatStore(group, rule, seeds)
