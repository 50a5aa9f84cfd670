"""Click prediction: one label of 0 or 1, one logit, binary cross entropy."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from recapp.tasks.measures import Measure, Measures
from recapp.tasks.task import Output, Task

if TYPE_CHECKING:
    from torch import Tensor
    from torchmetrics import Metric

    from recapp.sparse.batch import Batch


class ClickTask(Task):
    """Predict whether a row was clicked.

    The model returns the logit of a click for each sample. The loss is the binary cross entropy.
    Metrics are those of `recapp.metrics`.

    Args:
        names: The metrics to measure; None measures all of them.
        label: The label to predict; None takes the only label of the data.
    """

    known = (
        # between seeds, the AUC of one setting differs by up to .004
        Measure("auc", "AUC", "max", training="train_auc", shown=True, fall=0.005),
        Measure("log_loss", "log loss", "min", training="train_loss", shown=True, defined=True),
        Measure("normalized_entropy", "normalised entropy", "min"),
        Measure("calibration", "calibration"),
    )
    best = "auc"
    storage_metric = "normalized_entropy"

    def __init__(self, names: Sequence[str] | None = None, label: str | None = None) -> None:
        super().__init__(names)
        self.outputs = (Output("logit", label),)

    def loss(self, outputs: "Mapping[str, Tensor]", batch: "Batch") -> "Tensor":
        """Return the mean binary cross entropy in nats, a scalar; 0 for an empty batch.

        Sample weights multiply the entropies.
        """
        from torch.nn.functional import binary_cross_entropy_with_logits

        (logits_B,) = outputs.values()
        (labels_B,) = self.labels(batch).values()
        weights_B = next(iter(self.weights(batch).values()), None)
        loss = binary_cross_entropy_with_logits(logits_B, labels_B, weights_B, reduction="sum")
        return loss / max(batch.rows, 1)

    def make_metric(self, name: str, sync_on_compute: bool) -> "Metric":
        """Return a new metric of `recapp.metrics`."""
        from recapp.metrics import click_metrics

        return click_metrics([name], sync_on_compute)[name]


CLICK = Measures(ClickTask.known, ClickTask.best)
"""The metrics of clicks, also for runs that did not store the metrics of their task."""
