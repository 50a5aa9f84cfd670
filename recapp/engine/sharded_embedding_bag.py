"""The sharded twin of an `EmbeddingBagCollection`: same input, same output, any plan."""

from collections.abc import Callable, Sequence

import torch

from recapp.engine.outputs import Member
from recapp.engine.row_store import RowStore, StoredGroup
from recapp.engine.sharded_collection import ShardedCollection
from recapp.engine.sharded_tables import ShardedTables
from recapp.optim.rules_by_table import Rules
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.bags_of_samples import pooled_of_samples
from recapp.tables.config import EmbeddingConfig
from recapp.tables.lookups import TableLookup, lookups_of
from recapp.transport.communicator import Comm


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
