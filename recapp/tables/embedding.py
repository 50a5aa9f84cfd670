"""The unsharded collection of sequences: one vector per id, in the order of the ids. It is the
oracle of every parity test of sequences.

    features            tables                        output
    C1: [7] [2 9] []    t1 (dim 4) reads C1 and C2    C1: [v7] [v2 v9] []
    C2: [5] []    [1]                                 C2: [v5] [] [v1]

Names are as in TorchRec's `EmbeddingCollection`. Tables may differ in width, which TorchRec
refuses.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recapp.errors import ConfigError
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig, check_tables
from recapp.tables.ids import IdRules, Rows
from recapp.tables.initial import fill_initial
from recapp.tables.lookups import TableLookup, compute_dtype, lookups_of
from recapp.tables.module_by_name import ModuleByName


class EmbeddingCollection(nn.Module):
    """Looks up a vector for every id: KeyedJaggedTensor -> a JaggedTensor of vectors per feature.

    Args:
        tables: Their order and the order of their features is the order of the output.
        device: The device of the tables; `torch.device("meta")` allocates none yet.
        need_indices: Whether the weights of an output are the rows that were looked up: the ids
            themselves where the table's id rule is `error`.
        seed: The seed of the start values (`recapp/tables/initial.py`).

    Raises:
        ConfigError: There are no tables, two of one name, or one that is pooled.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_tables(tables)
        for t in tables:
            if isinstance(t, EmbeddingBagConfig):
                raise ConfigError(
                    f"table {t.name} is an EmbeddingBagConfig, whose bags are pooled: give an "
                    "EmbeddingCollection an EmbeddingConfig, or make an EmbeddingBagCollection"
                )
        self._tables = list(tables)
        self.lookups = lookups_of(tables)
        self.need_indices = need_indices
        self.seed = seed
        self.embeddings = ModuleByName(
            {
                t.name: nn.Embedding(
                    t.num_embeddings,
                    t.embedding_dim,
                    sparse=True,
                    _weight=torch.empty(
                        t.num_embeddings, t.embedding_dim, dtype=t.data_type.dtype, device=device
                    ),
                )
                for t in tables
            }
        )
        self.id_rules = IdRules(self.lookups, is_weighted=False)
        self.dtype = compute_dtype(tables)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Write the start values, unless the tables are on the meta device."""
        for t in self._tables:
            weight = self.weight(t.name)
            if weight.device.type != "meta":
                everything = range(t.num_embeddings), range(t.embedding_dim)
                fill_initial(weight.data, t, self.seed, *everything)

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return list(self._tables)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order, as TorchRec's method does."""
        return self.tables()

    def is_weighted(self) -> bool:
        """Return False: sample weights belong to sums."""
        return False

    def weight(self, table: str) -> Tensor:
        """Return a table's rows, [R, D]."""
        embedding = self.embeddings[table]
        assert isinstance(embedding, nn.Embedding)
        return embedding.weight

    def holder_of(self, table: str) -> object:
        """Return a table's weight: collections that have one in common share the table."""
        return self.weight(table)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up every id.

        Args:
            features: Raw ids of at least the tables' features; weights are ignored.

        Returns:
            For each feature (`feature@table` where several tables read one) its vectors [L, D],
            with the lengths of its bags, in the collection's compute dtype.

        Raises:
            IdError: An id outside a table whose rule is `error`.
        """
        rows = self.id_rules(features)
        vectors = [
            nn.functional.embedding(row_N, self.weight(x.table.name), sparse=True).to(self.dtype)
            for x, row_N in zip(self.lookups, torch.split(rows.rows_L, rows.per_F), strict=True)
        ]
        return sequences(self.lookups, vectors, rows, self.need_indices)


def sequences(
    lookups: Sequence[TableLookup], vectors_F: Sequence[Tensor], rows: Rows, need_indices: bool
) -> dict[str, JaggedTensor]:
    """Return the output of a collection of sequences.

    Args:
        lookups: Its lookups.
        vectors_F: The vectors of each, [L, D].
        rows: The rows of these lookups, and how many each bag has.
        need_indices: As of the collection.
    """
    made: dict[str, Any] = {}
    rows_F = torch.split(rows.rows_L, rows.per_F)
    for x, vectors_LD, row_L, lengths_B in zip(
        lookups, vectors_F, rows_F, rows.lengths_FB, strict=True
    ):
        indices_L = row_L.long() if need_indices else None
        made[x.output] = JaggedTensor.unchecked(vectors_LD, indices_L, lengths_B)
    return made
