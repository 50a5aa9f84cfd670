"""Metrics and details that the group `metrics` adds to those of a task.

    metric    one number, logged as val_NAME      gAUC, a metric of torchmetrics
    detail    plain values in details.json        metrics by slice, calibration by bucket, bootstrap

Shapes: B samples of a batch on this rank.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from recapp.errors import ConfigError
from recapp.sparse.batch import MISSING, Batch
from recapp.tasks.measures import Measure
from recapp.tasks.task import Output


class Detail(Metric):
    """A detail of validation: more than one number."""

    column = ""
    """The sparse column whose frequent values it needs to know before the first batch."""

    @abstractmethod
    def record(self) -> Any:
        """Return the plain values over the batches of all ranks, for a file. Each rank calls it."""


class Sample(NamedTuple):
    """What a metric may read of a batch.

    Args:
        output_B: The output of the model, float32 [B].
        score_B: The prediction: for clicks the probability, [B].
        label_B: The labels, [B].
        weight_B: The weights of the samples, [B]; None weighs each 1.
        batch: The batch.
    """

    output_B: Tensor
    score_B: Tensor
    label_B: Tensor
    weight_B: Tensor | None
    batch: Batch

    def ids(self, column: str) -> Tensor:
        """Return the id of each sample in a sparse column of single ids, int64 [B].

        Raises:
            ConfigError: A row has a list of ids.
        """
        jagged = self.batch.sparse[column]
        lengths_B = jagged.lengths()
        values = jagged.values().long()
        if len(values) == len(lengths_B) and bool((lengths_B == 1).all()):
            return values
        if bool((lengths_B > 1).any()):
            raise ConfigError(several_ids(column))
        ids_B = torch.full_like(lengths_B, MISSING, dtype=torch.int64)
        ids_B[lengths_B == 1] = values
        return ids_B


def several_ids(column: str) -> str:
    """Return the text of an error about a column of lists."""
    return f"metrics: the column {column} has a list of ids in a row: choose one of single ids"


@dataclass(frozen=True)
class Added:
    """A metric or a detail that is added to a task.

    Args:
        name: Its name.
        output: The output of the task that it reads.
        make: Makes it; takes `sync_on_compute`.
        update: Updates it with the samples of a batch.
        measure: The description of a metric; None is a detail.
    """

    name: str
    output: Output
    make: Callable[[bool], Metric]
    update: Callable[[Any, Sample], None]
    measure: Measure | None = None

    def feed(
        self,
        metric: Metric,
        outputs: Mapping[str, Tensor],
        labels: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        batch: Batch,
    ) -> None:
        """Update the metric with a batch.

        Args:
            metric: The result of `make`.
            outputs: The outputs of the model by name.
            labels: The labels by output.
            weights: The sample weights by output, where there are any.
            batch: The batch.
        """
        name = self.output.name
        output_B = outputs[name].detach().float()
        score_B = self.output.score(output_B)
        self.update(metric, Sample(output_B, score_B, labels[name], weights.get(name), batch))
