"""A model's forward alone as what is timed in rounds, as evaluation runs it: without gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recapp.benchmarks.timing import Measured, Times, spread, time_steps
from recapp.transport.communicator import Comm


class ForwardAlone:
    """A contender that runs the forward of a model.

    Args:
        model: What is called with a batch.
        batches: The batches of this rank, which forwards take in turn.
        comm: The ranks, which meet at a barrier before each forward.
        messages: The ranks through the transport of the model's tables, which counts bytes.
    """

    def __init__(
        self, model: Callable[[Any], Any], batches: Sequence[Any], comm: Comm, messages: Comm
    ) -> None:
        self._model = model
        self._batches = batches
        self._comm = comm
        self._messages = messages
        self.number = 0

    def run(self, steps: int) -> Times:
        """Time so many forwards."""
        return time_steps([("step", self.forward)], steps, self._comm.barrier)

    @torch.no_grad()
    def forward(self) -> None:
        """Call the model with the next batch, and wait for its device."""
        self._model(self._batches[self.number % len(self._batches)])
        if self._messages.device.type == "cuda":
            torch.cuda.synchronize(self._messages.device)
        self.number += 1

    def bytes_exchanged(self) -> int:
        """Run a forward and return the bytes that all ranks send in it. Every rank calls it."""
        before = self._messages.bytes_sent
        self.forward()
        return int(sum(self._comm.all_gather(self._messages.bytes_sent - before)))


def batch_times(measured: Measured, batch_size: int, ranks: int) -> dict[str, float]:
    """Return the time of a batch, median and quartiles in ms, and the samples that all ranks
    together compute in a second.

    Args:
        measured: The times of a contender.
        batch_size: The samples of a rank.
        ranks: The number of ranks.
    """
    median, first, third = spread(measured).values()
    return {
        "batch_time_ms": median,
        "batch_time_ms_q1": first,
        "batch_time_ms_q3": third,
        "throughput": batch_size * ranks / median * 1e3,
    }
