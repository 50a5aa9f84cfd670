"""The step of a Lightning Strategy with sharded tables: ranks with batches of different sizes, and
steps of several batches, train like one process with the global batch.

    setup_optimizers    let the module's optimisers train the tables
    backward            weight the loss by this rank's share of the global batch; update the tables,
                        unless the optimiser's step does
    optimizer_step      forward, backward, and the step; average running statistics

Lightning's clipping of gradients clips those of table rows, too.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from recapp.engine.sharded_collection import sharded_collections, tables_as_parameters
from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError
from recapp.optim.clipping import clip_norm, clip_value
from recapp.optim.named_rules import Rules
from recapp.optim.optimizer import HybridOptimizer
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
        """Let the optimiser's step update the tables, where it must know all gradients first.
        Lightning's precision plugin then clips the gradients of their rows, too.

        Raises:
            ConfigError: `clip_tables` is set and `gradient_clip_val` is not, or the optimisers are
                not one `HybridOptimizer`.
        """
        batches = trainer.accumulate_grad_batches
        self._accumulation = Accumulation(batches) if batches > 1 else None
        if self.clip_tables and not trainer.gradient_clip_val:
            raise ConfigError(
                f"clip_tables=True: Trainer(gradient_clip_val={trainer.gradient_clip_val}) clips "
                "nothing: set it, or leave clip_tables out"
            )
        tables = self.sharded_tables()
        waiting = any(shared.update.deferred for shared in tables)
        if self.clip_tables or (batches > 1 and not waiting):
            setting = f"accumulate_grad_batches={batches}"
            update_in_step(
                self.optimizers, tables, "clip_tables=True" if self.clip_tables else setting
            )
        if self.clip_tables or waiting:
            trainer.precision_plugin.clip_gradients = _clip  # type: ignore[method-assign]

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
            share *= self._accumulation.add(rows)
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
            end = self._accumulation.run_and_end
            closure = partial(end, closure, optimizer, self.sharded_tables())
        loss = super().optimizer_step(optimizer, closure, model, **kwargs)
        average_over_ranks(self._statistics)
        return loss


class Accumulation:
    """Gradients of several batches that one step adds up (`Trainer(accumulate_grad_batches=k)`).

    A step trains as with one batch of all rows of its k batches: each batch counts by its rows.

        Lightning    loss of each batch / k
        here         times rows of the batch / rows of the first one; before the step, gradients
                     times k rows of the first one / rows of all

    Both factors are 1 where all batches have as many rows, so then nothing is rounded but the sums:
    the gradients of a row, and of a dense weight, are added in the order of the batches. The last
    step of an epoch may have fewer batches, and a smaller last one.

    Args:
        batches: The number of batches of a step, k.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self._rows: list[int] = []

    def add(self, rows: int) -> float:
        """Add a batch, and return the factor of its loss: its rows over those of the step's first
        batch, so that each row has the same weight. `end` divides by the rows of all.

        Args:
            rows: The rows of the batch over all ranks.
        """
        self._rows.append(rows)
        return rows / self._first

    def end(self, optimizer: Optimizer, tables: Sequence[ShardedTables]) -> None:
        """Scale the gradients of the dense part and of tables to those of one batch, before they
        are clipped.

        Args:
            optimizer: The optimiser with the dense part.
            tables: The tables, whose gradients wait.
        """
        factor = self.batches * self._first / max(sum(self._rows), 1)
        self._rows = []
        if factor == 1:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for shared in tables:
            shared.update.scale(factor)

    def run_and_end(
        self,
        closure: Callable[[], Any],
        optimizer: Optimizer,
        tables: Sequence[ShardedTables],
    ) -> Any:
        """Run forward and backward of the last batch of a step, call `end`, and return the loss."""
        loss = closure()
        self.end(optimizer, tables)
        return loss

    @property
    def _first(self) -> int:
        """Return the rows of the first batch of the step, at least 1."""
        return max(self._rows[0], 1) if self._rows else 1


def check_validations(trainer: Trainer) -> None:
    """Check that no validation falls inside a step of several batches.

    Args:
        trainer: The trainer, when training starts.

    Raises:
        ConfigError: The last step of an epoch has fewer batches, so that validations counted across
            epochs leave the ends of steps.
    """
    of_step = trainer.accumulate_grad_batches
    batches = trainer.num_training_batches
    one_epoch = trainer.max_epochs == 1 or 0 <= trainer.max_steps <= -(-batches // of_step)
    if trainer.check_val_every_n_epoch is None and not one_epoch and batches % of_step:
        raise ConfigError(
            f"trainer.val_check_interval={trainer.val_check_interval}: counts batches across "
            f"epochs, and an epoch of {batches:.0f} batches ends with a shorter step "
            f"(trainer.accumulate_grad_batches={of_step}), so that later validations would fall "
            "inside steps: set null for a validation at every epoch's end"
        )


def update_in_step(
    optimizers: Sequence[Optimizer | Optimizable], tables: Sequence[ShardedTables], setting: str
) -> None:
    """Make the step of the optimiser update the tables, instead of backward. Gradients of several
    backwards add up until then.

    Args:
        optimizers: The optimisers of the module: one `HybridOptimizer`.
        tables: The sharded tables.
        setting: The setting that needs it, for the error.

    Raises:
        ConfigError: The optimisers are not one `HybridOptimizer`.
    """
    hybrids = [one for one in optimizers if isinstance(one, HybridOptimizer)]
    if len(hybrids) != 1 or len(optimizers) != 1:
        names = ", ".join(type(one).__name__ for one in optimizers) or "none"
        raise ConfigError(
            f"{setting}: the module's optimizers are {names}, and tables are updated in the step "
            "of one HybridOptimizer: return HybridOptimizer(dense, strategy.sparse_groups()) from "
            "configure_optimizers"
        )
    hybrids[0].table_gradients = [shared.update for shared in tables]
    for gradients in hybrids[0].table_gradients:
        gradients.defer(hybrids[0])


def _clip(
    optimizer: Optimizer,
    clip_val: int | float = 0.0,
    gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
) -> None:
    """Clip all gradients of an optimiser (`Precision.clip_gradients`)."""
    if clip_val <= 0:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tables = optimizer.table_gradients if isinstance(optimizer, HybridOptimizer) else []
    if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        clip_value(parameters, tables, clip_val)
    else:
        clip_norm(parameters, tables, clip_val)


OF_BATCH_NORM = ("running_mean", "running_var")


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return the running statistics of the dense part of a model.

    Those are the buffers of torch's batch norms, means and variances by which an evaluation
    normalises, and the buffers that another layer names in `running_statistics`.

    Each rank sees its own rows, so its statistics are its own, and the ranks average them after
    every step: the average of their running means is the running mean of their averages, because
    both are linear. DDP's `broadcast_buffers` would take the statistics of rank 0 alone.
    """
    collections = sharded_collections(module)
    inside = {id(part) for collection in collections for part in collection.modules()}
    statistics: list[Tensor] = []
    for part in module.modules():
        names = getattr(part, "running_statistics", ())
        names = OF_BATCH_NORM if isinstance(part, _BatchNorm) else names
        buffers = [] if id(part) in inside else [getattr(part, name, None) for name in names]
        statistics += [buffer for buffer in buffers if isinstance(buffer, Tensor)]
    return statistics
