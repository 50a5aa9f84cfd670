"""The rows of a rank as a checkpoint sees them: rectangles that are written, and rectangles to be
filled. Those of dynamic tables are numbered over all ranks (`recapp/engine/dynamic_blocks.py`).
"""

from collections.abc import Iterator

from recapp.engine.admission import Changes
from recapp.engine.dynamic_blocks import RowsOfRuns, merge_rows_of_runs
from recapp.engine.dynamic_store import DynamicStore
from recapp.engine.fused_update import FusedUpdate
from recapp.engine.state import EngineState
from recapp.errors import CheckpointError, RankError
from recapp.sharding.layout import Block


class StoredRows:
    """Saves and loads the rows of sharded tables.

    Args:
        state: Of the tables.
        update: Of the tables: a step that waits for another lookup ends before rows are read.
    """

    def __init__(self, state: EngineState, update: FusedUpdate) -> None:
        self.layout = state.layout
        self.comm = state.comm
        self.stores = state.stores
        self.update = update

    def blocks(self) -> Iterator[Block]:
        """Yield the rectangles held here, as views: what a checkpoint reads and writes. Every rank
        calls it.
        """
        counts = self.rows_of_runs()
        for store in self.stores:
            yield from store.blocks(counts) if isinstance(store, DynamicStore) else store.blocks()

    @property
    def _dynamic_stores(self) -> list[DynamicStore]:
        return [store for store in self.stores if isinstance(store, DynamicStore)]

    def rows_of_runs(self) -> RowsOfRuns:
        """End the step, and return how many rows each run of the dynamic tables has, over all
        ranks: what a checkpoint's manifest says of them. Every rank calls it.
        """
        self.update.finish_step()
        counts: RowsOfRuns = {}
        if any(group.dynamic for group in self.layout.groups):
            here: RowsOfRuns = {}
            for store in self._dynamic_stores:
                merge_rows_of_runs(here, store.rows_of_runs())
            for of_rank in self.comm.all_gather(here):
                merge_rows_of_runs(counts, of_rank)
        return counts

    def changes(self) -> dict[str, Changes]:
        """Return what has happened to the keys of each dynamic table, on all ranks together. Every
        rank calls it.
        """
        here: dict[str, Changes] = {}
        for store in self._dynamic_stores:
            here.update(store.changes())
        total: dict[str, Changes] = {}
        for of_rank in self.comm.all_gather(here):
            for table, changes in of_rank.items():
                total[table] = total.get(table, Changes()) + changes
        return total

    def blocks_to_load(
        self, rows_of_runs: RowsOfRuns, updates: int, table: str | None = None
    ) -> Iterator[Block]:
        """Forget the rows of dynamic tables, and yield the rectangles that are held here and to be
        filled; `loaded` ends it. Every rank calls both.

        Args:
            rows_of_runs: What the checkpoint holds of the dynamic tables.
            updates: How many updates its rows have had.
            table: Name of the one table that is loaded; None: all are.

        Raises:
            CheckpointError: A table is dynamic here and not there, or there and not here.
        """
        self.update.finish_step()
        for t in self.layout.tables:
            if table is None and t.dynamic is not None and t.name not in rows_of_runs:
                raise CheckpointError(
                    f"table {t.name}: it is dynamic, and the checkpoint has it as a table of "
                    "numbered rows or not at all: train it anew, or give num_embeddings the number "
                    "of its rows"
                )
            if table is None and t.dynamic is None and t.name in rows_of_runs:
                raise CheckpointError(
                    f"table {t.name}: it has numbered rows, and the checkpoint has it as a dynamic "
                    'table, whose rows stand in another order: make it num_embeddings="dynamic", '
                    "or fill it from recapp.static_table"
                )
        for store in self.stores:
            blocks = (
                store.blocks_to_load(rows_of_runs, updates)
                if isinstance(store, DynamicStore)
                else store.blocks()
            )
            yield from (b for b in blocks if table in (None, b.table))

    def loaded(self) -> None:
        """End loading, once the blocks of `blocks_to_load` are filled.

        Raises:
            CheckpointError: Keys are not where they belong.
            RankError: So it is on another rank.
        """
        if not any(group.dynamic for group in self.layout.groups):
            return
        failure: CheckpointError | None = None
        try:
            for store in self._dynamic_stores:
                store.loaded()
        except CheckpointError as error:
            failure = error
        failed_W = self.comm.all_gather(failure and str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(failed_W):
            if text:
                raise RankError(f"rank {rank} could not load its keys: {text}")
