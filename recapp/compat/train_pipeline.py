"""TorchRec's train pipelines on recapp's look-ahead: while one batch computes, the pipeline copies
the next batch to the device and exchanges its ids.

    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    while True:
        try:
            output = pipeline.progress(batches)
        except StopIteration:
            break

Under Lightning `engine.look_ahead` does the same. recapp does not trace the model: it exchanges the
ids of the next batch for every collection. A collection that the model calls with other ids gets no
look-ahead (`recapp/trainer/lookahead.py`).
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recapp.engine.sharded_collection import sharded_tables
from recapp.trainer.lookahead import LookAhead

In = TypeVar("In")
Out = TypeVar("Out")


class TrainPipelineBase(Generic[In, Out]):
    """Trains a model batch by batch. Type parameters may name the types of batch and output:
    `TrainPipelineBase[Batch, Tensor]`.

    Args:
        model: A model that returns (losses, output) for a batch.
        optimizer: The optimiser of the dense parameters; backward updates the tables.
        device: The device of the batches.
        custom_model_fwd: A function of a batch that the pipeline calls instead of the model.
    """

    depth = 0
    """The number of batches to look ahead."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        *,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = torch.device(device)
        self._forward = custom_model_fwd or model
        self._source: Iterator[In] | None = None
        self._batches: Iterator[In] = iter(())

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on the next batch and return the model's output; in eval mode only run the forward.

        Args:
            dataloader_iter: Batches with a method `to(device, non_blocking)`; the same number of
                batches on every rank.

        Raises:
            StopIteration: The iterator has no further batch.
        """
        if self._source is not dataloader_iter:
            self._source = dataloader_iter
            self._batches = self._read(dataloader_iter)
        batch = next(self._batches)
        if not self.model.training:
            seen: Out = self._forward(batch)[1]
            return seen
        self.optimizer.zero_grad()
        output: Out
        losses, output = self._forward(batch)
        torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return output

    def _read(self, batches: Iterator[In]) -> Iterator[In]:
        """Return an iterator of the batches on the device."""
        if not self.depth:
            return map(self._moved, batches)
        tables = sharded_tables(self.model)
        side = tables[0].comm.side if tables else None
        ahead = LookAhead(batches, self.depth, lambda: tables, self._moved, side)
        return iter(ahead)

    def _moved(self, batch: Any) -> Any:
        return batch.to(self.device, non_blocking=True)


class TrainPipelineSparseDist(TrainPipelineBase[In, Out]):
    """A pipeline that exchanges the ids of the next batch while a batch computes. The arguments are
    those of `TrainPipelineBase`.
    """

    depth = 1
