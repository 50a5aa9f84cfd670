"""The measured workloads, Criteo's 26 tables with ids as skewed as those of real logs, and the
measured DLRMs over these tables.

    W1    one-hot, batch 4,096 a rank, dim 64       the lookups of a click model
    W1d   the same at dim 128                       HugeCTR's notebook
    W2    ten ids a bag, batch 4,096, dim 128       long bags: pooling counts
    W2m   MLPerf's multi-hot bags, batch 1,024      bags of 1 to 100 ids
    W3    one-hot, batch 8,192, dim 16              narrow rows
    W4    one-hot, batch 256, dim 16                tiny: the cost of a message counts
    W1s   as W1, looked up as sequences             a vector for each id
    W2s   ten ids a bag, batch 512, dim 128         sequences of ten vectors
    W2c   as W2s, concatenated                      concatenations of ten vectors

Ids are Zipf 1.05: the probability of the row of popularity k is proportional to k^-1.05. Popularity
is shuffled over the row numbers, so that popular rows are not neighbours.

B samples of a rank's batch, F features (= tables), L ids of a batch, N batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from recapp.dataset.synthetic import CRITEO_SIZES
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig, PoolingType, TableLookup

# ids of a bag in MLPerf Training's DLRM-DCNv2; 214 ids per sample
MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
EXPONENT = 1.05
BATCHES = 6  # steps take these in turn: enough that a batch has left the caches before it recurs


@dataclass(frozen=True)
class Workload:
    """Tables, the shape of a batch, and the distribution of its ids.

    Args:
        name: The name on the command line.
        batch_size: The samples of one rank's batch, B.
        rows_F: The rows of each table.
        dim_F: The columns of each table.
        bag_F: The ids of each bag of each feature.
        zipf: Whether ids are skewed; else every row is equally likely.
        pooling: The pooling of the rows of a bag.
    """

    name: str
    batch_size: int
    rows_F: tuple[int, ...]
    dim_F: tuple[int, ...]
    bag_F: tuple[int, ...]
    zipf: bool = True
    pooling: PoolingType = PoolingType.SUM

    @property
    def features(self) -> list[str]:
        """The names of tables and features: C1, C2, ..."""
        return [f"C{i + 1}" for i in range(len(self.rows_F))]

    @property
    def ids(self) -> int:
        """The number of ids in one rank's batch, L."""
        return self.batch_size * sum(self.bag_F)

    @property
    def width(self) -> int:
        """The number of columns of the output of summed bags."""
        return sum(self.dim_F)

    def tables(self) -> list[EmbeddingConfig]:
        """Return a table for each feature; an id is the number of its row."""
        kind = EmbeddingConfig if self.pooling is PoolingType.NONE else EmbeddingBagConfig
        return [
            kind(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
            for name, rows, dim in zip(self.features, self.rows_F, self.dim_F, strict=True)
        ]

    def lookups(self) -> list[TableLookup]:
        """Return the lookup of each table."""
        concat = self.pooling is PoolingType.CONCAT
        return [
            TableLookup(table, table.name, table.name, self.pooling, bag if concat else None)
            for table, bag in zip(self.tables(), self.bag_F, strict=True)
        ]

    def of_shape(self, batch_size: int, bag: int, ids: str) -> "Workload":
        """Return the same tables with batches of another shape.

        Args:
            batch_size: The samples of a rank.
            bag: The ids of each bag.
            ids: The distribution of the ids: `uniform` or `zipf`.
        """
        return replace(
            self,
            name=f"{self.name}_{batch_size}_{bag}_{ids}",
            batch_size=batch_size,
            bag_F=(bag,) * len(self.rows_F),
            zipf=ids == "zipf",
        )

    def lengths(self) -> Tensor:
        """Return the length of each bag, [F * B], feature by feature."""
        return torch.repeat_interleave(torch.tensor(self.bag_F), self.batch_size)

    def draw(self, rank: int, batches: int = BATCHES) -> Tensor:
        """Return the ids of a rank's batches, int64 [N, L], feature by feature.

        The ids depend only on the rank and are equal on every machine.

        Args:
            rank: The seed of the ids.
            batches: The number of batches, N.
        """
        generator = torch.Generator().manual_seed(rank)

        def draw(rows: int, count: int) -> Tensor:
            if not self.zipf:
                return torch.randint(rows, (count,), generator=generator)
            share, row = _popularity(rows)
            chances = torch.rand(count, generator=generator, dtype=torch.float64)
            return row[torch.searchsorted(share, chances).clamp_max(rows - 1)]

        features = list(zip(self.rows_F, self.bag_F, strict=True))
        return torch.stack(
            [
                torch.cat([draw(rows, self.batch_size * bag) for rows, bag in features])
                for _ in range(batches)
            ]
        )

    def features_of(self, ids_NL: Tensor) -> list[KeyedJaggedTensor]:
        """Return ids, int64 [N, L], as batches for a model."""
        lengths = self.lengths()
        return [KeyedJaggedTensor(self.features, ids_L, lengths=lengths) for ids_L in ids_NL]

    def batches(self, rank: int) -> list[KeyedJaggedTensor]:
        """Return the batches of a rank, which steps take in turn."""
        return self.features_of(self.draw(rank))


def _criteo(
    name: str,
    batch_size: int,
    dim: int,
    bags: Sequence[int],
    pooling: PoolingType = PoolingType.SUM,
) -> Workload:
    dims = (dim,) * len(CRITEO_SIZES)
    return Workload(name, batch_size, CRITEO_SIZES, dims, tuple(bags), pooling=pooling)


WORKLOADS = {
    w.name: w
    for w in (
        _criteo("W1", 4096, 64, (1,) * 26),
        _criteo("W1d", 4096, 128, (1,) * 26),
        _criteo("W2", 4096, 128, (10,) * 26),
        _criteo("W2m", 1024, 128, MLPERF_BAGS),
        _criteo("W3", 8192, 16, (1,) * 26),
        _criteo("W4", 256, 16, (1,) * 26),
        _criteo("W1s", 4096, 64, (1,) * 26, PoolingType.NONE),
        _criteo("W2s", 512, 128, (10,) * 26, PoolingType.NONE),
        _criteo("W2c", 512, 128, (10,) * 26, PoolingType.CONCAT),
    )
}


@lru_cache(maxsize=64)
def _popularity(rows: int) -> tuple[Tensor, Tensor]:
    """Return the distribution function over popularity, and the row of each popularity."""
    share = (1 / torch.arange(1, rows + 1, dtype=torch.float64) ** EXPONENT).cumsum(0)
    return share / share[-1], torch.randperm(rows, generator=torch.Generator().manual_seed(rows))


DENSE = 13  # numbers of a Criteo sample


@dataclass(frozen=True)
class NamedModel:
    """A DLRM over Criteo's one-hot tables.

    Args:
        name: The name on the command line.
        batch_size: The samples of a rank.
        dim: The columns of the tables, and the width of the interaction's vectors.
        bottom: The widths of the bottom MLP's layers before the last one, whose width is `dim`.
        top: The widths of the top MLP's layers.
    """

    name: str
    batch_size: int
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @property
    def bottom_layers(self) -> list[int]:
        """The widths of all layers of the bottom MLP."""
        return [*self.bottom, self.dim]

    def workload(self) -> Workload:
        """Return the tables of the model and the shape of its batches, with one id a bag."""
        count = len(CRITEO_SIZES)
        return Workload(self.name, self.batch_size, CRITEO_SIZES, (self.dim,) * count, (1,) * count)


HUGECTR_TOP = (1024, 1024, 512, 256, 1)
MODELS = {
    m.name: m
    for m in (
        # the first two come from HugeCTR's notebook on hybrid embeddings
        NamedModel("hugectr_d128", 8192, 128, (512, 256), HUGECTR_TOP),
        NamedModel("hugectr_d64", 4096, 64, (512, 256), HUGECTR_TOP),
        NamedModel("small", 1024, 16, (512, 256, 64), (512, 256, 1)),
    )
}
