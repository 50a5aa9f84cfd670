"""The sharded twin of an `EmbeddingCollection`: same input, same output, any plan."""

from recapp.engine.sharded_collection import ShardedCollection
from recapp.engine.sharded_tables import ShardedTables
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingConfig, common_dim
from recapp.tables.embedding import sequences
from recapp.tables.lookups import outputs_by_table


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
