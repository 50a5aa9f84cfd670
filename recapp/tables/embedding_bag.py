"""The unsharded collection: plain `torch.nn.EmbeddingBag`s, one after the other. It is the oracle
of every parity test.

    features            tables                       output [B, sum of dims]
    C1: [7] [2 9] []    t1 (dim 4) reads C1          | t1(C1)  | t2(C1) | t2(C2) |
    C2: [5] []    [1]   t2 (dim 3) reads C1 and C2

It knows no ranks. `DistributedModelParallel` or the trainer's strategy replaces it by a sharded
collection; built on `torch.device("meta")` it costs no memory until then. Names are as in
TorchRec's `EmbeddingBagCollection`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import EmbeddingConfig, PoolingType, check_tables
from recapp.tables.ids import IdRules
from recapp.tables.initial import fill_initial
from recapp.tables.lookups import TableLookup, check_lookups, compute_dtype, lookups_of
from recapp.tables.module_by_name import ModuleByName


class EmbeddingBagCollection(nn.Module):
    """Pools bags of ids to vectors: KeyedJaggedTensor -> KeyedTensor.

    Args:
        tables: Their order and the order of their features is the order of the output.
        is_weighted: Whether rows are multiplied by the sample weights of their ids, which then
            must have some. Without, weights are ignored, and a note says so; None multiplies where
            a batch has weights.
        device: The device of the tables; `torch.device("meta")` allocates none yet.
        seed: The seed of the start values (`recapp/tables/initial.py`).
        lookups: What is looked up, in the order of the output, where that is more than a table's
            own pooling for each of its features; None takes those.

    Raises:
        ConfigError: There are no tables, or two of one name, or lookups do not fit them; or
            `is_weighted` is no truth value.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        is_weighted: bool | None = False,
        device: torch.device | str | None = None,
        seed: int = 0,
        *,
        lookups: Sequence[TableLookup] | None = None,
    ) -> None:
        super().__init__()
        check_tables(tables)
        if not isinstance(is_weighted, bool | None):
            raise ConfigError(
                f"is_weighted={is_weighted}: must be True, False or None; name device and seed by "
                "keyword"
            )
        self._tables = list(tables)
        self.lookups = lookups_of(tables) if lookups is None else tuple(lookups)
        check_lookups(tables, self.lookups)
        self.seed = seed
        self.room = 0
        self.embedding_bags = ModuleByName(
            {
                t.name: nn.EmbeddingBag(
                    t.num_embeddings,
                    t.embedding_dim,
                    mode="sum",
                    sparse=True,
                    dtype=t.data_type.dtype,
                    _weight=torch.empty(
                        t.num_embeddings, t.embedding_dim, dtype=t.data_type.dtype, device=device
                    ),
                )
                for t in tables
            }
        )
        self._is_weighted = is_weighted
        self.id_rules = IdRules(self.lookups, is_weighted=is_weighted)
        self.dtype = compute_dtype(tables)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Write the start values, unless the tables are on the meta device."""
        for t in self._tables:
            weight = self.weight(t.name)
            if weight.device.type != "meta":
                fill_initial(
                    weight.data, t, self.seed, range(t.num_embeddings), range(t.embedding_dim)
                )

    def tables(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return list(self._tables)

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order, as TorchRec's method does."""
        return self.tables()

    def is_weighted(self) -> bool | None:
        """Return whether rows are multiplied by sample weights; None where batches decide."""
        return self._is_weighted

    def holder_of(self, table: str) -> object:
        """Return a table's weight: collections that have one in common share the table."""
        return self.weight(table)

    def leave_room(self, columns: int) -> None:
        """Remember the number of columns for the sharded collection that replaces this one.

        This collection leaves no room: its output is concatenated from the lookups' vectors.
        """
        self.room = columns

    def weight(self, table: str) -> Tensor:
        """Return a table's rows, [R, D]."""
        bag = self.embedding_bags[table]
        assert isinstance(bag, nn.EmbeddingBag)
        return bag.weight

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag.

        Args:
            features: Raw ids of at least the tables' features, with weights or without.

        Returns:
            [B, sum of dims], keyed by feature (`feature@table` where several tables read one), in
            the collection's compute dtype.

        Raises:
            IdError: An id outside a table whose rule is `error`.
            ConfigError: The collection is weighted and the ids have no weights.
        """
        rows = self.id_rules(features)
        weights = (
            [None] * len(rows.per_F)
            if rows.weights_L is None
            else torch.split(rows.weights_L.to(self.dtype), rows.per_F)
        )
        parts = []
        for lookup, rows_N, lengths_B, weights_N in zip(
            self.lookups,
            torch.split(rows.rows_L, rows.per_F),
            rows.lengths_FB,
            weights,
            strict=True,
        ):
            lengths_M = lengths_B
            if lookup.hotness:  # a bag for each vector of a concatenation, of one id or none
                lengths_M = (lengths_B[:, None] > torch.arange(lookup.hotness)).view(-1)
            pooled_BD = F.embedding_bag(
                rows_N,
                self.weight(lookup.table.name).to(self.dtype),
                F.pad(lengths_M.cumsum(0), (1, 0)).long(),
                mode="sum",
                include_last_offset=True,
                per_sample_weights=weights_N,
                sparse=True,
            )
            if lookup.pooling is PoolingType.MEAN:
                pooled_BD = pooled_BD * lengths_B.clamp(min=1).to(self.dtype).reciprocal()[:, None]
            parts.append(pooled_BD.view(len(lengths_B), lookup.columns))
        return KeyedTensor(
            [x.output for x in self.lookups], [x.columns for x in self.lookups], torch.cat(parts, 1)
        )
