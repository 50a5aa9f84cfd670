"""Helpers that notebooks about TorchRec import from a `utils` of their own: how long a forward
takes, and how much memory is held. They stand on what `python -m recapp.bench strategies` measures
with: rounds of steps, of which the slowest rank counts, and quartiles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recapp.benchmarks.forward import batch_times, forward_alone
from recapp.benchmarks.resident import peak_bytes, settled_bytes, tensor_bytes
from recapp.benchmarks.timing import interleave
from recapp.engine.shard_model import sharded_tables
from recapp.errors import ConfigError
from recapp.transport.communicator import Comm

NAME = "forward"


@dataclass(frozen=True)
class ForwardTimes:
    """What `TorchRecBenchmark.benchmark_forward` has measured."""

    batch_time_ms: float
    """The median of a forward, of the slowest rank each time, in milliseconds."""
    batch_time_ms_q1: float
    """The first quartile."""
    batch_time_ms_q3: float
    """The third quartile."""
    throughput: float
    """The samples that all ranks together compute in a second, at the median."""
    bytes_exchanged: int
    """The bytes that all ranks send each other for the tables in a forward."""


class TorchRecBenchmark:
    """Times models.

    Args:
        rounds: The number of rounds; a few forwards are run in each.
        round_seconds: The length of a round; it has two to forty forwards.

    Raises:
        ConfigError: One of them is not above 0.
    """

    def __init__(self, rounds: int = 7, round_seconds: float = 0.5) -> None:
        for name, value in (("rounds", rounds), ("round_seconds", round_seconds)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"TorchRecBenchmark: {name}={value}: give a number above 0")
        self.rounds = rounds
        self.round_seconds = round_seconds

    def benchmark_forward(self, model: nn.Module, batch: Any, batch_size: int) -> ForwardTimes:
        """Time the forward of a model, without gradients. Every rank of the model calls it.

        A rank begins each forward when all others are ready to, and the slowest one counts. The
        model is called as it is: say `model.eval()` before where that makes a difference.

        Args:
            model: A sharded model, or any other.
            batch: The argument of the model on this rank.
            batch_size: The samples of the batch.

        Raises:
            ConfigError: The model is none, the batch is missing or has another number of samples.
        """
        return self.compare_forwards({NAME: model}, batch, batch_size)[NAME]

    def compare_forwards(
        self, models: Mapping[str, nn.Module], batch: Any, batch_size: int
    ) -> dict[str, ForwardTimes]:
        """Time the forwards of several models in turn, round by round, so that a machine that is
        slower for a while is so for all of them. Every rank calls it, with the same names.

        Args:
            models: Sharded models of the same ranks, or any others, by name.
            batch: The argument of each model on this rank.
            batch_size: The samples of the batch.

        Raises:
            ConfigError: There is no model, or what is given for one is none; or the batch is
                missing, or has another number of samples.
        """
        if not isinstance(models, Mapping) or not models:
            raise ConfigError(f"compare_forwards: models={models}: give at least one, by its name")
        for name, model in models.items():
            if not isinstance(model, nn.Module):
                raise ConfigError(f"model {name} is a {type(model).__name__}: give a torch module")
        _check_samples(batch, batch_size)
        messages = {name: _messages_of(model) for name, model in models.items()}
        first = next(iter(messages.values()))
        ranks = Comm(first.group, first.device)
        contenders = {
            name: forward_alone(model, [batch], ranks, messages[name])
            for name, model in models.items()
        }
        measured = interleave(contenders, ranks, rounds=self.rounds, seconds=self.round_seconds)
        return {
            name: ForwardTimes(
                **batch_times(measured[name], batch_size, ranks.world),
                bytes_exchanged=contender.bytes_exchanged(),
            )
            for name, contender in contenders.items()
        }


def _check_samples(batch: Any, batch_size: int) -> None:
    """Check that a batch of bags has as many samples as is said."""
    if batch is None or isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise ConfigError(
            f"batch={type(batch).__name__}, batch_size={batch_size!r}: give what the model is "
            "called with, and the number of its samples"
        )
    stride = getattr(batch, "stride", None)
    samples = stride() if callable(stride) and not isinstance(batch, torch.Tensor) else batch_size
    if samples != batch_size:
        raise ConfigError(
            f"batch_size={batch_size}, but the batch has {samples} samples: "
            "it has a length for each of its keys and samples"
        )


def _messages_of(model: nn.Module) -> Comm:
    """Return the ranks through the transport of a model's tables."""
    tables = sharded_tables(model)
    return tables[0].comm if tables else Comm()


class TorchRecDebugger:
    """Counts the bytes that this rank holds.

    Args:
        device: The device whose memory counts; None: the GPU if this process has used one, else
            the CPU.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = None if device is None else torch.device(device)

    def memory_status(self) -> dict[str, int]:
        """Return bytes of this rank.

        Returns:
            `allocated`: what its tensors hold: tables, optimiser state, buffers, the dense part
            and everything else that is still referred to (on the CPU nothing that a rank of
            `run_ranks` has inherited); `reserved`: what it has taken for that, on a GPU torch's
            memory, on the CPU the resident memory of the process, interpreter and libraries
            included; `peak`: the most at once, on a GPU of `allocated`, on the CPU of `reserved`.
        """
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = self.device or torch.device("cuda" if used else "cpu")
        if device.type == "cuda":
            return {
                "allocated": torch.cuda.memory_allocated(device),
                "reserved": torch.cuda.memory_reserved(device),
                "peak": torch.cuda.max_memory_allocated(device),
            }
        return {"allocated": tensor_bytes(), "reserved": settled_bytes(), "peak": peak_bytes()}
