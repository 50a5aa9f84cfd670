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
from recapp.tables.bags_of_samples import pooled_of_samples
from recapp.tables.config import EmbeddingConfig, PoolingType, check_tables
from recapp.tables.lookups import TableLookup, check_lookups, lookups_of
from recapp.tables.unsharded_collection import UnshardedCollection


class EmbeddingBagCollection(UnshardedCollection):
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
        sparse: Whether gradients of the tables are sparse, of the rows that were read alone, as
            `torch.optim.SparseAdam` needs them. Else they are whole tables, as in TorchRec, which
            any optimiser and `clip_grad_norm_` take.

    Raises:
        ConfigError: There are no tables, or two of one name, or lookups do not fit them; or
            `is_weighted` is no truth value, or a table has no sparse gradients.
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
        """Return the tables, in order, as TorchRec's method does."""
        return self.tables()

    def module_of(self, weight_RD: Tensor) -> nn.EmbeddingBag:
        """Return torch's module of a table's rows."""
        rows, columns = weight_RD.shape
        return nn.EmbeddingBag(rows, columns, mode="sum", sparse=self.sparse, _weight=weight_RD)

    def leave_room(self, columns: int) -> None:
        """Remember the number of columns for the sharded collection that replaces this one.

        This collection leaves no room: its output is concatenated from the lookups' vectors.
        """
        self.room = columns

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag.

        Args:
            features: Raw ids of at least the tables' features, with weights or without.

        Returns:
            [B, sum of dims], keyed by feature (`feature@table` where several tables read one), in
            the collection's compute dtype; by sample where inverse indices say which bags these
            take.

        Raises:
            IdError: An id outside a table whose rule is `error`.
            ConfigError: The collection is weighted and the ids have no weights; or a table is
                dynamic, whose rows are made where tables are sharded; or features have different
                numbers of bags, and no inverse indices; or the ids are on the meta device, and
                tables are not.
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
            if lookup.hotness:  # a bag for each vector of a concatenation, of one id or none
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
