"""The tables of a model, placed by a plan, and the exchange that its collections share.

    features -> Requests (input_dist)
             -> Lookup (lookup, output_dist; backward updates the rows)
             -> vectors of each collection (`recapp/engine/sharded_collection.py`)

Each group has one store with its rows (`recapp/engine/row_store.py`). The optimiser is fused into
backward: a table has no gradient. Learning rates are read from `param_groups`, one per rule. The
optimiser object of the model holds the same groups, so schedules reach tables like any parameter.

The ids of a batch are exchanged once for all collections whose features they contain: at the call
of the first collection, or ahead of it. The other collections find their vectors by the identity of
the KeyedJaggedTensor. So a model sends as many messages as one collection.

Ids may be exchanged long before their step, but vectors are of the rows as they are at the call:
vectors that wait for a collection are dropped when rows change, and when the collection that was
called first is called again.

A checkpoint sees the rows of a rank as rectangles to write, and rectangles to fill. Rows of dynamic
tables are numbered over all ranks (`recapp/engine/dynamic_keys.py`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from recapp.console import note
from recapp.engine.admission import Changes
from recapp.engine.cut_lookup import CutLookup
from recapp.engine.dynamic_keys import ANY_NUMBER, RowsOfStretches, merge_rows_of_stretches
from recapp.engine.dynamic_store import DynamicStore
from recapp.engine.fused_integers import FusedIntegers
from recapp.engine.fused_update import FusedUpdate, rules_of_groups
from recapp.engine.lookup import LocalLookup, Lookup
from recapp.engine.requests import Requests
from recapp.engine.row_average import RowAverage
from recapp.engine.row_statistics import RowStatistics
from recapp.engine.row_store import FloatRows, FloatStore, RowStore, StoredGroup, check_frozen
from recapp.engine.state import EngineState, Member
from recapp.engine.table_weights import (
    TableParameter,
    UpdatedTable,
    UpdatedWeight,
    table_parameters,
    with_parameters,
)
from recapp.errors import CheckpointError, ConfigError, PlanError
from recapp.kernels.backend import backend as choose_backend
from recapp.kernels.backend import report_compilation, slow_kernels_note, warm_up
from recapp.optim.named_rules import Rules, check_types, distinct_rules, rules_of
from recapp.optim.rules import FROZEN, RowRule
from recapp.sharding.layout import Block, make_layout
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.bags_of_samples import samples_of
from recapp.tables.collections import compute_dtype
from recapp.tables.config import EmbeddingConfig, lookups_of
from recapp.tables.ids import LookupRows
from recapp.transport.communicator import Comm, together


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


# For a collection that was not called yet: its vectors, the rows that were looked up for all
# collections, and the numbers of those that got their vectors of this lookup.
_Share = tuple[list[Tensor], LookupRows, set[int]]


class _Pass(NamedTuple):
    """The lookups of a batch by several collections, from rows that do not change meanwhile.

    Args:
        features: The ids, whose identity finds the vectors.
        rows: The state of the rows, and whether lookups have gradients.
        first: The number of the collection that was called first.
        served: The numbers of the collections whose vectors were looked up.
        shares: The vectors that wait for their collection, by its number.
    """

    features: KeyedJaggedTensor
    rows: tuple[object, ...]
    first: int
    served: set[int]
    shares: dict[int, _Share]

    def fits(self, features: KeyedJaggedTensor, rows: tuple[object, ...]) -> bool:
        """Return whether these are the ids, and the state of the rows."""
        return self.features is features and self.rows == rows


class ShardedTables(nn.Module):
    """Tables placed by a plan, for one or more collections.

    Args:
        tables: The tables of all collections.
        plan: The plan of exactly these tables, for the ranks of `comm`.
        comm: Communicator of the ranks.
        rule: Optimiser of the rows, or rules by table name or glob
            (`recapp/optim/named_rules.py`); None for read-only tables.
        seed: Seed of the start values: one for all tables, or one by table. It gives the same model
            under every plan.
        backend: The kernel backend (`recapp/kernels/backend.py`); `auto` takes the fastest
            available one.
        payload: The dtype of vectors and gradients in messages; None takes the compute type.
        trains: Whether to compile the update kernels now; else the first update compiles them.
        make_store: Makes the store of each group, with its rows; None makes stores of floats with
            start values.
        members: The lookups of each collection; None is one collection with the lookups that the
            tables declare.
        dtype: The compute type; None takes the type of the tables.

    Raises:
        PlanError: The plan does not tile the tables, or is for another number of ranks.
        ConfigError: The backend is unknown or not available, or rules do not fit the tables.

    `seeds` has the seed of each table, `parameters_of` the tables that are parameters, and
    `updated` all others, by name.
    `state` is the engine state; `state.observer` is the hook for measurements. `update` changes the
    rows. `header`, `waits` and `comm` belong to `state`. `cut` has the lookups of a step that were
    done before its model runs (`recapp/engine/cut_lookup.py`).
    """

    cut: CutLookup | None = None

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        plan: ShardingPlan,
        comm: Comm,
        rule: Rules | None,
        seed: int | Mapping[str, int] = 0,
        backend: str = "auto",
        payload: torch.dtype | None = None,
        trains: bool = True,
        make_store: Callable[[StoredGroup], RowStore] | None = None,
        members: Sequence[Member] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if plan.world_size != comm.world:
            raise PlanError(
                f"plan {plan.name} is for {plan.world_size} ranks, but there are {comm.world}: "
                f"set trainer.devices={plan.world_size} or make the plan for {comm.world}"
            )
        self.plan = plan
        self.comm = comm
        self.seeds = {t.name: seed for t in tables} if isinstance(seed, int) else dict(seed)
        self.members = tuple(members or (Member(lookups_of(tables)),))
        edges = [0, *accumulate(len(m.lookups) for m in self.members)]
        self._lookups = [range(*edge) for edge in pairwise(edges)]
        self.rules = with_parameters(rules_of(rule, [t.name for t in tables]), tables, plan)
        check_types(self.rules, tables)
        rules = distinct_rules(self.rules.values())
        numbers = {table: rules.index(of_table) for table, of_table in self.rules.items()}
        lookups = [x for m in self.members for x in m.lookups]
        layout = make_layout(
            tables,
            plan,
            lookups,
            numbers or None,
            frozen=rules.index(FROZEN) if FROZEN in rules else None,
        )
        kernels = choose_backend(backend, comm.device)
        self.dtype = dtype or compute_dtype(tables)
        rule_G = rules_of_groups(layout, rules)
        make = make_store or (lambda group: started_store(group, rule_G[group.number], self.seeds))
        stores = [
            make(StoredGroup(layout, g, comm.rank, self.dtype, comm.device, kernels))
            for g in range(len(layout.groups))
        ]
        self.stores = nn.ModuleList(stores)
        if any(store.finds_rows for store in stores):
            comm.work_in_order()
        means_G = [of_group.means if of_group else 0 for of_group in rule_G]
        exchanged = any(means_G) and layout.column_cut
        statistics = RowStatistics(layout, comm, kernels, means_G) if exchanged else None
        state = EngineState(
            layout,
            comm,
            kernels,
            stores,
            self.dtype,
            payload or self.dtype,
            statistics,
            self.members,
        )
        self.state = state
        self.update = FusedUpdate(state, rules)
        self.parameters_of = table_parameters(layout, stores, comm.rank)
        none = torch.empty(0, dtype=self.dtype, device=comm.device)
        self.updated = {
            t.name: UpdatedTable(UpdatedWeight(self, t.name, none.new_empty(0, t.embedding_dim)))
            for t in tables
            if t.name not in self.parameters_of
        }
        self.update.before_update = partial(_begin_update, self.parameters_of)
        self.header = state.header
        self.waits = state.waits
        self.anchor = torch.zeros(0, device=comm.device, requires_grad=True)
        self._local = LocalLookup(state, self._fused) if comm.world == 1 else None
        self._ahead: list[tuple[KeyedJaggedTensor | Exception, Requests]] = []
        self._pass: _Pass | None = None
        self._warm_up(trains, slow_kernels_note(backend, comm.device))

    @cached_property
    def _fused(self) -> FusedIntegers | None:
        """The integers of all groups at once; None where kernels do not know these tables."""
        return FusedIntegers(self.state) if FusedIntegers.takes(self.state) else None

    def why_unstoppable(self) -> str:
        """Return the reason why the device cannot stop an update of the tables; empty if it can."""
        exact = any(store.needs_exact for store in self.state.stores)
        if self.state.backend.fused_integers is None:
            return f"kernels of {self.state.backend.name} read no rates on the device"
        if self.parameters_of or self.update.deferred or exact:
            return "the host takes part in the update of the tables"
        return "" if self.update.rules else "the tables are read-only"

    def needs_host(self, ids: int | None = None) -> bool:
        """Return whether a training step of the tables needs the host: for messages, to decide on
        new keys, or to learn how many ids a sequence loses or the bag of a concatenation has.
        Otherwise the step can be recorded.

        Args:
            ids: The number of ids of its batch, for which the tables may have room; None: any.
        """
        state = self.state
        keys = ANY_NUMBER if ids is None or not self._fused else ids * self._fused.most_slots
        sends = self.comm.world > 1 or state.row_statistics is not None
        searches = any(
            store.finds_rows
            and not (
                isinstance(store, DynamicStore) and store.adds_unread and store.slots.has_room(keys)
            )
            for store in state.stores
        )
        reads = state.id_rules.shortens or any(x.hotness for x in state.layout.lookups)
        return self._fused is None or sends or searches or reads

    def _warm_up(self, trains: bool, missing: str) -> None:
        """Compile kernels before the first step. One rank of each machine compiles a kernel, and
        the others read it from the cache on disk.
        """
        state = self.state
        if missing and not self.comm.rank:
            note(missing)
        if state.backend.name != "numba":
            return
        statistics = state.row_statistics
        with report_compilation(self.comm.rank == 0):
            warm_up(
                state.backend,
                state.routes,
                self.comm.world,
                [store.pooled for store in state.stores],
                state.in_lines_G,
                self.dtype,
                state.payload,
                state.any_mean,
                [rule if trains and rule != FROZEN else None for rule in self.update.rule_G],
                statistics.means_G if statistics else [0] * len(state.stores),
            )

    # ---- read by the rest of the package

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the param group of each rule of the tables, with the live learning rate.

        Raises:
            ConfigError: The tables are read-only.
        """
        return self.update.param_groups

    @property
    def updates(self) -> int:
        """Return the number of updates of the rows; loading a checkpoint sets the number."""
        return self.update.updates

    @updates.setter
    def updates(self, number: int) -> None:
        """Set the number of updates of the rows."""
        self.update.begin_at(number)
        for store in self.state.stores:
            store.settle(number)

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return list(self.state.layout.tables)

    def exchange_buffers(self) -> Iterator[Tensor]:
        """Yield the buffers that are kept between batches, and those of batches in look-ahead."""
        yield from self.state.buffers()
        yield from self.update.buffers()
        for _, requests in self._ahead:
            yield from requests.buffers()

    def begin_anew(self, tables: Collection[str], epoch: int) -> None:
        """Give the rows of some tables the start values of an epoch, and their optimiser its start
        state. Frozen tables stay. Every rank calls it between two steps.

        Args:
            tables: The names of tables, which may belong to other collections.
            epoch: The number of the epoch, from 1 on.
        """
        self.update.finish_step()
        self.forget_vectors()
        trained = {name for name in tables if not self.is_frozen(name)}
        for store in self.state.stores:
            store.begin_anew(trained, epoch)
        self.update.begin_anew(tables, self.updates)

    @property
    def frozen(self) -> frozenset[str]:
        """Return the names of the tables that were frozen after sharding."""
        return frozenset(
            name
            for store in self.state.stores
            if isinstance(store, FloatRows)
            for name in store.frozen.names
        )

    def is_frozen(self, table: str) -> bool:
        """Return whether updates leave the rows of a table as they are."""
        return table in self.frozen or self.rules.get(table, FROZEN) == FROZEN

    def freeze(self, tables: Collection[str], frozen: bool = True) -> None:
        """Freeze some tables, or train them again. Every rank calls it between two steps.

        Args:
            tables: The names of the tables.
            frozen: Whether updates leave their rows as they are.

        Raises:
            ConfigError: A table was frozen when it was sharded, so it has no optimiser to train
                with; or only some dynamic tables of a store are frozen.
        """
        frozen_tables = self.frozen | set(tables) if frozen else self.frozen - set(tables)
        fixed = [] if frozen else [name for name in tables if self.rules.get(name) == FROZEN]
        dynamic = [{s.table.name for s in store.strips} for store in self.dynamic_stores]
        check_frozen(frozen_tables, fixed, dynamic)
        self.update.complete()
        for store in self.state.stores:
            if isinstance(store, FloatRows):
                store.freeze(frozen_tables)

    def begin_rows(self, table: str, row_K: Tensor) -> None:
        """Give some rows of a table their start values; their optimiser's state stays. Every rank
        calls it between two steps.

        Args:
            table: The name of the table.
            row_K: Rows of the table.
        """
        self.update.finish_step()
        self.forget_vectors()
        for store in self.state.stores:
            store.begin_rows(table, row_K)

    # ---- checkpoints

    @property
    def dynamic_stores(self) -> list[DynamicStore]:
        """Return the stores of dynamic tables."""
        return [store for store in self.state.stores if isinstance(store, DynamicStore)]

    def blocks(self, averaged: bool = False) -> Iterator[Block]:
        """Yield this rank's rectangles, as views, for a checkpoint to write. Every rank calls it.

        Args:
            averaged: Whether the weights are the average (`RowStore.blocks`).
        """
        counts = self.rows_of_stretches()
        for store in self.state.stores:
            yield from (
                store.blocks(averaged, counts)
                if isinstance(store, DynamicStore)
                else store.blocks(averaged)
            )

    def rows_of_stretches(self) -> RowsOfStretches:
        """End the step, and return the number of rows in each stretch of the dynamic tables, over
        all ranks. The manifest of a checkpoint stores these numbers. Every rank calls it.
        """
        self.update.complete()
        counts: RowsOfStretches = {}
        if self.dynamic_stores:
            here = [store.rows_of_stretches() for store in self.dynamic_stores]
            for of_store in chain.from_iterable(self.comm.all_gather(here)):
                merge_rows_of_stretches(counts, of_store)
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
        rows_of_stretches: RowsOfStretches,
        updates: int,
        table: str | None = None,
        averaged: bool = False,
    ) -> Iterator[Block]:
        """Forget the rows of dynamic tables, and yield this rank's rectangles for a checkpoint to
        fill. `loaded` ends the load. Every rank calls both.

        Args:
            rows_of_stretches: The rows of the dynamic tables in the checkpoint, by stretch.
            updates: The number of updates of the stored rows.
            table: The name of the only table to load; None loads all.
            averaged: Whether to fill the average, too (`RowStore.blocks_to_fill`).

        Raises:
            CheckpointError: A table is dynamic only in the model, or only in the checkpoint.
        """
        self.update.complete()
        for t in self.state.layout.tables:
            if table is None and t.dynamic is not None and t.name not in rows_of_stretches:
                raise CheckpointError(
                    f"table {t.name}: the table is dynamic in the model, and static or absent in "
                    "the checkpoint: train it anew, or set num_embeddings to the number of its "
                    "rows"
                )
            if table is None and t.dynamic is None and t.name in rows_of_stretches:
                raise CheckpointError(
                    f"table {t.name}: the table is static in the model and dynamic in the "
                    "checkpoint, where its rows have another order: set "
                    'num_embeddings="dynamic", or copy the rows of recapp.static_table into it'
                )
        for store in self.state.stores:
            blocks = (
                store.blocks_to_load(rows_of_stretches, updates, averaged)
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
        if stores := self.dynamic_stores:
            together(
                self.comm, lambda: [*map(DynamicStore.loaded, stores)], "could not load its keys"
            )

    # ---- an average of the rows

    @property
    def _averages(self) -> list[RowAverage]:
        return [store.average for store in self.state.stores if store.average is not None]

    @property
    def keeps_average(self) -> bool:
        """Return whether there is an average of the rows."""
        return bool(self._averages)

    def keep_average(self) -> None:
        """Make room for an average of the rows of every store (`recapp/engine/row_average.py`)."""
        for store in self.state.stores:
            store.keep_average()

    def update_average(self, weight: float) -> None:
        """Move the average a share of the way towards the rows; 1 copies the rows. Every rank calls
        it between two steps.
        """
        self.update.complete()
        for average in self._averages:
            average.update(weight)

    def show_average(self, shown: bool) -> None:
        """Let lookups read the average, or the trained rows again. Every rank calls it between two
        steps.
        """
        self.update.finish_step()
        self.forget_vectors()
        for average in self._averages:
            average.show(shown)

    def forget_vectors(self) -> None:
        """Drop the vectors that wait for a collection, because rows have other values now. Every
        rank calls it.
        """
        self._pass = None

    # ---- the exchange of a batch

    def input_dist(
        self, features: KeyedJaggedTensor | Exception, member: int | None = None
    ) -> Requests:
        """Start the exchange of a batch's row requests. The exchange reads no weights, so it may
        run ahead of the batch's step. Every rank calls it.

        Args:
            features: The ids of the batch, or the error because of which this rank has none.
            member: The number of the collection that is called now; None ahead of all calls.
        """
        return Requests(features, self.state, self._taken(features, member), self._fused)

    def _taken(self, features: KeyedJaggedTensor | Exception, member: int | None) -> list[bool]:
        """Return for each collection whether it looks up a batch. A collection looks the batch up
        if the batch has the features of all lookups of the collection and the collection was not
        called with these ids yet. A collection with ids of its own looks up only the batches of its
        own calls, without other collections.
        """
        if isinstance(features, Exception) or len(self.members) == 1:
            return [True] * len(self.members)
        if member is not None and self.members[member].own_ids:
            return [i == member for i in range(len(self.members))]
        keys = set(features.keys())
        served = () if member is None or self._pass is None else self._pass.served
        looks_up = [
            i == member
            or (i not in served and not m.own_ids and keys >= {x.feature for x in m.lookups})
            for i, m in enumerate(self.members)
        ]
        return looks_up if any(looks_up) else [True] * len(looks_up)

    def look_ahead(self, features: KeyedJaggedTensor | Exception) -> int:
        """Start the exchange of a later batch. `forward` finds the exchange by the identity of
        `features`. Every rank calls it.

        Args:
            features: The ids of the batch, or the error because of which this rank could not read
                it: then the other ranks raise a RankError in the step of the batch. On a GPU the
                exchange does not wait for the compute stream: ids must be complete or come from
                `comm.side`.

        Returns:
            The number of exchanges that now wait for their batches.
        """
        self.update.finish_step()
        with self.comm.side.beside():
            self._ahead.append((features, self.input_dist(features)))
        return self.waiting_ahead

    @property
    def waiting_ahead(self) -> int:
        """Return the number of look-ahead exchanges that wait for their batches."""
        return len(self._ahead)

    def advance_ahead(self) -> None:
        """Advance the look-ahead exchanges, in their order. Every rank calls it at the same point.

        The requests in their headers are read now: a stop does not wait for the step of its batch.
        """
        for _, requests in self._ahead:
            requests.advance()
            self.header.wanted_W = np.bitwise_or(
                self.header.wanted_W or [0], requests.headers_W[:, 2]
            ).tolist()

    def failure_ahead(self) -> bool:
        """Return whether a header shows that a batch in look-ahead will fail in its step. The
        result is the same on all ranks.
        """
        return any(requests.headers_W[:, :1].any() for _, requests in self._ahead)

    def forget_ahead(self) -> None:
        """End the look-ahead exchanges of batches that will not run. Every rank calls it."""
        while self._ahead:
            self._ahead.pop(0)[1].abandon()
        self.forget_vectors()

    def _requests(self, features: KeyedJaggedTensor, member: int | None = None) -> Requests:
        """Return the exchange of the current batch: started ahead, or started now."""
        for i, (expected, requests) in enumerate(self._ahead):
            if expected is features and (member is None or requests.taken[member]):
                del self._ahead[i]
                return requests
        return self.input_dist(features, member)

    def forward(
        self, features: KeyedJaggedTensor, member: int = 0
    ) -> tuple[list[Tensor], LookupRows]:
        """Return the vectors of one collection. Every rank calls it with its own batch, which may
        be empty.

        Args:
            features: Raw ids, which include all features of the collection.
            member: The number of the collection.

        Returns:
            The vectors: for bags one matrix [B, room + columns], for sequences a matrix [L, D]
            each. And the rows of the collection's lookups.

        Raises:
            IdError: On all ranks, if one rank has an id outside a table with the id rule `error`.
            ConfigError: In torch.export. In backward, where a collection was not called with these
                ids although they contain its features.
        """
        if torch.compiler.is_exporting():
            raise ConfigError(
                "torch.export: a sharded collection sends messages, which no exported program "
                "can do: export the unsharded model with gathered_state_dict(model), or run "
                "recapp.export on a checkpoint"
            )
        batch_pass = self._vectors_of(features, member)
        if member not in batch_pass.shares:
            shares = self._look_up(features, member)
            batch_pass.served.update(shares)
            batch_pass.shares.update(shares | batch_pass.shares)
        vectors, rows, called_by = batch_pass.shares.pop(member)
        called_by.add(member)
        return vectors, rows.of(self._lookups[member])

    def _vectors_of(self, features: KeyedJaggedTensor, member: int) -> _Pass:
        """Return the pass to which the call of a collection belongs. It is a new one for other ids,
        after a change of the rows, and at the next call of its first collection: the same ids may
        come again in a later forward. With gradients, each look-up has its part in the step.
        """
        batch_pass = self._pass
        if (
            batch_pass
            and member in batch_pass.shares
            and batch_pass.fits(features, self._rows_now())
        ):
            return batch_pass
        self.update.finish_step()  # may change the rows, and a look-up follows
        rows = self._rows_now()
        again = batch_pass and member == batch_pass.first and not torch.is_grad_enabled()
        if batch_pass is None or again or not batch_pass.fits(features, rows):
            batch_pass = _Pass(features, rows, member, set(), {})
        self._pass = batch_pass if len(self.members) > 1 else None
        return batch_pass

    def _rows_now(self) -> tuple[object, ...]:
        """Return a value that differs after a change of the rows, or of the mode of gradients."""
        of_parameters = [p.changes for p in self.parameters_of.values()]
        return torch.is_grad_enabled(), self.update.changes, *of_parameters

    def _look_up(self, features: KeyedJaggedTensor, member: int) -> dict[int, _Share]:
        """Look up a batch, on a single rank without training from its own rows, and store the
        headers of the ranks. Return the vectors of each collection.
        """
        state = self.state
        state.observer.begins()
        parts: Sequence[Tensor]
        if self._local is not None and not (torch.is_grad_enabled() or self._ahead):
            rows, output, parts = self._local.read(features, self._taken(features, member))
            called_by: set[int] = set()
            self.header.rows_W = [samples_of(features)]
            self.header.wanted_W = [self.header.wanted]
        else:
            cut = self.cut
            if cut is not None and cut.features is features and cut.requests.taken[member]:
                requests = cut.requests
                parts = cut.read()
            else:
                requests, parts = self._trained(self._requests(features, member))
            rows = requests.rows
            output = requests.output
            called_by = requests.called_by
        vectors = state.outputs.of_members(parts, output)
        return {member: (vectors[member], rows, called_by) for member in vectors}

    def cut_lookup(self, features: KeyedJaggedTensor) -> CutLookup:
        """Look up a batch before the model is called with it. Every rank calls it."""
        self.update.finish_step()
        self.state.observer.begins()
        return CutLookup(features, *self._trained(self._requests(features)))

    def _trained(self, requests: Requests) -> tuple[Requests, tuple[Tensor, ...]]:
        """Return the vectors of requests, by which autograd reaches the tables."""
        requests.finish()
        self.header.rows_W = requests.headers_W[:, 1].tolist()
        self.header.wanted_W = requests.headers_W[:, 2].tolist()
        parts: tuple[Tensor, ...] = Lookup.apply(  # type: ignore[no-untyped-call]
            self.anchor, requests.weights_L, requests, self.update, self.advance_ahead
        )
        learns = parts[0].requires_grad
        if learns:
            self.update.expect(requests)
        else:
            requests.release()
        assert learns or not torch.is_grad_enabled(), (
            "without a gradient the tables would silently not train"
        )
        return requests, parts


def _begin_update(parameters: Mapping[str, TableParameter]) -> None:
    """Prepare the gradients of tables that are parameters. (A method of the tables would keep them
    until the garbage is collected.)
    """
    for parameter in parameters.values():
        parameter.begin_update()
