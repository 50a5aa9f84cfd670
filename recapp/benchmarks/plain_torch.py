"""Training steps of tables in one process: forward, then backward and update. And plain torch's
tables, for comparison with recapp's.

    recapp     a sharded collection on one rank, which updates its rows inside backward
    torch      an `nn.EmbeddingBag` for each table, and an optimiser of `torch.optim`, which updates
               after backward

B samples of a batch, K columns of the pooled output.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from recapp.benchmarks.timing import Steps
from recapp.benchmarks.workloads import Workload
from recapp.engine.sharded_collection import ShardedEmbeddingBagCollection
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor

LEARNING_RATE = 0.01

Pool = Callable[[KeyedJaggedTensor], Tensor]
"""Returns the pooled vectors of a batch, [B, K]."""


def training(
    pool: Pool,
    batches: Sequence[KeyedJaggedTensor],
    gradient_BK: Tensor,
    update: Callable[[], None] = lambda: None,
) -> Steps:
    """Return a contender whose step has the parts `forward` and `backward`, which includes the
    update.

    Args:
        pool: The forward.
        batches: The batches, which steps take in turn.
        gradient_BK: The gradient of the pooled vectors.
        update: The update after the backward; a sharded collection needs none.
    """
    pooled: list[Tensor] = []

    def forward(number: int) -> None:
        pooled.append(pool(batches[number % len(batches)]))

    def backward(_: int) -> None:
        torch.autograd.backward(pooled.pop(), gradient_BK)
        update()

    return Steps({"forward": forward, "backward": backward})


def pool_of(collection: ShardedEmbeddingBagCollection) -> Pool:
    """Return the forward of a sharded collection."""

    def pool(batch: KeyedJaggedTensor) -> Tensor:
        pooled_BK: Tensor = collection(batch).values()
        return pooled_BK

    return pool


class PlainTorch:
    """An `nn.EmbeddingBag` for each table, with an optimiser of torch.

    Args:
        workload: The tables and the shape of a batch.
        sparse: Whether a gradient is a sparse tensor of the ids' rows; else it is as large as the
            table.
        optimizer: The class of the optimiser.
    """

    def __init__(
        self,
        workload: Workload,
        sparse: bool,
        optimizer: Callable[..., torch.optim.Optimizer],
    ) -> None:
        self.bags = nn.ModuleList(
            [
                nn.EmbeddingBag(rows, dim, mode="sum", sparse=sparse, include_last_offset=True)
                for rows, dim in zip(workload.rows_F, workload.dim_F, strict=True)
            ]
        )
        self.offsets = [
            torch.arange(0, workload.batch_size * bag + 1, bag) for bag in workload.bag_F
        ]
        self.optimizer = optimizer(self.bags.parameters(), lr=LEARNING_RATE)

    def __call__(self, batch: KeyedJaggedTensor) -> Tensor:
        """Return the pooled vectors of a batch, [B, K]."""
        ids = torch.split(batch.values(), batch.length_per_key())
        pooled: list[Tensor] = [
            bag(i, o) for bag, i, o in zip(self.bags, ids, self.offsets, strict=True)
        ]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, 1)

    def update(self) -> None:
        """Update the whole tables, or only the rows of sparse gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()
