"""The LightningModule: model, optimiser and task. It does not know ranks, plan or sharding.

    batch --model--> outputs by name --task--> loss, metrics, scores

recapp's commands use this module. Any other LightningModule that holds an `EmbeddingBagCollection`
trains sharded under `EmbeddingShardingStrategy` too. Lightning's automatic optimisation, callbacks,
loggers and schedulers work as in any module.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from recapp.engine.sharded_collection import sharded_tables
from recapp.errors import ConfigError, TrainingError
from recapp.optim.optimizer import gradient_norm, hybrid
from recapp.optim.schedule import Plateau
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.tasks.detail_metrics import SLICES, Slices
from recapp.tasks.measures import Measures
from recapp.tasks.task import CLICK, Task, one_or_all
from recapp.trainer.data_protocols import datamodule_of
from recapp.trainer.lightnings_parts import ends_step, log_in


class TaskModule(LightningModule):
    """A model that is trained for a task.

    A model may have two methods more. Both get the result of its forward, the batch, and the task's
    loss of other outputs on this batch, as a function.

        extra_losses    further losses by name, each a scalar, such as one of each branch; training
                        adds them to the task's loss and logs each as `train_<name>`
        task_loss       the loss of training in the place of the task's loss, such as that of each
                        member's outputs; logs and evaluation keep the task's loss

    Args:
        task: The task of the training: loss, metrics, outputs.
        make_model: Builds the model, with tables on the meta device; called once on every rank.
        make_optimizer: Makes the dense part's optimiser from its parameters.
        make_schedule: Makes the learning-rate schedule of the optimiser, stepped after every batch;
            a `ReduceLROnPlateau` is stepped after every validation. None keeps rates constant.
        seed: The seed of the dense part's start values.
        monitor: The metric, such as `val_auc`, with which a `ReduceLROnPlateau` is stepped.
        measures_training: Whether all metrics are measured on the rows of each epoch while they
            train, except those that keep all batches, and not the running ones alone.
    """

    _loss_sum: Tensor
    _loss_count: Tensor

    def __init__(
        self,
        task: Task,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        make_schedule: Callable[[Optimizer], LRScheduler] | None = None,
        seed: int = 1,
        monitor: str | None = None,
        measures_training: bool = False,
    ) -> None:
        super().__init__()
        self.task = task
        self._monitor = monitor
        self._make_model = make_model
        self._make_optimizer = make_optimizer
        self._make_schedule = make_schedule
        self._seed = seed
        self.val_metrics = MetricCollection(dict(task.make_metrics()), compute_groups=False)
        # The bar shows the running values of its own rank. Only some ranks compute them, so the
        # computation must not wait for other ranks.
        running = {one.name for one in task.measures if one.running}
        metrics = task.make_metrics(sync_on_compute=False).items()
        self.train_metrics = MetricCollection(
            {
                name: metric
                for name, metric in metrics
                if name in running or (measures_training and not keeps_all(metric))
            },
            compute_groups=False,
        )
        self._details: Any = task.make_details()
        self._weights: dict[str, Tensor] = {}  # the sums of a validation's weights by label
        self._details_of_device = nn.ModuleList(self._details.values())
        # The details of the last validation or test, as plain values by name.
        self.details: dict[str, Any] = {}
        self.model: nn.Module | None = None
        for metric in self.train_metrics.values():
            metric.compute_with_cache = False  # a recorded step adds to it unseen
        # the sum of the losses since loggers wrote, and their number
        self.register_buffer("_loss_sum", torch.zeros(()), persistent=False)
        self.register_buffer("_loss_count", torch.zeros(()), persistent=False)
        # What the last batch logs, in memory that stays: a recorded step writes it again.
        self._logged: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        """Build the model once; tables stay on the meta device until the strategy shards them."""
        if self.model is None:
            torch.manual_seed(self._seed)
            # Lightning would build it on the GPU, whose generator draws other start values.
            with torch.device("cpu"):
                self.model = self._make_model()

    def forward(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Return the outputs of the model by name, each [B]; only the tensor if the task has one
        output.

        Raises:
            ConfigError: The model returns other outputs or shapes.
        """
        return one_or_all(self.outputs(batch))

    def outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the outputs of the model by name, each [B].

        Raises:
            ConfigError: The model returns other outputs or shapes.
        """
        assert self.model is not None
        return self.task.named(self.model(batch), batch.rows, type(self.model).__name__)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss over this rank's batch. The strategy weights the loss if ranks have
        batches of different sizes.
        """
        self.begin_batch(batch_idx)
        loss = self.loss_of(batch)
        self.log_batch(batch)
        return loss

    def begin_batch(self, batch_idx: int) -> None:
        """Prepare for a batch that trains.

        Args:
            batch_idx: The number of the batch in its epoch.
        """
        self._seed_layers(batch_idx)
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        begins = batch_idx % self.trainer.accumulate_grad_batches == 0
        if begins and self.global_step % every == 0:
            self._begin_mean()

    def loss_of(self, batch: Batch) -> Tensor:
        """Return the loss of a batch that trains. All else that the step leaves behind, the values
        to log and the running metrics, stays in its memory, where a recorded step changes it, too.
        """
        model: Any = self.model
        returned = model(batch)
        outputs = self.task.named(returned, batch.rows, type(model).__name__)
        # a file may have fewer rows than there are ranks; the mean of none is nan
        loss = (
            self.task.loss(outputs, batch) if batch.rows else torch.cat([*outputs.values()]).sum()
        )
        self._loss_sum.add_(loss.detach())
        self._loss_count.add_(1)
        metrics = dict(self.train_metrics.items(keep_base=True))
        with in_place(metrics.values()):
            self.task.update(metrics, outputs, batch)
        logged = {"loss": self._loss_sum / self._loss_count}
        if getattr(model, "task_loss", None):
            loss = model.task_loss(returned, batch, self._loss_of(batch))
        if getattr(model, "extra_losses", None):
            for name, extra in self._extra_losses(returned, batch).items():
                logged[name] = extra.detach()
                loss = loss + extra
        self._logged = {
            name: self._logged[name].copy_(value) if name in self._logged else value.clone()
            for name, value in logged.items()
        }
        return loss

    def log_batch(self, batch: Batch) -> None:
        """Log the losses of a batch: that of the task as the mean over the batches since the last
        write of the loggers. Do not wait for the device.
        """
        for name, value in self._logged.items():
            shown = name == "loss"
            log_in(self, "training_step", f"train_{name}", value, batch.rows, prog_bar=shown)

    def _begin_mean(self) -> None:
        self._loss_sum.zero_()
        self._loss_count.zero_()

    def writes_log(self) -> bool:
        """Return whether loggers write at the end of the step under way."""
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return (self.global_step + 1) % every == 0

    def _seed_layers(self, batch_idx: int) -> None:
        """Seed torch's random numbers, which dropout draws, for a batch.

        They depend on the seed of the run, the epoch, the batch and the rank alone: so a run draws
        the same numbers under every plan, and after a resume.
        """
        numbers = (self._seed, self.current_epoch, batch_idx, self.global_rank)
        digest = blake2b(repr(numbers).encode(), digest_size=7).digest()
        seed = int.from_bytes(digest, "little")
        # not torch.manual_seed: it notes the call stack, for devices that are not there, in 1 ms
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _loss_of(self, batch: Batch) -> Callable[[Tensor | Mapping[str, Tensor]], Tensor]:
        model = type(self.model).__name__
        return lambda returned: self.task.loss(self.task.named(returned, batch.rows, model), batch)

    def _extra_losses(self, returned: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the losses by name that the model adds to that of the task.

        Raises:
            ConfigError: A loss has the name of a metric, or is not one number.
        """
        model: Any = self.model
        weighted = self.task.with_own_weights(batch)
        extra: dict[str, Tensor] = model.extra_losses(returned, weighted, self._loss_of(batch))
        names = {"loss", *(measure.name for measure in self.task.measures)}
        for name, loss in extra.items():
            if name in names or loss.dim():
                fault = "the name of a metric" if name in names else f"shape {list(loss.shape)}"
                raise ConfigError(
                    f"model {type(model).__name__}: its extra loss {name} has {fault}: "
                    "extra_losses must return one number for each name of its own"
                )
        return extra

    @override
    def on_train_start(self) -> None:
        self._begin_mean()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the norm of the gradients at every step at which loggers write.

        It is that before clipping, of the dense part, and of the tables if their update waits for
        the step (`engine.clip_tables`, accumulation).
        """
        if self.writes_log():
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            tables = getattr(optimizer, "table_gradients", ())
            self.log("grad_norm", gradient_norm(parameters, tables), batch_size=1)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not ends_step(self.trainer, batch_idx + 1):
            return
        if self.global_step % every == 0 or self.trainer.should_stop:
            for name, value in self.running().items():
                self.log(f"train_{name}", value, batch_size=batch.rows)

    def running(self) -> dict[str, float]:
        """Return the running metrics of the task by name, over this rank's training batches of the
        epoch so far. Leave out metrics that are not defined on these rows yet.

        An AUC takes 3 ms, because it sums over a histogram.
        """
        values = {
            measure.name: float(self.train_metrics[measure.name].compute())
            for measure in self.task.measures
            if measure.running
        }
        return {name: value for name, value in values.items() if not math.isnan(value)}

    @contextmanager
    def over_ranks(self) -> Iterator[MetricCollection]:
        """Give the metrics of training the rows of all ranks inside the `with`. Every rank calls
        it.
        """
        strategy: Any = self.trainer.strategy
        if strategy.recorded is not None:
            strategy.recorded.finish()
        metrics = self.train_metrics.values()
        with in_place(metrics), ExitStack() as synced:
            for metric in metrics:
                synced.enter_context(metric.sync_context())
            yield self.train_metrics

    @override
    def on_train_epoch_start(self) -> None:
        with in_place(self.train_metrics.values()):
            self.train_metrics.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the metrics. An empty batch adds nothing, but takes part in the
        exchange.
        """
        outputs = self.outputs(batch)
        self.task.update(dict(self.val_metrics.items(keep_base=True)), outputs, batch)
        for label, weights_B in batch.weights.items():
            self._weights[label] = self._weights.get(label, 0) + weights_B.sum(dtype=torch.float64)
        if self._details:
            self.task.update(self._details, outputs, batch)

    @override
    def on_validation_epoch_start(self) -> None:
        self.val_metrics.reset()
        self._weights = {}
        for detail in self._details.values():
            detail.reset()
            if isinstance(detail, Slices):
                data = datamodule_of(self.trainer)
                test = self.trainer.state.fn == TrainerFn.TESTING
                detail.set_values(data.frequent_values(detail.column, SLICES, test=test))

    def on_validation_epoch_end(self) -> None:
        """Log `val_<metric>` over all ranks, with the same numbers on each rank. Then step a
        `ReduceLROnPlateau`, so that the checkpoint of this validation holds its new state. A
        `Plateau` may end the run.
        """
        self.details = {name: detail.record() for name, detail in self._details.items()}
        measured = {f"val_{name}": value for name, value in self._measured("validation").items()}
        for name, value in measured.items():
            self.log(name, value, prog_bar=name in self.task.measures.shown)
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        loop = self.trainer.fit_loop.epoch_loop
        across_epochs = self.trainer.check_val_every_n_epoch is None
        trained = 1 + (loop.total_batch_idx if across_epochs else loop.batch_idx)
        every: Any = self.trainer.val_check_batch
        if self.trainer.should_stop and trained % every:
            # a longer run would not validate here, and a run that resumes from the end of a shorter
            # one must have stepped its schedule as often as one long run
            return
        for config in self.trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, ReduceLROnPlateau):
                config.scheduler.step(float(measured[str(config.monitor)]))
            if isinstance(config.scheduler, Plateau) and config.scheduler.ends:
                self.trainer.should_stop = True

    def _measured(self, split: str) -> dict[str, Tensor]:
        """Return the metrics of a validation by name, with the same numbers on each rank.

        Raises:
            TrainingError: A metric that rows define is not defined, because all rows weigh 0.
        """
        metrics: dict[str, Tensor] = self.val_metrics.compute()
        defined = [m.name for m in self.task.measures if m.defined and m.name in metrics]
        if any(bool(metrics[name].isnan()) for name in defined):
            for label, weight in self._weights.items():
                if not float(self.trainer.strategy.reduce(weight, reduce_op="sum")):
                    schema = getattr(datamodule_of(self.trainer), "schema", None)
                    column = getattr(schema, "weights", {}).get(label, "...")
                    raise TrainingError(
                        f"dataset.weight={column}: all {split} rows weigh 0 in the loss of "
                        f"{label}, so its metrics are not defined: choose {split} rows of which "
                        "some weigh more, or leave dataset.weight out"
                    )
        return metrics

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    @override
    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    @override
    def on_test_epoch_end(self) -> None:
        self.details = {name: detail.record() for name, detail in self._details.items()}
        for name, value in self._measured("test").items():
            self.log(f"test_{name}", value)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Return the scores of a batch by column, each float32 [B]; only the tensor if the task has
        one column. An empty batch takes part in the exchange.
        """
        return one_or_all(self.task.scores(self.outputs(batch)))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return one optimiser: the optimiser of the dense parameters, and one param group per row
        rule of the tables. The fused update reads its learning rate from the param group.
        """
        dense = self._make_optimizer([p for p in self.parameters() if p.requires_grad])
        optimizer = hybrid(dense, sharded_tables(self))
        if self._make_schedule is None:
            return optimizer
        schedule: dict[str, Any] = {"scheduler": self._make_schedule(optimizer), "interval": "step"}
        if isinstance(schedule["scheduler"], ReduceLROnPlateau):
            # Lightning would step it by epochs or batches, and not all of them end in a validation
            schedule |= {"reduce_on_plateau": True, "monitor": self._monitor, "strict": False}
            schedule |= {"interval": "epoch", "frequency": sys.maxsize}
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        return {"optimizer": optimizer, "lr_scheduler": schedule}  # type: ignore[return-value]


def keeps_all(metric: Any) -> bool:
    """Return whether the state of a metric is a list of all batches."""
    return any(isinstance(state, list) for state in metric.metric_state.values())


@contextmanager
def in_place(metrics: Iterable[Metric]) -> Iterator[None]:
    """Leave the states of metrics in their memory, whatever this context does to them, because a
    recorded step adds to that memory.

    Args:
        metrics: The metrics.
    """
    states = [
        (metric, name, state)
        for metric in metrics
        for name, state in metric.metric_state.items()
        if isinstance(state, Tensor)
    ]
    try:
        yield
        for metric, name, state in states:
            if (changed := getattr(metric, name)) is not state:
                state.copy_(changed)
    finally:
        for metric, name, state in states:
            setattr(metric, name, state)


def measures_of(module: LightningModule) -> Measures:
    """Return the metrics of a module's task; the click metrics for a user's own LightningModule."""
    return module.task.measures if isinstance(module, TaskModule) else CLICK
