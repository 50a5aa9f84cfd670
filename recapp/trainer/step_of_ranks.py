"""The step of a Lightning Strategy with sharded tables: ranks with batches of different sizes, and
steps of several batches, train like one process with the global batch.

    setup_optimizers    let the module's optimisers train the tables
    backward            weight the loss by this rank's share of the global batch; update the tables,
                        unless the optimiser's step does
    optimizer_step      forward, backward, and the step; average running statistics
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from recapp.engine.sharded_collection import tables_as_parameters
from recapp.engine.sharded_tables import ShardedTables
from recapp.optim.named_rules import Rules
from recapp.trainer.accumulation import Accumulation
from recapp.trainer.clip_tables import clip_tables_too, clip_waiting, update_in_step
from recapp.trainer.own_optimizers import take_tables
from recapp.transport.communicator import Comm, average_over_ranks
from recapp.transport.dense_gradients import AverageOverRanks


class StepOfRanks(DDPStrategy):
    """The steps of `EmbeddingShardingStrategy`.

    Args:
        settings: Arguments of DDPStrategy.

    `comm` is the communicator of the ranks, `gradient_average` the average of dense gradients where
    it is not DDP's own. `named_rule` is the row rule of tables, or the rules by table, that are not
    named by the module's optimisers; None if these name them.
    """

    clip_tables = False
    named_rule: Rules | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.comm = Comm()
        self.gradient_average: AverageOverRanks | None = None
        self._accumulation: Accumulation | None = None
        self._statistics: list[Tensor] = []

    @abstractmethod
    def sharded_tables(self) -> list[ShardedTables]:
        """Return the sharded tables of the module."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the module's optimisers, and let those that have tables train the tables.

        Raises:
            ConfigError: What they say of tables cannot be obeyed.
        """
        assert self.lightning_module is not None
        with tables_as_parameters(self.lightning_module):
            super().setup_optimizers(trainer)
        self.optimizers = take_tables(self.lightning_module, self.optimizers, self.named_rule)

    def update_in_step(self, trainer: Trainer) -> None:
        """Let the optimiser's step update the tables, where it must know all gradients first."""
        batches = trainer.accumulate_grad_batches
        self._accumulation = Accumulation(batches) if batches > 1 else None
        if self.clip_tables:
            clip_tables_too(trainer, self.optimizers, self.sharded_tables())
        elif any(shared.update.deferred for shared in self.sharded_tables()):
            clip_waiting(trainer)
        elif batches > 1:
            update_in_step(
                self.optimizers, self.sharded_tables(), f"accumulate_grad_batches={batches}"
            )

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Weight the loss and run its backward. By the weight, ranks with batches of different
        sizes train like one process with the global batch; and a step of several batches of
        different sizes trains like one with a large batch.
        """
        rows_W = self._rows_of_ranks()
        rows = sum(rows_W)
        share = rows_W[self.comm.rank] * self.comm.world / rows if rows else 1.0
        if self._accumulation is not None:
            share *= self._accumulation.weight(rows)
        if share != 1:
            closure_loss = closure_loss * share
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _rows_of_ranks(self) -> list[int]:
        """Return the rows of each rank in this batch; one for each rank if the model has no tables,
        whose messages tell.
        """
        known = (shared.header.rows_W for shared in self.sharded_tables())
        return next((rows_W for rows_W in known if rows_W and sum(rows_W)), [1] * self.comm.world)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave the dense gradients of a rank as they are, because the step adds up those of later
        batches.

        DDP's own `no_sync` fails on a static graph. On GPUs every batch is averaged, which gives
        the same sums.
        """
        with nullcontext() if self.gradient_average is None else self.gradient_average.held():
            yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward, and step. Gradients of several batches are those of one large
        batch before they are clipped. Running statistics are averaged over ranks.
        """
        if self._accumulation is not None:
            closure = self._accumulation.ended_by(closure, optimizer, self.sharded_tables())
        found = super().optimizer_step(optimizer, closure, model, **kwargs)
        average_over_ranks(self._statistics)
        return found
