"""Gradients of several batches that one step adds up (`Trainer(accumulate_grad_batches=k)`).

A step trains as with one batch of all rows of its k batches: each batch counts by its rows.

    Lightning    loss of each batch / k
    here         times rows of the batch / rows of the first one; before the step, gradients times
                 k rows of the first one / rows of all

Both factors are 1 where all batches have as many rows, so then nothing is rounded but the sums: the
gradients of a row, and of a dense weight, are added in the order of the batches. The last step of
an epoch may have fewer batches, and a smaller last one.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer

from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError


class Accumulation:
    """The batches of a step so far.

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

    def ended_by(
        self,
        closure: Callable[[], Any],
        optimizer: Optimizer,
        tables: Sequence[ShardedTables],
    ) -> Callable[[], Any]:
        """Return a closure that runs forward and backward of the last batch of a step and then
        calls `end`.
        """

        def ended() -> Any:
            loss = closure()
            self.end(optimizer, tables)
            return loss

        return ended

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
