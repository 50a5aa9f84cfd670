"""Sharded collections of tables, placed by a plan.

Each is the twin of an unsharded collection: same input and same output under every plan. All
collections of a model share one `ShardedTables`, which looks up, exchanges and updates rows. A
collection is one member of them, and converts the vectors to the output of its unsharded twin.
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
from recapp.optim.named_rules import Rules
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
    """One sharded collection of a model.

    Args:
        shared: The tables, and the exchange that all collections share.
        member: The number of this collection among those that share the tables.

    `parameters_of` has the collection's tables that are parameters, by name.
    """

    tables_of: ClassVar[str]
    """The attribute of the unsharded collection that holds its tables; names of weights contain
    it.
    """

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
        """Return the compute type, which is also the type of outputs."""
        return self.shared.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of this rank and of outputs."""
        return self.shared.comm.device

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return list(self._tables)

    def holder_of(self, table: str) -> object:
        """Return the owner of a table: the shared tables, in which collections share tables of one
        name.
        """
        return self.shared

    def weight_name(self, table: str) -> str:
        """Return the name of a table's weight in the state dict of this collection."""
        return f"{self.tables_of}.{key_of(table)}.weight"

    def blocks(self) -> Iterator[Block]:
        """Yield this rank's rectangles of the collection's tables. Every rank calls it."""
        names = {t.name for t in self._tables}
        return (block for block in self.shared.blocks() if block.table in names)

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """Return the update of the tables as an optimiser object.

        Raises:
            ConfigError: The tables are read-only.
        """
        return FusedOptimizer({"": self})

    def extra_repr(self) -> str:
        """Return the tables and their places."""
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
    """A sharded `EmbeddingBagCollection`, placed by a plan. Arguments as for
    `ShardedCollection`.
    """

    tables_of = "embedding_bags"

    def is_weighted(self) -> bool | None:
        """Return whether rows are multiplied by sample weights; None where each batch decides."""
        return self.shared.members[self.member].is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order, like TorchRec's method."""
        return self.tables()

    @property
    def width(self) -> int:
        """Return the number of columns of a sample's vectors."""
        return self.shared.members[self.member].columns

    @property
    def room(self) -> int:
        """Return the number of free columns before the first vector of a sample."""
        return self.shared.state.outputs.room[self.member]

    def leave_room(self, columns: int) -> None:
        """Leave columns free before the first vector of a sample, from the next lookup on.
        `KeyedTensor.prepend` writes to them.
        """
        self.shared.state.leave_room(self.member, columns)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag. Every rank calls it with its own batch, which may be empty.

        Args:
            features: Raw ids, which include all features of the tables.

        Returns:
            [B, sum of columns], keyed by output (a feature, or `feature@table` where several tables
            read one feature). Where the batch has inverse indices, the rows are its samples, and
            the indices name the bags of each sample.

        Raises:
            IdError: On all ranks, if one rank has an id outside a table with the id rule `error`.
        """
        (values_BD,), _ = self.shared(features, self.member)
        return pooled_of_samples(self.lookups, values_BD, features, self.room)


class ShardedEmbeddingCollection(ShardedCollection):
    """A sharded `EmbeddingCollection`, placed by a plan. Arguments as for `ShardedCollection`.

    With `need_indices`, the weights of an output are the rows that were looked up.
    """

    tables_of = "embeddings"

    def __init__(self, shared: ShardedTables, member: int = 0, need_indices: bool = False) -> None:
        super().__init__(shared, member)
        self._need_indices = need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order, like TorchRec's method."""
        return self.tables()

    def need_indices(self) -> bool:
        """Return whether the weights of an output are the rows that were looked up."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the number of columns D of every table.

        Raises:
            ConfigError: The tables have several widths.
        """
        return common_dim(self._tables)

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the outputs of each table, in the order of the tables."""
        return outputs_by_table(self.lookups)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up every id. Every rank calls it with its own batch, which may be empty.

        Args:
            features: Raw ids, which include all features of the tables; weights are ignored.

        Returns:
            For each feature (`feature@table` where several tables read one feature) the vectors [L,
            D] and the lengths of the bags.

        Raises:
            IdError: On all ranks, if one rank has an id outside a table with the id rule `error`.
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
    """Return a sharded collection of bags that shares its tables with no other. Every rank calls
    it.

    Args:
        tables: As for the unsharded collection.
        plan: As for `ShardedTables`, like `comm`, `rule`, `seed`, `backend`, `payload`, `trains`
            and `make_store`.
        lookups: The lookups of the tables, in output order; None takes the lookups that the tables
            declare.
        is_weighted: As for the unsharded collection; None multiplies by weights where a batch has
            some.
    """
    member = Member(lookups_of(tables) if lookups is None else tuple(lookups), is_weighted)
    shared = ShardedTables(
        list(tables), plan, comm, rule, seed, backend, payload, trains, make_store, [member]
    )
    return ShardedEmbeddingBagCollection(shared)
