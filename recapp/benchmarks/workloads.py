"""The measured workloads: Criteo's 26 tables with ids as skewed as those of real logs.

    W1    one-hot, batch 4,096 a rank, dim 64       what a click model looks up
    W1d   the same at dim 128                       HugeCTR's notebook
    W2    ten ids a bag, batch 4,096, dim 128       long bags: pooling counts
    W2m   MLPerf's multi-hot bags, batch 1,024      bags of 1 to 100 ids
    W3    one-hot, batch 8,192, dim 16              narrow rows
    W4    one-hot, batch 256, dim 16                tiny: what a message costs

Ids are Zipf 1.05: row of popularity k is drawn with probability proportional to k^-1.05, and
popularity is shuffled over the row numbers so that popular rows are not neighbours. What TorchRec
is given are the same ids, read from the file that a rank has written.

B batch per rank, F features (= tables), L ids of a batch, N batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from recapp.planner.scale import MLPERF_BAGS
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig

# Rows of HugeCTR's Criteo tables (their notebook on hybrid embeddings).
CRITEO_ROWS = (
    203931,
    18598,
    14092,
    7012,
    18977,
    4,
    6385,
    1245,
    49,
    186213,
    71328,
    67288,
    11,
    2168,
    7338,
    61,
    4,
    932,
    15,
    204515,
    141526,
    199433,
    60919,
    9137,
    71,
    34,
)
EXPONENT = 1.05
BATCHES = 6  # that steps take in turn: enough that none is still in a cache when it comes again


@dataclass(frozen=True)
class Workload:
    """Tables and the shape of a batch.

    Args:
        name: as on the command line.
        batch_size: samples of one rank, B.
        rows_F: rows of each table.
        dim_F: columns of each table.
        bag_F: ids of each bag of each feature.
        zipf: skewed ids; else every row is equally likely.
    """

    name: str
    batch_size: int
    rows_F: tuple[int, ...]
    dim_F: tuple[int, ...]
    bag_F: tuple[int, ...]
    zipf: bool = True

    @property
    def features(self) -> list[str]:
        """C1, C2, ...: names of tables and features."""
        return [f"C{i + 1}" for i in range(len(self.rows_F))]

    @property
    def ids(self) -> int:
        """Ids of one rank's batch, L."""
        return self.batch_size * sum(self.bag_F)

    @property
    def width(self) -> int:
        """Columns of the pooled output."""
        return sum(self.dim_F)

    def tables(self) -> list[EmbeddingBagConfig]:
        """A table for each feature; ids are rows."""
        return [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name]
            )
            for name, rows, dim in zip(self.features, self.rows_F, self.dim_F, strict=True)
        ]

    def lengths(self) -> Tensor:
        """Ids of each bag, [F * B], feature by feature."""
        return torch.repeat_interleave(torch.tensor(self.bag_F), self.batch_size)

    def draw(self, rank: int, batches: int = BATCHES) -> Tensor:
        """Ids of a rank's batches, int64 [N, L], feature by feature; the same for the same rank on
        every machine.
        """
        generator = torch.Generator().manual_seed(rank)
        draw = _zipf if self.zipf else _uniform
        shapes = list(zip(self.rows_F, self.bag_F, strict=True))
        return torch.stack(
            [
                torch.cat([draw(rows, self.batch_size * bag, generator) for rows, bag in shapes])
                for _ in range(batches)
            ]
        )

    def features_of(self, ids_NL: Tensor) -> list[KeyedJaggedTensor]:
        """The batches as a model takes them."""
        lengths = self.lengths()
        return [KeyedJaggedTensor(self.features, ids_L, lengths=lengths) for ids_L in ids_NL]


def _criteo(name: str, batch_size: int, dim: int, bags: Sequence[int]) -> Workload:
    return Workload(name, batch_size, CRITEO_ROWS, (dim,) * len(CRITEO_ROWS), tuple(bags))


WORKLOADS = {
    w.name: w
    for w in (
        _criteo("W1", 4096, 64, (1,) * 26),
        _criteo("W1d", 4096, 128, (1,) * 26),
        _criteo("W2", 4096, 128, (10,) * 26),
        _criteo("W2m", 1024, 128, MLPERF_BAGS),
        _criteo("W3", 8192, 16, (1,) * 26),
        _criteo("W4", 256, 16, (1,) * 26),
    )
}


@lru_cache(maxsize=64)
def _popularity(rows: int) -> tuple[Tensor, Tensor]:
    """The distribution function over popularity, and the row of each popularity."""
    share = (1 / torch.arange(1, rows + 1, dtype=torch.float64) ** EXPONENT).cumsum(0)
    return share / share[-1], torch.randperm(rows, generator=torch.Generator().manual_seed(rows))


def _zipf(rows: int, count: int, generator: torch.Generator) -> Tensor:
    share, row = _popularity(rows)
    return row[
        torch.searchsorted(
            share, torch.rand(count, generator=generator, dtype=torch.float64)
        ).clamp_max(rows - 1)
    ]


def _uniform(rows: int, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(rows, (count,), generator=generator)
