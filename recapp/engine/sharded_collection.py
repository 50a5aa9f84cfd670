"""Sharded collections: a model's share of tables that lie where a plan says.

Each is the twin of an unsharded collection: same input, same output, any plan. All collections of a
model share one `ShardedTables`, which looks up, exchanges and updates; a collection names its
member there, and forms the output that its twin has.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from recapp.engine.fused_optimizer import FusedOptimizer
from recapp.engine.outputs import Member
from recapp.engine.row_store import RowStore, StoredGroup
from recapp.engine.sharded_state import put_tables_in_state
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.table_parameter import TableParameter
from recapp.optim.rules_by_table import Rules
from recapp.sharding.layout import Block
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.bags_of_samples import pooled_of_samples
from recapp.tables.config import EmbeddingConfig, common_dim
from recapp.tables.embedding import sequences
from recapp.tables.lookups import TableLookup, lookups_of, outputs_by_table
from recapp.tables.module_by_name import ModuleByName, key_of
from recapp.transport.communicator import Comm


class ShardedCollection(nn.Module):
    """One collection of the tables of a model.

    Args:
        shared: The tables, and the exchange that all their collections share.
        member: Number of this collection among theirs.

    `parameters_of` are those of its tables that are parameters, by name.
    """

    tables_of: ClassVar[str]
    """The attribute that holds the tables of the unsharded collection, in names of weights."""

    def __init__(self, shared: ShardedTables, member: int = 0) -> None:
        super().__init__()
        self.shared = shared
        self.member = member
        self.lookups = shared.members[member].lookups
        self._tables = list({x.table.name: x.table for x in self.lookups}.values())
        self.tables_in_state = True
        own = {t.name for t in self._tables}
        held = {name: p for name, p in shared.parameters_of.items() if name in own}
        if held:
            setattr(self, self.tables_of, ModuleByName(held))
        self.parameters_of: Mapping[str, TableParameter] = held
        put_tables_in_state(self)

    @property
    def plan(self) -> ShardingPlan:
        """Return the plan of the tables."""
        return self.shared.plan

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that is computed in and handed out."""
        return self.shared.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of this rank, where outputs are."""
        return self.shared.comm.device

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return list(self._tables)

    def holder_of(self, table: str) -> object:
        """Return the tables of the model: its collections share those of one name."""
        return self.shared

    def weight_name(self, table: str) -> str:
        """Return the name that a table's weight has in the state dict of this collection."""
        return f"{self.tables_of}.{key_of(table)}.weight"

    def blocks(self) -> Iterator[Block]:
        """Yield the rectangles of its tables that this rank holds. Every rank calls it."""
        names = {t.name for t in self._tables}
        return (block for block in self.shared.blocks() if block.table in names)

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """Return the update of the tables as an optimiser object.

        Raises:
            ConfigError: The tables are only read.
        """
        return FusedOptimizer({"": self})

    def extra_repr(self) -> str:
        """Return which tables lie where."""
        comm = self.shared.comm
        lines = [f"plan={self.plan.name}, rank {comm.rank} of {comm.world}"]
        for t in self._tables:
            s = self.plan.tables[t.name]
            rows = f"{t.num_embeddings:,}" if t.dynamic is None else "dynamic"
            ranks = (
                "all ranks"
                if s.mode == "replicated"
                else f"rank{'s' if len(s.ranks) > 1 else ''} {', '.join(map(str, s.ranks))}"
            )
            lines.append(
                f"{t.name}: {rows} x {t.embedding_dim}, {s.sharding_type}, {s.mode}, {ranks}"
            )
        return "\n".join(lines)


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An `EmbeddingBagCollection` whose tables lie where a plan says; arguments as of
    `ShardedCollection`.
    """

    tables_of = "embedding_bags"

    def is_weighted(self) -> bool | None:
        """Return whether rows are multiplied by sample weights; None where batches decide."""
        return self.shared.members[self.member].is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order, as TorchRec's method does."""
        return self.tables()

    @property
    def width(self) -> int:
        """Return the columns of a sample's vectors."""
        return self.shared.members[self.member].columns

    @property
    def room(self) -> int:
        """Return how many columns are free before the first vector of a sample."""
        return self.shared.state.outputs.room[self.member]

    def leave_room(self, columns: int) -> None:
        """Leave columns free before the first vector of a sample, from the next lookup on:
        `KeyedTensor.prepend` writes there.
        """
        self.shared.state.leave_room(self.member, columns)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag; every rank calls it with its own batch, an empty one if need be.

        Args:
            features: Raw ids of at least the tables' features.

        Returns:
            [B, sum of columns], keyed by output (a feature, or `feature@table` where several
            tables read one); by sample where inverse indices say which bags these take.

        Raises:
            IdError: On all ranks, if one of them has an id outside a table whose rule is `error`.
        """
        (values_BD,), _ = self.shared(features, self.member)
        return pooled_of_samples(self.lookups, values_BD, features, self.room)


class ShardedEmbeddingCollection(ShardedCollection):
    """An `EmbeddingCollection` whose tables lie where a plan says; arguments as of
    `ShardedCollection`.

    `need_indices` says whether the weights of an output are the rows that were looked up.
    """

    tables_of = "embeddings"

    def __init__(self, shared: ShardedTables, member: int = 0, need_indices: bool = False) -> None:
        super().__init__(shared, member)
        self._need_indices = need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order, as TorchRec's method does."""
        return self.tables()

    def need_indices(self) -> bool:
        """Return whether the weights of an output are the rows that were looked up."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the columns D of every table.

        Raises:
            ConfigError: The tables are of several widths.
        """
        return common_dim(self._tables)

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the outputs of each table, in the order of the tables."""
        return outputs_by_table(self.lookups)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up every id; every rank calls it with its own batch, an empty one if need be.

        Args:
            features: Raw ids of at least the tables' features; weights are ignored.

        Returns:
            For each feature (`feature@table` where several tables read one) its vectors [L, D],
            with the lengths of its bags.

        Raises:
            IdError: On all ranks, if one of them has an id outside a table whose rule is `error`.
        """
        vectors, rows = self.shared(features, self.member)
        return sequences(self.lookups, vectors, rows, self._need_indices, features)


def shard_bags(
    tables: Sequence[EmbeddingConfig],
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
) -> ShardedEmbeddingBagCollection:
    """Return a sharded collection of bags with tables of its own. Every rank calls it.

    Args:
        tables: As of the unsharded collection.
        plan: As of `ShardedTables`, like `comm`, `rule`, `seed`, `backend`, `payload`, `trains` and
            `make_store`.
        lookups: What reads the tables, in output order; None takes what the tables declare.
        is_weighted: As of the unsharded collection; None multiplies by weights where a batch has
            some.
    """
    member = Member(lookups_of(tables) if lookups is None else tuple(lookups), is_weighted)
    shared = ShardedTables(
        list(tables), plan, comm, rule, seed, backend, payload, trains, make_store, [member]
    )
    return ShardedEmbeddingBagCollection(shared)
