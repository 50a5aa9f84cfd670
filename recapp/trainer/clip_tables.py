"""Lightning's gradient clipping over the dense part and tables together."""

from collections.abc import Sequence

from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from recapp.engine.sharded_tables import ShardedTables
from recapp.errors import ConfigError
from recapp.optim.clipping import clip_norm, clip_value
from recapp.optim.optimizer import HybridOptimizer


def clip_tables_too(
    trainer: Trainer, optimizers: Sequence[Optimizer | Optimizable], tables: Sequence[ShardedTables]
) -> None:
    """Make the trainer clip the gradients of table rows too. The optimiser's step then updates the
    rows.

    Args:
        trainer: The trainer; its precision plugin clips for every module.
        optimizers: The optimisers of the module: one `HybridOptimizer`.
        tables: The sharded tables.

    Raises:
        ConfigError: `gradient_clip_val` is not set, or the optimisers are not one
            `HybridOptimizer`.
    """
    if not trainer.gradient_clip_val:
        raise ConfigError(
            f"clip_tables=True: Trainer(gradient_clip_val={trainer.gradient_clip_val}) clips "
            "nothing: set it, or leave clip_tables out"
        )
    update_in_step(optimizers, tables, "clip_tables=True")
    clip_waiting(trainer)


def clip_waiting(trainer: Trainer) -> None:
    """Make the trainer clip the gradients of rows that wait for the step of an optimiser, too."""
    trainer.precision_plugin.clip_gradients = _clip  # type: ignore[method-assign]


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
    held = [shared.update for shared in tables]
    for gradients in held:
        gradients.defer(hybrids[0])
    hybrids[0].table_gradients = list(held)


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
