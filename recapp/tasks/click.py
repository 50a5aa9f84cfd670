"""Click prediction: one label of 0 or 1 (or between), one logit, binary cross entropy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from recapp.errors import ConfigError
from recapp.tasks.measures import Measure, Measures
from recapp.tasks.task import Output, Task

if TYPE_CHECKING:
    from torch import Tensor
    from torchmetrics import Metric

    from recapp.sparse.keyed_jagged_tensor import Batch

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
