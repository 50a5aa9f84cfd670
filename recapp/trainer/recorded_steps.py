"""The training steps of a run as CUDA graphs, on one rank with a GPU (`engine.graph=auto`).

    Lightning's loop          steps that are launched one by one    recorded steps
    strategy.training_step    forward, loss, what is logged         the whole step, what is logged
    strategy.backward         backward, update of the tables        nothing
    strategy.optimizer_step   these two, the optimiser's step       these two

Lightning keeps its loop: batches, progress, schedules, loggers, validations, checkpoints, and the
hooks around a batch. Hooks within a step are not called, so callbacks that have one keep steps from
being recorded.

`recapp/graphs/step_graph.py` says which steps are recorded, and what stops them. No GPU has run it
yet.
"""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.optim import Optimizer

from recapp.engine.sharded_tables import ShardedTables
from recapp.graphs.recorded_batch import Capture
from recapp.graphs.several_ranks import OfRanks
from recapp.graphs.step_graph import StepGraph, note_launched, obstacle
from recapp.optim.optimizer import HybridOptimizer, each_norm, parts_of, total_norm
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.sparse.transfer import to_host
from recapp.trainer.lightnings_parts import BATCH_HOOKS, is_idle
from recapp.trainer.module import TaskModule, keeps_all

SETTING = "engine.graph=auto"
WITHIN_STEP = [hook for hook in BATCH_HOOKS if hook.startswith(("on_before_", "on_after_"))]


class RecordedSteps:
    """The steps of a run.

    Args:
        trainer: The trainer.
        module: Its module.
        optimizer: The optimiser of the module, which the device can stop.
        capture: Records a step; None records a CUDA graph.
        ranks: What makes several ranks train like one; None on a single rank.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: TaskModule,
        optimizer: HybridOptimizer,
        capture: Capture | None,
        ranks: OfRanks | None,
    ) -> None:
        self.trainer = trainer
        self.module = module
        self._norm_G: Tensor | None = None  # of the gradients of the last step
        self._graph = StepGraph(module, self._loss, optimizer, capture, SETTING, ranks)
        self._graph.copies = False  # of the loss Lightning makes its own
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def __call__(self, batch: Batch, batch_idx: int) -> Tensor:
        """Train on a batch, log its values, and return its loss.

        Raises:
            IdError: An id of one of the last batches is outside of its table.
            TrainingError: The loss of one of the last batches was not finite.
        """
        self.module.begin_batch(batch_idx)
        self._graph.steps = self.trainer.global_step
        loss: Tensor = self._graph(batch)
        for metric in self.module.train_metrics.values():
            metric._update_count += 1  # unseen; torchmetrics warns where it is 0
        self.module.log_batch(batch)
        if self._norm_G is not None and self.module.writes_log():
            norm = total_norm(to_host(self._norm_G).tolist())
            self.module.log("grad_norm", norm, batch_size=1)
        return loss

    @property
    def exchanges(self) -> bool:
        """Return whether the ids of batches are exchanged by themselves, so also ahead."""
        return self._graph.cuts

    def finish(self) -> None:
        """Wait for the last steps, and raise their errors, as a call does."""
        self._graph.finish()

    def end(self) -> None:
        """End the run, as `finish` does."""
        self._hook.remove()
        self.finish()

    def _loss(self, module: nn.Module, batch: Batch) -> Tensor:
        with self.trainer.precision_plugin.train_step_context():
            return self.module.loss_of(batch)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Keep the norms of the gradients where a repeated step writes them again; then clip."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm_G = each_norm([p.grad for p in parameters if p.grad is not None])
        self._norm_G = norm_G if self._norm_G is None else self._norm_G.copy_(norm_G)
        self.module.configure_gradient_clipping(
            optimizer, self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
        )


def recorded_steps(
    trainer: Trainer,
    tables: list[ShardedTables],
    capture: Capture | None = None,
    ranks: OfRanks | None = None,
) -> RecordedSteps | None:
    """Return the steps of a run as graphs. Return None where they are launched one by one; a note
    says why, unless only another device or module could change it.

    Args:
        trainer: The trainer, which has restored its checkpoint.
        tables: The sharded tables of its module.
        capture: Records a step; None records a CUDA graph.
        ranks: What makes several ranks train like one; None on a single rank.
    """
    module = trainer.lightning_module
    on_device = capture is not None or module.device.type == "cuda"
    if not on_device or type(module) is not TaskModule or not list(module.parameters()):
        return None
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, HybridOptimizer)
    why = _why_not(trainer, module) or obstacle(
        tables, parts_of(optimizer.dense), ranks is not None
    )
    if not why:
        return RecordedSteps(trainer, module, optimizer, capture, ranks)
    note_launched(SETTING, why)
    return None


def _why_not(trainer: Trainer, module: TaskModule) -> str:
    batches = trainer.accumulate_grad_batches
    callbacks: Iterable[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    within = sorted(
        {
            type(each).__name__
            for each in callbacks
            if isinstance(each, BaseFinetuning)
            or not all(is_idle(each, hook) for hook in WITHIN_STEP)
        }
    )
    whole = [name for name, metric in module.train_metrics.items() if keeps_all(metric)]
    reasons = {
        f"trainer.accumulate_grad_batches={batches}: the host weighs the batches": batches > 1,
        "trainer.detect_anomaly=true: the host reads gradients": torch.is_anomaly_enabled(),
        f"callbacks that act within a step ({', '.join(within)})": bool(within),
        f"metrics that keep all batches ({', '.join(whole)})": bool(whole),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
