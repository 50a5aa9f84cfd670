"""Steps that all ranks begin together, with the bytes of their messages; and a model's forward
alone, as evaluation runs it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recapp.benchmarks.timing import Measured, Steps, in_turn, spread
from recapp.transport.communicator import Comm


class StepOnRanks(Steps):
    """A contender whose steps all ranks begin together.

    Args:
        work: The function that runs a step; it gets the number of the step.
        comm: The ranks, which meet at a barrier before each step.
        messages: The Comm of the tables, which counts the bytes of messages.
    """

    def __init__(self, work: Callable[[int], object], comm: Comm, messages: Comm) -> None:
        super().__init__({"step": work}, comm.barrier)
        self.comm = comm
        self.messages = messages

    def step(self) -> None:
        """Run the next step, untimed."""
        self.parts["step"](self.number)
        self.number += 1

    def bytes_exchanged(self) -> int:
        """Run a step, and return the bytes that all ranks send in the step. Every rank calls this
        method.
        """
        before = self.messages.bytes_sent
        self.step()
        return int(sum(self.comm.all_gather(self.messages.bytes_sent - before)))


def forward_alone(
    model: Callable[[Any], Any], batches: Sequence[Any], comm: Comm, messages: Comm
) -> StepOnRanks:
    """Return a contender that runs the forward of a model, without gradients.

    Args:
        model: The model, which takes a batch.
        batches: The batches of this rank, which steps take in turn.
        comm: The ranks.
        messages: The Comm of the model's tables.
    """

    @torch.no_grad()
    def forward(batch: Any) -> None:
        model(batch)
        if messages.device.type == "cuda":
            torch.cuda.synchronize(messages.device)

    return StepOnRanks(in_turn(forward, batches), comm, messages)


def batch_times(measured: Measured, batch_size: int, ranks: int) -> dict[str, float]:
    """Return the time of a batch, median and quartiles in ms, and the samples per second of all
    ranks together.

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
