"""The sharded twin of an `EmbeddingCollection`: same input, same output, any plan."""

from collections.abc import Sequence

import torch

from recapp.engine.outputs import Member
from recapp.engine.sharded_collection import ShardedCollection
from recapp.engine.sharded_tables import ShardedTables
from recapp.optim.rules_by_table import Rules
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingConfig
from recapp.tables.embedding import sequences
from recapp.tables.lookups import lookups_of
from recapp.transport.communicator import Comm


class ShardedEmbeddingCollection(ShardedCollection):
    """An `EmbeddingCollection` whose tables lie where a plan says; arguments as of
    `ShardedCollection`.

    `need_indices` says whether the weights of an output are the rows that were looked up.
    """

    tables_of = "embeddings"

    def __init__(self, shared: ShardedTables, member: int = 0, need_indices: bool = False) -> None:
        super().__init__(shared, member)
        self.need_indices = need_indices

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
        return sequences(self.lookups, vectors, rows, self.need_indices)


def shard_sequences(
    tables: Sequence[EmbeddingConfig],
    plan: ShardingPlan,
    comm: Comm,
    rule: Rules | None,
    seed: int = 0,
    backend: str = "auto",
    payload: torch.dtype | None = None,
    trains: bool = True,
    need_indices: bool = False,
) -> ShardedEmbeddingCollection:
    """Return a sharded collection of sequences with tables of its own. Every rank calls it.

    Args:
        tables: As of the unsharded collection, like `need_indices`.
        plan: As of `ShardedTables`, like `comm`, `rule`, `seed`, `backend`, `payload` and `trains`.
    """
    shared = ShardedTables(
        list(tables),
        plan,
        comm,
        rule,
        seed,
        backend,
        payload,
        trains,
        members=[Member(lookups_of(tables), False)],
    )
    return ShardedEmbeddingCollection(shared, need_indices=need_indices)
