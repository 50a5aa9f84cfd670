"""Rating prediction: one label of any finite number, one number, squared error."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from recapp.tasks.measures import Measure
from recapp.tasks.task import Output, Task

if TYPE_CHECKING:
    from torch import Tensor
    from torchmetrics import Metric

    from recapp.sparse.keyed_jagged_tensor import Batch


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

        kind = {"rmse": RMSE, "mae": MAE}[name]
        return kind(sync_on_compute=sync_on_compute)
