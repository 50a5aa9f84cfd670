"""The LightningModule: loss, optimiser and metrics of a click model. It knows no ranks, no plan and
no sharding.

Any LightningModule that holds an `EmbeddingBagCollection` trains sharded under
`EmbeddingShardingStrategy` all the same; this one is what recapp's commands use. Lightning's
automatic optimisation, callbacks, loggers and schedulers work as in any module.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric, MetricCollection

from recapp.engine.shard_model import sharded_tables
from recapp.errors import ConfigError
from recapp.optim.optimizer import hybrid
from recapp.sparse.batch import Batch


class ClickModule(LightningModule):
    """A click model with binary cross entropy of its logits.

    Args:
        make_model: Builds the model, tables on the meta device; called once, on every rank alike.
        make_optimizer: Makes the dense part's optimiser from its parameters.
        make_metrics: Makes fresh metrics by name; each is updated with (logits_B, labels_B). It
            takes torchmetrics' `sync_on_compute`.
        make_schedule: Makes a learning-rate schedule of the one optimiser, stepped every batch; a
            `ReduceLROnPlateau` is stepped after every validation. None keeps rates constant.
        seed: The seed of the dense part's start values.
        monitor: The metric, such as `val_auc`, that a `ReduceLROnPlateau` is stepped with.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        make_metrics: Callable[..., Mapping[str, Metric]],
        make_schedule: Callable[[Optimizer], LRScheduler] | None = None,
        seed: int = 1,
        monitor: str | None = None,
    ) -> None:
        super().__init__()
        self._monitor = monitor
        self._make_model = make_model
        self._make_optimizer = make_optimizer
        self._make_schedule = make_schedule
        self._seed = seed
        self.val_metrics = MetricCollection(dict(make_metrics()), compute_groups=False)
        # The running value on the bar is this rank's: only some ranks compute it, so it may not
        # need the others.
        self.train_metrics = MetricCollection(
            dict(make_metrics(sync_on_compute=False)), compute_groups=False
        )
        self.model: nn.Module | None = None
        self._loss_sum = torch.zeros(())
        self._loss_steps = 0

    def configure_model(self) -> None:
        """Build the model once; tables stay on the meta device until the strategy shards them."""
        if self.model is None:
            torch.manual_seed(self._seed)
            self.model = self._make_model()

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of a batch, [B].

        Raises:
            ConfigError: The model returns something else.
        """
        assert self.model is not None
        logits_B = self.model(batch)
        if not isinstance(logits_B, Tensor):
            found = f"a {type(logits_B).__name__}"
        elif logits_B.shape != (batch.rows,):
            found = f"a tensor of shape {list(logits_B.shape)} for {batch.rows} samples"
        else:
            return logits_B
        raise ConfigError(
            f"model {type(self.model).__name__} returned {found}: its forward must return one "
            "logit for each sample, [B]"
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss over this rank's batch; the strategy weighs it where ranks have
        batches of different size.
        """
        logits_B = self(batch)
        loss = F.binary_cross_entropy_with_logits(logits_B, batch.labels_B, reduction="sum") / max(
            batch.rows, 1
        )
        self.log("train_loss", self._mean_loss(loss.detach()), prog_bar=True, batch_size=batch.rows)
        self.train_metrics.update(logits_B.detach().float(), batch.labels_B)
        return loss

    def _mean_loss(self, loss: Tensor) -> Tensor:
        """Return the mean loss of the steps since loggers last wrote, this one included, without
        waiting for the device.
        """
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._loss_steps == 0 or self.global_step % every == 0:
            self._loss_sum = torch.zeros_like(loss)
            self._loss_steps = 0
        self._loss_sum = self._loss_sum + loss
        self._loss_steps = self._loss_steps + 1
        return self._loss_sum / self._loss_steps

    def on_train_start(self) -> None:
        """Begin to average the loss anew, without what an earlier fit has left."""
        self._loss_steps = 0

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the running AUC where loggers write: every `log_every_n_steps`, and at a stop that a
        callback may just have asked for.
        """
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        due = self.global_step % every == 0 or self.trainer.should_stop
        if due and (auc := self.train_auc()) is not None:
            self.log("train_auc", auc, batch_size=batch.rows)

    def train_auc(self) -> float | None:
        """Return the AUC of this rank's training batches of the epoch so far; None before both
        classes were seen. It takes 3 ms, because it walks a histogram.
        """
        value = (
            float(self.train_metrics["auc"].compute()) if "auc" in self.train_metrics else math.nan
        )
        return None if math.isnan(value) else value

    def on_train_epoch_start(self) -> None:
        """Reset the running training metrics."""
        self.train_metrics.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the metrics; an empty one adds nothing but takes part in the exchange."""
        logits_B = self(batch)
        self.val_metrics.update(logits_B.float(), batch.labels_B)

    def on_validation_epoch_start(self) -> None:
        """Reset the validation metrics."""
        self.val_metrics.reset()

    def on_validation_epoch_end(self) -> None:
        """Log `val_<metric>` over all ranks, the same numbers on each, and step a schedule that
        monitors one of them: before a checkpoint is saved, which then holds it.
        """
        measured = {f"val_{name}": value for name, value in self.val_metrics.compute().items()}
        for name, value in measured.items():
            self.log(name, value, prog_bar=name in ("val_auc", "val_log_loss"))
        if self.trainer.state.fn == TrainerFn.FITTING and self._validation_is_due():
            for config in self.trainer.lr_scheduler_configs:
                if isinstance(config.scheduler, ReduceLROnPlateau):
                    config.scheduler.step(float(measured[str(config.monitor)]))

    def _validation_is_due(self) -> bool:
        """Return whether a longer run would validate here, too: a run that goes on from the end of
        a shorter one must not have looked at rates once more.
        """
        if not self.trainer.should_stop:
            return True
        loop = self.trainer.fit_loop.epoch_loop
        across_epochs = self.trainer.check_val_every_n_epoch is None
        trained = 1 + (loop.total_batch_idx if across_epochs else loop.batch_idx)
        return trained % self.trainer.val_check_batch == 0  # type: ignore[operator]

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the metrics; an empty one adds nothing but takes part in the exchange."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_start(self) -> None:
        """Reset the metrics."""
        self.on_validation_epoch_start()

    def on_test_epoch_end(self) -> None:
        """Log `test_<metric>` over all ranks, the same numbers on each."""
        for name, value in self.val_metrics.compute().items():
            self.log(f"test_{name}", value)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the probabilities of a batch, float32 [B]; an empty one takes part in the
        exchange.
        """
        logits_B: Tensor = self(batch)
        return torch.sigmoid(logits_B.float())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return one optimiser: the dense parameters' own, and a param group per row rule of the
        tables whose rate the fused update reads.
        """
        dense = self._make_optimizer([p for p in self.parameters() if p.requires_grad])
        optimizer = hybrid(dense, sharded_tables(self))
        if self._make_schedule is None:
            return optimizer
        schedule: dict[str, Any] = {"scheduler": self._make_schedule(optimizer), "interval": "step"}
        if isinstance(schedule["scheduler"], ReduceLROnPlateau):
            # Lightning would step it by epochs or batches, of which not all end in a validation
            schedule |= {"reduce_on_plateau": True, "monitor": self._monitor, "strict": False}
            schedule |= {"interval": "epoch", "frequency": sys.maxsize}
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        return {"optimizer": optimizer, "lr_scheduler": schedule}  # type: ignore[return-value]
