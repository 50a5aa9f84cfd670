"""A task defines the goal of training a model: the outputs, the labels to compare them with, the
loss and the metrics.

    model(batch) -> outputs by name -> task.loss(outputs, batch) -> backward
                                    -> task.update(metrics, outputs, batch) -> val_auc, ...
                                    -> task.scores(outputs) -> columns of a prediction

A task is a Python class and a file of settings, in recapp or in a folder of your own. Training,
progress, comparisons, pictures, predictions, artefacts and servers all use it. recapp has
`ClickTask` and `RatingTask`. This task has two labels and two outputs:

    # mine/shop_task.py
    from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

    from recapp import AUC, Measure, Output, Task


    class ShopTask(Task):
        outputs = (
            Output("click", label="clicked", column="click_score"),
            Output("order", label="ordered", column="order_score"),
        )
        known = (
            Measure("click_auc", "AUC of clicks", "max", output="click", shown=True),
            Measure("order_auc", "AUC of orders", "max", output="order", shown=True),
        )
        best = "order_auc"

        def loss(self, outputs, batch):
            return sum(
                cross_entropy(outputs[name], label_B, reduction="sum") / max(batch.rows, 1)
                for name, label_B in self.labels(batch).items()
            )

        def make_metric(self, name, sync_on_compute):
            return AUC(sync_on_compute=sync_on_compute)

    # mine/task/shop.yaml
    _target_: shop_task.ShopTask

Its model returns `{"click": logits_B, "order": logits_B}`. `PYTHONPATH=mine python -m recapp.train
--config-dir mine task=shop model=...` trains it on data with `dataset.label=[clicked,ordered]`.
Predictions, artefacts, servers and the C++ program have a column of scores for each output.

Shapes: B samples of a batch on this rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from typing_extensions import override

from recapp.errors import ConfigError, suggest
from recapp.tasks.measures import Measure, Measures

if TYPE_CHECKING:  # commands make tasks without importing torch, which takes seconds
    from torch import Tensor
    from torchmetrics import Metric

    from recapp.sparse.keyed_jagged_tensor import Batch

T = TypeVar("T")
ACTIVATIONS = ("sigmoid", "identity")


@dataclass(frozen=True)
class Output:
    """An output of a model: a number for each sample.

    Args:
        name: The name under which the model returns the output.
        label: The label to compare the output with; None takes the only label of the data.
        real: Whether the label may be any finite number; if not, it is 0 or 1.
        soft: Whether the label may be any number from 0 to 1.
        column: The column of a prediction that the output fills.
        activation: `sigmoid` turns a logit into the probability that is written; `identity` leaves
            the number as it is.

    Raises:
        ConfigError: The activation is another one.
    """

    name: str
    label: str | None = None
    real: bool = False
    column: str = "score"
    activation: str = "sigmoid"
    soft: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"output {self.name}: activation={self.activation}: must be "
                f"{' or '.join(ACTIVATIONS)}: let the model compute any other"
            )

    def score(self, values: "Tensor") -> "Tensor":
        """Return the scores of values of the output."""
        return values.sigmoid() if self.activation == "sigmoid" else values


class Sample(NamedTuple):
    """What a metric may read of a batch.

    Args:
        output_B: The output of the model, float32 [B].
        score_B: The prediction: for clicks the probability, [B].
        label_B: The labels, [B].
        weight_B: The weights of the samples, [B]; None weighs each 1.
        batch: The batch.
    """

    output_B: "Tensor"
    score_B: "Tensor"
    label_B: "Tensor"
    weight_B: "Tensor | None"
    batch: "Batch"


@dataclass(frozen=True)
class Added:
    """A metric or a detail that is added to a task.

    Args:
        name: Its name.
        output: The output of the task that it reads.
        make: Makes it; takes `sync_on_compute` by name.
        measure: The description of a metric; None is a detail.
        update: Updates it with the samples of a batch.
    """

    name: str
    output: Output
    make: "Callable[..., Metric]"
    measure: Measure | None = None
    update: Callable[[Any, Sample], None] = lambda metric, sample: metric.update(sample)


class Task(ABC):
    """The base class of tasks: a subclass names outputs and metrics, and computes the loss.

    `outputs` are the outputs of the model. `known` are the metrics that can be measured. `best`
    names the metric that chooses the best checkpoint and the best run of a sweep. `storage_metric`
    names the metric by which an export measures tables in fewer bits. `measures` are the chosen
    metrics.

    Args:
        names: The metrics to measure, `metrics.names`; None measures all known ones, without those
            on request.

    Raises:
        ConfigError: A metric is not known.
    """

    outputs: tuple[Output, ...]
    known: tuple[Measure, ...]
    best: ClassVar[str]
    # The name of a metric in `known`; empty takes `best`.
    storage_metric: ClassVar[str] = ""
    _added: Mapping[str, Added] = {}

    def __init_subclass__(cls) -> None:
        """Refuse own `scores`: the program of an artefact knows only `outputs`."""
        if "scores" in vars(cls):
            raise ConfigError(
                f"{cls.__name__}.scores: a task has none of its own, as an artefact's program "
                "could not run it: give each Output its activation, or let the model return scores"
            )

    def __init__(self, names: Sequence[str] | None = None) -> None:
        known = {measure.name: measure for measure in self.known}
        for name in () if names is None else names:
            if name not in known:
                raise ConfigError(
                    f"metrics.names has {name}: {suggest(name, known)}; +metrics.extra.{name}."
                    "_target_=... adds one of torchmetrics (docs/metrics.md)"
                )
        usual = [name for name, measure in known.items() if not measure.on_request]
        measures = {name: known[name] for name in (usual if names is None else names)}
        self.measures = Measures(tuple(measures.values()), self.best)

    @property
    def known_measures(self) -> Measures:
        """The descriptions of all metrics that the task knows, chosen or not."""
        added = [one.measure for one in self._added.values() if one.measure]
        return Measures((*self.known, *added), self.best)

    def add(self, added: Sequence[Added]) -> None:
        """Measure more than the metrics of the task, as the group `metrics` asks.

        Args:
            added: The metrics and details.
        """
        self._added = {one.name: one for one in added}
        measures = [one.measure for one in added if one.measure]
        self.measures = Measures((*self.measures.metrics, *measures), self.best)

    @property
    def storage_measures(self) -> tuple[Measure, ...]:
        """The metrics that an export measures: the usual metrics that say which value is better,
        with `storage_metric` at the end.
        """
        last = self.storage_metric or self.best
        usual = [one for one in self.known if one.better and not one.on_request]
        ranked = [one for one in self.known if one in usual or one.name == last]
        return tuple(sorted(ranked, key=lambda measure: measure.name == last))

    @abstractmethod
    def loss(self, outputs: "Mapping[str, Tensor]", batch: "Batch") -> "Tensor":
        """Return the mean loss over the samples of a batch, a scalar; 0 for an empty batch.

        Args:
            outputs: The outputs of the model by name, each [B].
            batch: The batch that the outputs were computed from.
        """

    @abstractmethod
    def make_metric(self, name: str, sync_on_compute: bool) -> "Metric":
        """Return a new metric. Its `update` takes (output_B, label_B), and `weights_B` if sample
        weights shall count in it.

        Args:
            name: The name of a metric in `known`.
            sync_on_compute: Whether `compute` covers the batches of all ranks. If so, every rank
                must call it.
        """

    def make_metrics(self, sync_on_compute: bool = True) -> "dict[str, Metric]":
        """Return new metrics by name, one for each of `measures`."""
        return {
            one.name: self._added[one.name].make(sync_on_compute=sync_on_compute)
            if one.name in self._added
            else self.make_metric(one.name, sync_on_compute)
            for one in self.measures
        }

    def make_details(self) -> "dict[str, Metric]":
        """Return new details of validation by name, such as metrics by slice. Their `compute`
        covers the batches of all ranks.
        """
        return {
            one.name: one.make(sync_on_compute=True)
            for one in self._added.values()
            if one.measure is None
        }

    def labels(self, batch: "Batch") -> "dict[str, Tensor]":
        """Return the label of each output, by the output's name, each [B]."""
        return {
            output.name: batch.labels_B if output.label is None else batch.labels[output.label]
            for output in self.outputs
        }

    def weights(self, batch: "Batch") -> "dict[str, Tensor]":
        """Return the sample weights by output, each [B]. If an output is missing, each of its
        samples counts 1.
        """
        weights = batch.weights
        names = {output.name: output.label or next(iter(weights), "") for output in self.outputs}
        return {name: weights[label] for name, label in names.items() if label in weights}

    def with_own_weights(self, batch: "Batch") -> "Batch":
        """Return a batch without the sample weights of labels that the task does not read."""
        read = self._labels_of(tuple(batch.labels), self.outputs)
        if batch.weights.keys() <= {*read}:
            return batch
        weights = {label: weights_B for label, weights_B in batch.weights.items() if label in read}
        parts = (batch.dense_BI, batch.sparse, batch.labels)
        return type(batch)(*parts, weights, batch.row_numbers_B)

    def check_labels(self, labels: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Check that the data have the labels of the outputs. Return the names of the labels that
        may be any finite number, and of those that may be any number from 0 to 1.

        Args:
            labels: The names of the labels of the data, `dataset.label`.

        Raises:
            ConfigError: A label is missing, or an output names no label and the data have several.
        """
        several = f"[{','.join(labels)}]"
        of_data = f"dataset.label={several if len(labels) != 1 else labels[0]}"
        for output in self.outputs:
            if output.label is not None and output.label not in labels:
                raise ConfigError(
                    f"{of_data}: has no label {output.label}, with which {type(self).__name__} "
                    f"compares its output {output.name}: {suggest(output.label, labels)}"
                )
            if output.label is None and len(labels) > 1:
                raise ConfigError(
                    f"{of_data}: {type(self).__name__} reads one label: name it, such as "
                    f"task.label={labels[0]}"
                )
        return (
            self._labels_of(labels, [output for output in self.outputs if output.real]),
            self._labels_of(labels, [output for output in self.outputs if output.soft]),
        )

    @staticmethod
    def _labels_of(labels: Sequence[str], outputs: Sequence[Output]) -> tuple[str, ...]:
        names = [output.label or next(iter(labels), "") for output in outputs]
        return tuple(name for name in names if name in labels)

    def update(
        self,
        metrics: "Mapping[str, Metric]",
        outputs: "Mapping[str, Tensor]",
        batch: "Batch",
    ) -> None:
        """Update metrics with a batch; an empty batch changes nothing. Sample weights of a label
        count in metrics whose `update` takes `weights_B`.

        Args:
            metrics: The metrics by name, from `make_metrics`.
            outputs: The outputs of the model by name, each [B].
            batch: The batch that the outputs were computed from.
        """
        labels = self.labels(batch)
        weights = self.weights(batch)
        for name, metric in metrics.items():
            added = self._added.get(name)
            measure = self.known_measures.get(name)
            named = added.output.name if added else measure.output if measure else ""
            read = named or self.outputs[0].name
            output_B = outputs[read].detach().float()
            if added:
                score_B = added.output.score(output_B)
                weight_B = weights.get(read)
                added.update(metric, Sample(output_B, score_B, labels[read], weight_B, batch))
            elif read in weights and takes_weights(type(metric)):
                metric.update(output_B, labels[read], weights_B=weights[read])
            else:
                metric.update(output_B, labels[read])

    def scores(self, outputs: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        """Return the columns of a prediction by name, each float32 [B]. A subclass may not replace
        this method.

        Args:
            outputs: The outputs of the model by name, each [B].
        """
        return {o.column: o.score(outputs[o.name].float()) for o in self.outputs}

    def named(self, result: object, rows: int, model: str) -> "dict[str, Tensor]":
        """Return the outputs of a model by name.

        Args:
            result: The result of the model's forward: a mapping, or a tensor if there is only one
                output.
            rows: The number of samples in the batch, B.
            model: The name of the model's class, for errors.

        Raises:
            ConfigError: An output is missing, or is not a number for each sample.
        """
        picked = self.picked(result, model)
        for name, value in picked.items():
            if tuple(value.shape) != (rows,):
                of = "" if len(picked) == 1 else f" as {name}"
                shape = f"a tensor of shape {list(value.shape)} for {rows} samples"
                raise self._refused(f"{shape}{of}", model)
        return picked

    def picked(self, result: object, model: str) -> "dict[str, Tensor]":
        """Return the outputs of a model by name, as `named` does, but check no shapes, which
        `torch.export` would take for facts about the model.
        """
        only = len(self.outputs) == 1
        outputs: Mapping[str, Any] = (
            result if isinstance(result, Mapping) else {self.outputs[0].name: result}
        )
        if not only and not isinstance(result, Mapping):
            raise self._refused(f"a {type(result).__name__}", model)
        for output in self.outputs:
            value = outputs.get(output.name)
            if value is None and isinstance(result, Mapping):
                raise self._refused(f"a mapping without {output.name}", model)
            if getattr(value, "shape", None) is None:
                of = "" if only else f" as {output.name}"
                raise self._refused(f"a {type(value).__name__}{of}", model)
        return {output.name: outputs[output.name] for output in self.outputs}

    def _refused(self, what: str, model: str) -> ConfigError:
        names = [output.name for output in self.outputs]
        allowed = (
            "one logit for each sample, [B]"
            if len(names) == 1
            else f"a mapping with {' and '.join(names)}, each a number for each sample, [B]"
        )
        return ConfigError(f"model {model} returned {what}: its forward must return {allowed}")


@cache
def takes_weights(metric: type) -> bool:
    """Return whether the `update` of a class of metrics takes sample weights."""
    return "weights_B" in signature(metric.update).parameters  # type: ignore[attr-defined]


def one_or_all(values: dict[str, T]) -> T | dict[str, T]:
    """Return the value itself if there is only one, as for tasks of one output."""
    return values if len(values) != 1 else next(iter(values.values()))


RANGES = {  # the least and the largest value of a setting, and both in words
    "label_smoothing": (0.0, 1 - 2.0**-24, "a number from 0 to below 1"),  # also in fp32
    # beyond these, fp32 loses the losses of a class, or of all samples
    "pos_weight": (1e-6, 1e6, "a number from 1e-6 to 1e6, such as 1"),
    "focal": (0.0, 20.0, "a number from 0 to 20, such as 2, or null"),
    "ranking": (0.0, 1.0, "a share, from 0 to 1"),
}


class ClickTask(Task):
    """Predict whether a row was clicked.

    The model returns the logit of a click for each sample. The loss is the binary cross entropy,
    changed by the arguments (`recapp.tasks.losses.click_loss`). Metrics are those of
    `recapp.metrics`; they compare with the labels as they are, whatever the loss is.

    Args:
        names: The metrics to measure; None measures AUC, log loss, normalised entropy and
            calibration.
        label: The label to predict; None takes the only label of the data.
        label_smoothing: The share of each label that the loss replaces by 1/2, below 1.
        pos_weight: The factor on the loss of clicks.
        focal: The exponent of the focal loss; None or 0 is the cross entropy.
        ranking: The share of a loss of pairs of a click and a non-click of the rank's batch.
        soft_labels: Whether labels may be any number from 0 to 1. A label y counts as y of a click
            and 1 - y of a non-click, in the loss and in metrics.

    Raises:
        ConfigError: A number is out of its range, or would do nothing.
    """

    known: tuple[Measure, ...] = (
        # between seeds, the AUC of one setting differs by up to .004
        Measure("auc", "AUC", "max", training="train_auc", shown=True),
        Measure("log_loss", "log loss", "min", training="train_loss", shown=True, defined=True),
        Measure("normalized_entropy", "normalised entropy", "min"),
        Measure("calibration", "calibration"),
        Measure("pr_auc", "PR-AUC", "max", on_request=True),
        Measure("lift", "lift in the top 10 %", "max", on_request=True),
        Measure("rmse", "RMSE", "min", on_request=True),
        Measure("mae", "MAE", "min", on_request=True),
    )
    best = "auc"
    storage_metric = "normalized_entropy"
    _loss_settings: Mapping[str, float] = {}  # of the cross entropy, for a subclass that sets none

    def __init__(
        self,
        names: Sequence[str] | None = None,
        label: str | None = None,
        label_smoothing: float = 0.0,
        pos_weight: float = 1.0,
        focal: float | None = None,
        ranking: float = 0.0,
        soft_labels: bool = False,
    ) -> None:
        exponent = 0.0 if focal is None else focal
        self._loss_settings = {
            "label_smoothing": label_smoothing,
            "pos_weight": pos_weight,
            "focal": exponent,
            "ranking": ranking,
        }
        for name, value in self._loss_settings.items():
            least, most, allowed = RANGES[name]
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not least <= value <= most:
                raise ConfigError(f"task.{name}={value}: must be {allowed}")
        for name in ("label_smoothing", "pos_weight", "focal"):
            value = self._loss_settings[name]
            if ranking == 1 and value != (1 if name == "pos_weight" else 0):
                raise ConfigError(
                    f"task.{name}={value}: does nothing with task.ranking={ranking}, the loss of "
                    f"pairs alone: leave task.{name} out, or choose task.ranking below 1"
                )
        plain = (label_smoothing, pos_weight, exponent, ranking) == (0, 1, 0, 0)
        if not plain:  # the loss of training is no log loss: they have no picture in common
            self.known = tuple(
                replace(one, training=None) if one.training == "train_loss" else one
                for one in self.known
            )
        super().__init__(names)
        self.outputs = (Output("logit", label, soft=soft_labels),)

    def loss(self, outputs: "Mapping[str, Tensor]", batch: "Batch") -> "Tensor":
        """Return the mean loss in nats, a scalar; 0 for an empty batch.

        Sample weights multiply the losses of single samples, and both sides of a pair.
        """
        from recapp.tasks.losses import click_loss

        (logits_B,) = outputs.values()
        (labels_B,) = self.labels(batch).values()
        weights_B = next(iter(self.weights(batch).values()), None)
        return click_loss(logits_B, labels_B, weights_B, **self._loss_settings)

    @override
    def make_metric(self, name: str, sync_on_compute: bool) -> "Metric":
        from recapp.metrics import click_metrics

        soft = self.outputs[0].soft
        return click_metrics([name], sync_on_compute, soft_labels=soft)[name]


# The metrics of clicks, also for runs that did not store the metrics of their task.
CLICK = Measures(ClickTask.known, ClickTask.best)


class RatingTask(Task):
    """Predict a number: a rating, a price, a time of watching.

    The model returns one number for each sample, and the loss is the mean squared error. The column
    `score` of a prediction is this number.

    Args:
        names: The metrics to measure; None measures all of them.
        label: The label to predict, any finite number; None takes the only label of the data.
    """

    known = (
        Measure("rmse", "RMSE", "min", shown=True, defined=True),
        Measure("mae", "MAE", "min", shown=True, defined=True),
    )
    best = "rmse"

    def __init__(self, names: Sequence[str] | None = None, label: str | None = None) -> None:
        super().__init__(names)
        self.outputs = (Output("rating", label, real=True, activation="identity"),)

    def loss(self, outputs: "Mapping[str, Tensor]", batch: "Batch") -> "Tensor":
        """Return the mean squared error, a scalar; 0 for an empty batch.

        Sample weights multiply the squares.
        """
        from recapp.tasks.losses import mean_squared_error

        (outputs_B,) = outputs.values()
        (labels_B,) = self.labels(batch).values()
        weights_B = next(iter(self.weights(batch).values()), None)
        return mean_squared_error(outputs_B, labels_B, weights_B)

    @override
    def make_metric(self, name: str, sync_on_compute: bool) -> "Metric":
        from recapp.metrics import MAE, RMSE

        return {"rmse": RMSE, "mae": MAE}[name](sync_on_compute=sync_on_compute)
