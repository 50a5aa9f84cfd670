"""The unsharded collection: plain `torch.nn.EmbeddingBag`s, one after the other. It is the oracle
of every parity test.

    features            tables                       output [B, sum of dims]
    C1: [7] [2 9] []    t1 (dim 4) reads C1          | t1(C1)  | t2(C1) | t2(C2) |
    C2: [5] []    [1]   t2 (dim 3) reads C1 and C2

The collection knows no ranks. `DistributedModelParallel` or the trainer's strategy replaces it by a
sharded collection. On `torch.device("meta")` it takes no memory until then. Names are those of
TorchRec's `EmbeddingBagCollection`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recapp.errors import ConfigError
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.bags_of_samples import pooled_of_samples
from recapp.tables.config import EmbeddingConfig, PoolingType, check_tables
from recapp.tables.lookups import TableLookup, check_lookups, lookups_of
from recapp.tables.unsharded_collection import UnshardedCollection


class EmbeddingBagCollection(UnshardedCollection):
    """Pool bags of ids into vectors: KeyedJaggedTensor -> KeyedTensor.

    Args:
        tables: The tables. Their order and the order of their features is the order of the output.
        is_weighted: True: rows are multiplied by the sample weights of their ids, which must have
            some. False: sample weights are ignored, with a note. None: rows are multiplied if a
            batch has sample weights.
        device: The device of the tables; `torch.device("meta")` allocates none yet.
        seed: The seed of the start values (`recapp/tables/initial.py`).
        lookups: The lookups, in the order of the output; None takes one lookup for each table and
            feature, with the table's pooling.
        sparse: True: gradients of the tables are sparse and hold only the rows that were read, as
            `torch.optim.SparseAdam` needs them. False: they are dense, as in TorchRec, for any
            optimiser and `clip_grad_norm_`.

    Raises:
        ConfigError: There are no tables, two tables have one name, lookups do not fit the tables,
            `is_weighted` is no truth value, or a table cannot have sparse gradients.
    """

    tables_of = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        is_weighted: bool | None = False,
        device: torch.device | str | None = None,
        seed: int = 0,
        *,
        lookups: Sequence[TableLookup] | None = None,
        sparse: bool = False,
    ) -> None:
        check_tables(tables)
        if not isinstance(is_weighted, bool | None):
            raise ConfigError(
                f"is_weighted={is_weighted}: must be True, False or None; name device and seed by "
                "keyword"
            )
        read = lookups_of(tables) if lookups is None else tuple(lookups)
        check_lookups(tables, read)
        for lookup in read:
            if lookup.pooling is PoolingType.NONE:
                raise ConfigError(
                    f"lookup {lookup.output} of table {lookup.table.name} does not pool its bags: "
                    "make the table an EmbeddingBagConfig, or for sequences the collection an "
                    "EmbeddingCollection"
                )
        super().__init__(tables, read, device, seed, is_weighted, sparse)
        self.room = 0

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order, like TorchRec's method."""
        return self.tables()

    def module_of(self, weight_RD: Tensor) -> nn.EmbeddingBag:
        """Return torch's module of a table's rows."""
        rows, columns = weight_RD.shape
        return nn.EmbeddingBag(rows, columns, mode="sum", sparse=self.sparse, _weight=weight_RD)

    def leave_room(self, columns: int) -> None:
        """Store the number of columns for the sharded collection that replaces this one.

        This collection leaves no room: its output is concatenated from the lookups' vectors.
        """
        self.room = columns

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag.

        Args:
            features: Raw ids of at least the tables' features, with weights or without.

        Returns:
            [B, sum of dims], keyed by feature (`feature@table` if several tables read one), in the
            collection's compute dtype. With inverse indices B counts samples, else bags.

        Raises:
            IdError: An id is outside of a table whose rule is `error`.
            ConfigError: The collection is weighted and the ids have no weights; a table is dynamic,
                and only sharded tables have dynamic rows; features have different numbers of bags
                without inverse indices; or the ids are on the meta device, and the tables are not.
        """
        rows = self.id_rules(features)
        self._check_has_rows(rows.rows_L)
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
            if lookup.hotness:  # a bag of one id or none for each vector of a concatenation
                number_H = torch.arange(lookup.hotness, device=lengths_B.device)
                lengths_M = (lengths_B[:, None] > number_H).view(-1)
            pooled_BD = F.embedding_bag(
                rows_N,
                self.weight(lookup.table.name).to(self.dtype),
                F.pad(lengths_M.cumsum(0), (1, 0)).long(),
                mode="sum",
                include_last_offset=True,
                per_sample_weights=weights_N,
                sparse=self.sparse,
            )
            if lookup.pooling is PoolingType.MEAN:
                pooled_BD = pooled_BD * lengths_B.clamp(min=1).to(self.dtype).reciprocal()[:, None]
            parts.append(pooled_BD.view(lengths_B.shape[0], lookup.columns))
        return pooled_of_samples(self.lookups, torch.cat(parts, 1), features)
