"""The sharded twin of an `EmbeddingBagCollection`: same input, same output, any plan.

    features -> Requests (input_dist)
             -> Lookup (lookup, output_dist; backward updates the rows) -> KeyedTensor

Rows live in one store per group (`recapp/engine/row_store.py`). The optimiser is fused into
backward: a table has no gradient. Live learning rates are read from `param_groups`, one of each
rule, which the one optimiser object holds too, so schedules reach tables like any parameter.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from recapp.console import note
from recapp.engine.fused_optimizer import FusedOptimizer
from recapp.engine.fused_update import FusedUpdate
from recapp.engine.lookup import Lookup
from recapp.engine.requests import Requests
from recapp.engine.row_statistics import RowStatistics
from recapp.engine.row_store import FloatStore, RowStore, StoredGroup
from recapp.engine.sharded_state import put_tables_in_state
from recapp.engine.state import EngineState
from recapp.errors import ConfigError, PlanError
from recapp.kernels.backend import backend as choose_backend
from recapp.kernels.backend import slow_kernels_note
from recapp.kernels.warm_up import report_compilation, warm_up
from recapp.optim.rules import RowRule
from recapp.optim.rules_by_table import Rules, distinct_rules, rules_of
from recapp.sharding.layout import Block, make_layout
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.embedding_bag import compute_dtype
from recapp.tables.lookups import TableLookup
from recapp.transport.communicator import Comm

Only = TypeVar("Only")


class ShardedEmbeddingBagCollection(nn.Module):
    """An `EmbeddingBagCollection` whose tables lie where a plan says.

    Args:
        tables: As of the unsharded collection.
        plan: Plan of exactly these tables, for as many ranks as `comm` has.
        comm: Communicator of the ranks.
        rule: Optimiser of the rows, or rules by table name or glob
            (`recapp/optim/rules_by_table.py`); None for tables that are only read.
        seed: Seed of the start values: the same model under every plan.
        backend: Which kernels run (`recapp/kernels/backend.py`); `auto` takes the fastest that is
            there.
        payload: Type of vectors and gradients that travel; None takes the compute type.
        trains: Whether kernels for updates are compiled ahead; without, at the first update.
        make_store: Makes the store of each group, with its rows; None makes a `FloatStore` with
            start values.
        lookups: What reads the tables, in output order; None takes what the tables declare.
        is_weighted: As of the unsharded collection; None multiplies by weights where a batch has
            some.

    Raises:
        PlanError: The plan does not tile the tables or was made for another number of ranks.
        ConfigError: The backend is unknown or not there, or rules and tables do not fit.

    `state` is what the engine works with; measuring attaches by `state.observer`. `update` changes
    the rows. `header`, `waits`, `comm` and `id_rules` are the state's.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        plan: ShardingPlan,
        comm: Comm,
        rule: Rules | None,
        seed: int = 0,
        backend: str = "auto",
        payload: torch.dtype | None = None,
        trains: bool = True,
        make_store: Callable[[StoredGroup], RowStore] | None = None,
        lookups: Sequence[TableLookup] | None = None,
        is_weighted: bool | None = None,
    ) -> None:
        super().__init__()
        _check_ranks(plan, comm)
        self.plan = plan
        self.comm = comm
        self.rules = rules_of(rule, [t.name for t in tables])
        rules = distinct_rules(self.rules.values())
        numbers = {table: rules.index(of_table) for table, of_table in self.rules.items()}
        layout = make_layout(tables, plan, lookups, numbers or None)
        self.lookups = layout.lookups
        device = comm.device
        kernels = choose_backend(backend, device)
        self.dtype = compute_dtype(tables)
        rule_G = [rules[group.rule] if rules else None for group in layout.groups]
        make = make_store or (lambda group: FloatStore(group, rule_G[group.number], seed))
        stores = [
            make(StoredGroup(layout, g, comm.rank, self.dtype, device, kernels))
            for g in range(len(layout.groups))
        ]
        self.stores = nn.ModuleList(stores)
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
            is_weighted,
        )
        self.state = state
        self.update = FusedUpdate(state, rules)
        self.header = state.header
        self.waits = state.waits
        self.id_rules = state.id_rules
        self.width = state.width
        self.anchor = torch.zeros(0, device=device, requires_grad=True)
        self._ahead: list[tuple[KeyedJaggedTensor | Exception, Requests]] = []
        self.tables_in_state = True
        put_tables_in_state(self)
        self._warm_up(trains, slow_kernels_note(backend, device))

    def _warm_up(self, trains: bool, missing: str) -> None:
        """Compile kernels before the first step: rank 0 first, the others read what it left on
        disk.
        """
        state = self.state
        statistics = state.row_statistics
        if missing and not self.comm.rank:
            note(missing)
        if state.backend.name != "numba":
            return
        if self.comm.rank:
            self.comm.barrier()
        with report_compilation(self.comm.rank == 0):
            warm_up(
                state.backend,
                state.routes,
                self.comm.world,
                [store.example for store in state.stores],
                state.in_lines_G,
                self.dtype,
                state.payload,
                state.any_mean,
                self.update.rule_G if trains else [None] * len(state.stores),
                statistics.means_G if statistics else [0] * len(state.stores),
            )
        if not self.comm.rank:
            self.comm.barrier()

    # ---- what the rest of the package reads

    @property
    def rule(self) -> RowRule | None:
        """Return the optimiser of the rows; None where they are only read.

        Raises:
            ConfigError: Tables have several; `rules` has them by table.
        """
        return self._only("rule", self.update.rules) if self.rules else None

    @property
    def param_group(self) -> dict[str, Any]:
        """Return the param group of the tables, with the live learning rate.

        Raises:
            ConfigError: The tables are only read, or have several; `param_groups` has them all.
        """
        return self._only("param_group", self.param_groups)

    def _only(self, name: str, found: list[Only]) -> Only:
        if len(found) > 1:
            raise ConfigError(f"{name}: the tables follow {len(found)} rules: use {name}s instead")
        return found[0]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the param group of each rule of the tables, with the live learning rate.

        Raises:
            ConfigError: The tables are only read.
        """
        return self.update.param_groups

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """Return the update of the tables as an optimiser object.

        Raises:
            ConfigError: The tables are only read.
        """
        return FusedOptimizer({"": self})

    @property
    def updates(self) -> int:
        """Return how many updates the rows have had; a checkpoint sets it."""
        return self.update.updates

    @updates.setter
    def updates(self, number: int) -> None:
        """Set how many updates the rows have had."""
        self.update.updates = number

    @property
    def room(self) -> int:
        """Return how many columns are free before the first vector of a sample."""
        return self.state.room

    def leave_room(self, columns: int) -> None:
        """Leave columns free before the first vector of a sample, from the next lookup on:
        `KeyedTensor.prepend` writes there.
        """
        self.state.leave_room(columns)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables, in order."""
        return list(self.state.layout.tables)

    def is_weighted(self) -> bool | None:
        """Return whether rows are multiplied by sample weights; None where batches decide."""
        return self.id_rules.is_weighted

    def store(self, group: int) -> RowStore:
        """Return the rows of a group on this rank."""
        return self.state.stores[group]

    def blocks(self) -> Iterator[Block]:
        """Yield the rectangles held here, as views: what a checkpoint reads and writes. Every rank
        calls it.
        """
        self.update.finish_step()
        for store in self.state.stores:
            yield from store.blocks()

    def exchange_buffers(self) -> Iterator[Tensor]:
        """Yield the memory that is kept from batch to batch, and what batches that are looked ahead
        to hold.
        """
        yield from self.state.buffers()
        yield from self.update.buffers()
        for _, requests in self._ahead:
            yield from requests.buffers()

    # ---- the exchange of a batch

    def input_dist(self, features: KeyedJaggedTensor | Exception) -> Requests:
        """Start to exchange which rows a batch needs. Reads no weights, so it may run before the
        batch's turn; every rank calls it.
        """
        return Requests(features, self.state)

    def look_ahead(self, features: KeyedJaggedTensor | Exception) -> int:
        """Start the exchange of a batch that comes later; `forward` finds it by the identity of
        `features`. Every rank calls it.

        Args:
            features: Of the batch. Or why this rank could not read it: the others raise a RankError
                when its turn comes. On a GPU the exchange does not wait for the stream that
                computes: ids are complete or come from `comm.side`.

        Returns:
            How many exchanges wait for their batches now.
        """
        self.update.finish_step()
        with self.comm.side.beside():
            self._ahead.append((features, self.input_dist(features)))
        return self.waiting_ahead

    @property
    def waiting_ahead(self) -> int:
        """Return how many exchanges that were started ahead wait for their batches."""
        return len(self._ahead)

    def advance_ahead(self) -> None:
        """Go on with exchanges that were started ahead, in their order; every rank calls it at the
        same point.

        What their headers ask of all is read now: a stop does not wait for the batch it travelled
        with.
        """
        for _, requests in self._ahead:
            requests.advance()
            self.header.wanted_W = np.bitwise_or(
                self.header.wanted_W or [0], requests.headers_W[:, 2]
            ).tolist()

    def failure_ahead(self) -> bool:
        """Return whether a batch that was looked ahead to is known to fail in its turn: on all
        ranks alike.
        """
        return any(requests.headers_W[:, :1].any() for _, requests in self._ahead)

    def forget_ahead(self) -> None:
        """End exchanges that were started ahead for batches that will not come. Every rank calls
        it.
        """
        while self._ahead:
            self._ahead.pop(0)[1].abandon()

    def _requests(self, features: KeyedJaggedTensor) -> Requests:
        """Return the exchange of a batch whose turn has come: started ahead, or now."""
        for i, (expected, requests) in enumerate(self._ahead):
            if expected is features:
                del self._ahead[i]
                return requests
        return self.input_dist(features)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag; every rank calls it with its own batch, an empty one if need be.

        Args:
            features: Raw ids of at least the tables' features.

        Returns:
            [B, sum of dims], keyed by feature (`feature@table` where several tables read one).

        Raises:
            IdError: On all ranks, if one of them has an id outside a table whose rule is `error`.
        """
        state = self.state
        state.observer.begins()
        self.update.finish_step()
        requests = self._requests(features)
        requests.finish()
        self.header.rows_W = requests.headers_W[:, 1].tolist()
        self.header.wanted_W = requests.headers_W[:, 2].tolist()
        values_BD = Lookup.apply(  # type: ignore[no-untyped-call]
            self.anchor, requests.weights_L, requests, self.update, self.advance_ahead
        )
        assert isinstance(values_BD, Tensor)
        if values_BD.requires_grad:
            self.update.expect(requests)
        else:
            requests.release()
        assert values_BD.requires_grad or not torch.is_grad_enabled(), (
            "without a gradient the tables would silently not train"
        )
        return KeyedTensor(
            [x.output for x in self.lookups],
            [x.dim for x in self.lookups],
            values_BD,
            room=state.room,
        )

    def extra_repr(self) -> str:
        """Return which tables lie where."""
        lines = []
        for t in self.state.layout.tables:
            s = self.plan.tables[t.name]
            ranks = (
                "all ranks"
                if s.mode == "replicated"
                else f"rank{'s' if len(s.ranks) > 1 else ''} {', '.join(map(str, s.ranks))}"
            )
            lines.append(
                f"{t.name}: {t.num_embeddings:,} x {t.embedding_dim}, {s.sharding_type}, "
                f"{s.mode}, {ranks}"
            )
        return f"plan={self.plan.name}, rank {self.comm.rank} of {self.comm.world}\n" + "\n".join(
            lines
        )


def _check_ranks(plan: ShardingPlan, comm: Comm) -> None:
    if plan.world_size != comm.world:
        raise PlanError(
            f"plan {plan.name} is for {plan.world_size} ranks, but there are {comm.world}: "
            f"set trainer.devices={plan.world_size} or make the plan for {comm.world}"
        )
