"""The unsharded collection of sequences: one vector per id, in the order of the ids. It is the
oracle of every parity test of sequences.

    features            tables                        output
    C1: [7] [2 9] []    t1 (dim 4) reads C1 and C2    C1: [v7] [v2 v9] []
    C2: [5] []    [1]                                 C2: [v5] [] [v1]

Names are those of TorchRec's `EmbeddingCollection`. Tables may differ in width, which TorchRec
refuses.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recapp.errors import ConfigError
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.bags_of_samples import sequences_of_samples
from recapp.tables.config import (
    EmbeddingConfig,
    PoolingType,
    check_tables,
    common_dim,
    sequence_table,
)
from recapp.tables.dynamic import keys_of
from recapp.tables.ids import Rows
from recapp.tables.lookups import TableLookup, check_lookups, lookups_of, outputs_by_table
from recapp.tables.unsharded_collection import UnshardedCollection


class SequenceTables:
    """The questions of TorchRec's programs to a collection of sequences, sharded or not."""

    lookups: tuple[TableLookup, ...]
    _tables: list[EmbeddingConfig]
    _need_indices: bool

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order, like TorchRec's method."""
        return list(self._tables)

    def need_indices(self) -> bool:
        """Return whether the weights of an output are the looked-up rows."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the columns D of every table.

        Raises:
            ConfigError: The tables have different widths, which TorchRec's cannot have.
        """
        return common_dim(self._tables)

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the outputs of each table, in the order of the tables."""
        return outputs_by_table(self.lookups)


class EmbeddingCollection(SequenceTables, UnshardedCollection):
    """Looks up a vector for every id: KeyedJaggedTensor -> a JaggedTensor of vectors per feature.

    Args:
        tables: The tables. Their order and the order of their features is the order of the output.
            The pooling of an `EmbeddingBagConfig` has no meaning here.
        device: The device of the tables; `torch.device("meta")` allocates none yet.
        need_indices: Whether the weights of an output are the looked-up rows. For the id rule
            `error` and for dynamic tables these are the ids themselves.
        seed: The seed of the start values (`recapp/tables/initial.py`).
        lookups: The lookups, in the order of the output, which do not pool; None takes one lookup
            for each table and feature.
        sparse: See `EmbeddingBagCollection`.

    Raises:
        ConfigError: There are no tables, two tables have one name, lookups do not fit the tables or
            pool their bags, or a table cannot have sparse gradients.
    """

    tables_of = "embeddings"

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        seed: int = 0,
        *,
        lookups: Sequence[TableLookup] | None = None,
        sparse: bool = False,
    ) -> None:
        check_tables(tables)
        made = {t.name: sequence_table(t) for t in tables}
        read = lookups_of(list(made.values()))
        if lookups is not None:
            check_lookups(tables, lookups)
            read = tuple(replace(x, table=made[x.table.name]) for x in lookups)
        for lookup in read:
            if lookup.pooling is not PoolingType.NONE:
                raise ConfigError(
                    f"lookup {lookup.output} of table {lookup.table.name} pools its bags "
                    f"({lookup.pooling}): give it pooling none, or make the collection an "
                    "EmbeddingBagCollection"
                )
        super().__init__(list(made.values()), read, device, seed, False, sparse)
        self._need_indices = need_indices

    def module_of(self, weight_RD: Tensor) -> nn.Embedding:
        """Return torch's module of a table's rows."""
        rows, columns = weight_RD.shape
        return nn.Embedding(rows, columns, sparse=self.sparse, _weight=weight_RD)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up every id.

        Args:
            features: Raw ids of at least the tables' features; weights are ignored.

        Returns:
            For each feature (`feature@table` where several tables read one) its vectors [L, D],
            with the lengths of its bags, in the collection's compute dtype.

        Raises:
            IdError: An id is outside of a table whose rule is `error`.
            ConfigError: A table is dynamic, and only sharded tables have dynamic rows; or the ids
                are on the meta device, and the tables are not.
        """
        rows = self.id_rules(features)
        self._check_has_rows(rows.rows_L)
        vectors = [
            nn.functional.embedding(row_N, self.weight(x.table.name), sparse=self.sparse).to(
                self.dtype
            )
            for x, row_N in zip(self.lookups, torch.split(rows.rows_L, rows.per_F), strict=True)
        ]
        return sequences(self.lookups, vectors, rows, self._need_indices, features)


def sequences(
    lookups: Sequence[TableLookup],
    vectors_F: Sequence[Tensor],
    rows: Rows,
    need_indices: bool,
    features: KeyedJaggedTensor,
) -> dict[str, JaggedTensor]:
    """Return the output of a sequence collection.

    Args:
        lookups: The lookups of the collection.
        vectors_F: The vectors of each lookup, [L, D].
        rows: The rows of these lookups, and the lengths of their bags.
        need_indices: See `EmbeddingCollection`.
        features: The ids that were looked up.
    """
    made: dict[str, Any] = {}
    rows_F = torch.split(rows.rows_L, rows.per_F)
    for x, vectors_LD, row_L, lengths_B in zip(
        lookups, vectors_F, rows_F, rows.lengths_FB, strict=True
    ):
        indices_L = None
        if need_indices:
            indices_L = row_L.long() if x.table.dynamic is None else keys_of(row_L)
        made[x.output] = JaggedTensor.unchecked(
            *sequences_of_samples(x.feature, vectors_LD, indices_L, lengths_B, features)
        )
    return made
