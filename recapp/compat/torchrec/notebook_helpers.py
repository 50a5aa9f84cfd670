"""Helpers that notebooks about TorchRec import from their own `utils`: they measure the time of a
forward and the memory in use, and draw pictures of plans and measurements. They measure as
`python -m recapp.bench strategies` does: in rounds of steps, with the time of the slowest rank, and
they report quartiles.
"""

import gc
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recapp.benchmarks.steps import batch_times, forward_alone
from recapp.benchmarks.timing import interleave
from recapp.console import size
from recapp.engine.sharded_collection import sharded_tables
from recapp.errors import ConfigError
from recapp.optim.rules import rowwise_adagrad
from recapp.planner.problem import PlanningProblem, Topology
from recapp.processes.process_memory import peak_resident_bytes, settled_bytes
from recapp.reporting.drawing import (
    Picture,
    bars_with_whiskers,
    byte_axis,
    horizontal_bars,
    spec_of,
)
from recapp.reporting.plan_report import explained
from recapp.reporting.plan_views import ranks_picture, tables_picture
from recapp.reporting.run_record import PlanReport
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.collections import embedding_lookups, embedding_tables
from recapp.transport.communicator import Comm

NAME = "forward"
TIME = "batch_time_ms"
QUARTILES = (f"{TIME}_q1", f"{TIME}_q3")
MEMORY = "memory_gb"


@dataclass(frozen=True)
class ForwardTimes:
    """The measurements of `TorchRecBenchmark.benchmark_forward`.

    Args:
        batch_time_ms: The median time of a forward on its slowest rank, in milliseconds.
        batch_time_ms_q1: The first quartile.
        batch_time_ms_q3: The third quartile.
        throughput: The samples that all ranks together compute in a second, at the median time.
        bytes_exchanged: The bytes that all ranks send each other for the tables in a forward.
    """

    batch_time_ms: float
    batch_time_ms_q1: float
    batch_time_ms_q3: float
    throughput: float
    bytes_exchanged: int


class TorchRecBenchmark:
    """Times the forwards of models.

    Args:
        rounds: The number of rounds.
        round_seconds: The length of a round in seconds; a round has two to forty forwards.

    Raises:
        ConfigError: `rounds` or `round_seconds` is not above 0.
    """

    def __init__(self, rounds: int = 7, round_seconds: float = 0.5) -> None:
        for name, value in (("rounds", rounds), ("round_seconds", round_seconds)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"TorchRecBenchmark: {name}={value}: give a number above 0")
        self.rounds = rounds
        self.round_seconds = round_seconds

    def benchmark_forward(self, model: nn.Module, batch: Any, batch_size: int) -> ForwardTimes:
        """Time the forward of a model, without gradients. Every rank of the model calls this.

        The ranks begin each forward together, and the time is that of the slowest rank. The mode of
        the model stays as it is: call `model.eval()` first for a model with layers such as dropout.

        Args:
            model: A sharded model, or any other module.
            batch: The argument of the model on this rank.
            batch_size: The number of samples in the batch.

        Raises:
            ConfigError: The model is no torch module, or the batch is missing or has another number
                of samples.
        """
        return self.compare_forwards({NAME: model}, batch, batch_size)[NAME]

    def compare_forwards(
        self, models: Mapping[str, nn.Module], batch: Any, batch_size: int
    ) -> dict[str, ForwardTimes]:
        """Time the forwards of several models in turn, round by round, so that a slow phase of the
        machine slows all of them. Every rank calls this with the same names.

        Args:
            models: Sharded models of the same ranks, or any other modules, by name.
            batch: The argument of each model on this rank.
            batch_size: The number of samples in the batch.

        Raises:
            ConfigError: `models` is empty or holds an object that is no torch module, or the batch
                is missing or has another number of samples.
        """
        if not isinstance(models, Mapping) or not models:
            raise ConfigError(f"compare_forwards: models={models}: give at least one, by its name")
        for name, model in models.items():
            if not isinstance(model, nn.Module):
                raise ConfigError(f"model {name} is a {type(model).__name__}: give a torch module")
        _check_samples(batch, batch_size)
        tables = {name: sharded_tables(model) for name, model in models.items()}
        messages = {
            name: collections[0].comm if collections else Comm()
            for name, collections in tables.items()
        }
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
    if batch is None or isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise ConfigError(
            f"batch={type(batch).__name__}, batch_size={batch_size!r}: give the argument of the "
            "model, and its number of samples"
        )
    stride = getattr(batch, "stride", None)
    samples = stride() if callable(stride) and not isinstance(batch, torch.Tensor) else batch_size
    if samples != batch_size:
        raise ConfigError(
            f"batch_size={batch_size}, but the batch has {samples} samples: give the number of "
            "samples of the batch"
        )


def _tensor_bytes() -> int:
    """Return the bytes of memory behind all CPU tensors that this process still refers to.

    Tensors that share memory count once. Tensors that only autograd keeps do not count. Nor do
    tensors that a fork inherits, if its garbage collector was frozen, as in ranks.
    """
    gc.collect()  # a deleted model may still be kept by a cycle of references
    memories = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            with suppress(RuntimeError):  # a tensor without memory of its own
                memory = each.untyped_storage()
                if memory.device.type == "cpu":  # that of a compiler's tensors is not
                    memories[memory.data_ptr()] = memory.nbytes()
    return sum(memories.values())


class TorchRecDebugger:
    """Counts the bytes of memory that this rank uses.

    Args:
        device: The device whose memory to count; None takes the GPU if this process has used one,
            else the CPU.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = None if device is None else torch.device(device)

    def memory_status(self) -> dict[str, int]:
        """Return the memory of this rank in bytes.

        Returns:
            `allocated`: the bytes of all live tensors: tables, optimiser state, buffers, the dense
            part and the rest. On the CPU, tensors that a rank of `run_ranks` inherited do not
            count. `reserved`: on a GPU the bytes that torch's allocator has reserved, on the CPU
            the resident memory of the process with interpreter and libraries. `peak`: the largest
            value so far, on a GPU of `allocated`, on the CPU of `reserved`.
        """
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = self.device or torch.device("cuda" if used else "cpu")
        if device.type == "cuda":
            return {
                "allocated": torch.cuda.memory_allocated(device),
                "reserved": torch.cuda.memory_reserved(device),
                "peak": torch.cuda.max_memory_allocated(device),
            }
        return {
            "allocated": _tensor_bytes(),
            "reserved": settled_bytes(),
            "peak": peak_resident_bytes() or 0,
        }


BATCH_SIZE = 1024  # samples on a rank


class TorchRecVisualizer:
    """Draws pictures; a notebook shows them, and `picture.write(folder, "svg")` saves them.

    Args:
        compute_device: "cpu" or "cuda", for predicted times.
    """

    def __init__(self, compute_device: str = "cpu") -> None:
        self.compute_device = compute_device

    def plot_plan(self, plan: ShardingPlan, module: nn.Module) -> Picture:
        """Draw the tables as rectangles, with the shards in the colours of their ranks.

        Args:
            plan: The plan.
            module: The model.

        Raises:
            PlanError: The plan is for other tables.
        """
        return tables_picture(self._explained(plan, module))

    def plot_ranks(
        self, plan: ShardingPlan, module: nn.Module, batch_size: int = BATCH_SIZE
    ) -> Picture:
        """Draw the bytes of each rank and the time of a training step as the planner predicts it,
        with row-wise Adagrad.

        Args:
            plan: The plan.
            module: The model.
            batch_size: The number of samples on a rank.

        Raises:
            PlanError: The plan is for other tables.
        """
        return ranks_picture(self._explained(plan, module, batch_size))

    def plot_latency(self, results: Mapping[str, Mapping[str, float]]) -> Picture:
        """Draw `batch_time_ms` of each strategy.

        Args:
            results: The measurements by the name of a strategy. The picture uses entries that
                `vars()` of a result of `TorchRecBenchmark` has.

        Raises:
            ConfigError: A strategy lacks the entry.
        """
        times = _entries(results, TIME)
        spec = spec_of(times)
        labels = [
            f"{ms:{spec}} ms" + (f", {r['throughput']:,.0f} samples/s" if "throughput" in r else "")
            for ms, r in zip(times, results.values(), strict=True)
        ]
        known = all(key in result for result in results.values() for key in QUARTILES)
        whiskers = [(r[QUARTILES[0]], r[QUARTILES[1]]) for r in results.values() if known]
        with horizontal_bars(list(results), labels) as s:
            bars_with_whiskers(s, times, whiskers)
            s.axes[0].set(xlabel="ms a batch (median)", xlim=(0, None))
            half = "; between the ends of a whisker lies the middle half" if known else ""
            alt = f"Bars: {_listed(results, labels)}."
            title = "Latency by sharding strategy"
            return s.finish("strategy_latency", title, alt, f"Shorter is better{half}.")

    def plot_memory(self, results: Mapping[str, Mapping[str, float]]) -> Picture:
        """Draw `memory_gb` of each strategy.

        Args:
            results: The measurements by the name of a strategy.

        Raises:
            ConfigError: A strategy lacks the entry.
        """
        values = [gb * 1e9 for gb in _entries(results, MEMORY)]
        labels = [size(n) for n in values]
        with horizontal_bars(list(results), labels) as s:
            bars_with_whiskers(s, values)
            s.axes[0].set(xlabel="bytes", xlim=(0, max(values) * 1.04 or 1))
            byte_axis(s.axes[0].xaxis)
            alt = f"Bars: {_listed(results, labels)}."
            caption = "What a rank holds, or the rank with most where that was taken."
            return s.finish("strategy_memory", "Memory by sharding strategy", alt, caption)

    def _explained(
        self, plan: ShardingPlan, module: nn.Module, batch_size: int = BATCH_SIZE
    ) -> PlanReport:
        tables = embedding_tables(module)
        plan.check(tables)
        problem = PlanningProblem(
            tables,
            Topology(plan.world_size, compute_device=self.compute_device),
            batch_size,
            rowwise_adagrad(),
            lookups=embedding_lookups(module),
        )
        return explained(plan, problem, alternatives=False)


def _entries(results: Mapping[str, Mapping[str, float]], key: str) -> list[float]:
    if not results:
        raise ConfigError("results={}: give the measured results by strategy")
    for name, result in results.items():
        if key not in result:
            raise ConfigError(
                f"results[{name!r}] has no {key}: it has {', '.join(sorted(result)) or 'nothing'}"
            )
    return [float(result[key]) for result in results.values()]


def _listed(results: Mapping[str, Mapping[str, float]], labels: Sequence[str]) -> str:
    return "; ".join(f"{name} {text}" for name, text in zip(results, labels, strict=True))
