"""`step` and `strategies`: the embedding step on several ranks (exchange, lookup, backward, and the
update by row-wise Adagrad), without a model around the tables; and the forward of a model alone.

`step` compares plans on a workload: all of them are timed in the same rounds (`best_plan_ratio`:
the fastest plan's time over this plan's). Bags are summed, looked up as sequences, or concatenated.

`strategies` compares sharding strategies on tables that the settings list. Every strategy shards
the same tables, looks up the same ids and takes the same gradient. Forward is timed alone and
together with backward, which includes the update. Memory is the growth of a rank's process: with
its tables and buffers, and at its peak during steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recapp.benchmarks.session import Session, listed, rule
from recapp.benchmarks.timing import Measured, Steps, compared, in_turn, spread
from recapp.benchmarks.workloads import WORKLOADS, Workload
from recapp.engine.sharded_collection import ShardedCollection, shard_model
from recapp.engine.state import EngineObserver
from recapp.processes.process_memory import (
    forget_peak_resident,
    peak_resident_bytes,
    settled_bytes,
)
from recapp.reporting.phases import PhaseClock
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.jagged_tensor import KeyedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingConfig, PoolingType
from recapp.tables.table_settings import listed_tables
from recapp.transport.communicator import Comm

PHASE_STEPS = 20
MEMORY_STEPS = 3


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


class EmbeddingStep(StepOnRanks):
    """The embedding step of recapp, as a contender: requests, lookup, backward, update.

    Args:
        collection: The sharded tables.
        batches: The batches of this rank, which steps take in turn.
        comm: The ranks, which meet at a barrier before each step.
    """

    def __init__(
        self,
        collection: ShardedCollection,
        batches: list[KeyedJaggedTensor],
        comm: Comm,
    ) -> None:
        super().__init__(in_turn(self._train, batches), comm, collection.shared.comm)
        self.collection = collection
        self.batches = batches
        with torch.no_grad():
            self.gradients = [torch.randn(v.shape) for v in self._vectors(batches[0])]

    def _train(self, batch: KeyedJaggedTensor) -> None:
        """Look up a batch and run its backward, which updates the tables."""
        torch.autograd.backward(self._vectors(batch), self.gradients)

    def _vectors(self, batch: KeyedJaggedTensor) -> list[Tensor]:
        """Return the vectors of all bags, or the vectors of each sequence."""
        output = self.collection(batch)
        if isinstance(output, KeyedTensor):
            return [output.values()]
        return [sequence.values() for sequence in output.values()]

    def phases(self) -> dict[str, float]:
        """Run some steps, and return the milliseconds of each part as `phase_<name>_ms`, means of
        steps and of ranks. Every rank calls this method.

        `rest` begins at the end of the last part that the collection marks.
        """
        clock = PhaseClock()
        state = self.collection.shared.state
        observer = state.observer
        state.observer = EngineObserver(ends=clock)
        for _ in range(PHASE_STEPS):
            self.comm.barrier()
            clock.start()
            self.step()
            clock.end("rest")
        state.observer = observer
        of_ranks = self.comm.all_gather(clock.means())
        return {
            f"phase_{name}_ms": sum(ms[name] for ms in of_ranks) / len(of_ranks)
            for name in of_ranks[0]
        }

    def memory(self, before: int) -> dict[str, float]:
        """Run some steps, and return the GB that tables and buffers hold afterwards, and the peak
        of the steps, each on the rank with the most. Every rank calls this method.

        Args:
            before: The resident bytes of this process before it made the tables.
        """
        forget_peak_resident()
        self.run(MEMORY_STEPS)
        peak = peak_resident_bytes() or 0
        of_ranks = self.comm.all_gather((settled_bytes() - before, peak - before))
        return {
            "memory_gb": max(now for now, _ in of_ranks) / 1e9,
            "memory_peak_gb": max(peak for _, peak in of_ranks) / 1e9,
        }


def shard_workload(
    workload: Workload, plan: ShardingPlan, comm: Comm, backend: str
) -> ShardedCollection:
    """Return the sharded collection for a workload. Every rank calls this function."""
    tables = workload.tables()
    meta = torch.device("meta")
    collection = (
        EmbeddingCollection(tables, meta)
        if workload.pooling is PoolingType.NONE
        else EmbeddingBagCollection(tables, device=meta, lookups=workload.lookups())
    )
    sharded = shard_model(collection, plan, comm, rule(), backend)
    assert isinstance(sharded, ShardedCollection)
    return sharded


def measure_step(session: Session) -> None:
    """Measure every workload under every plan."""
    for name in listed(session.settings.workload):
        _measure(session, WORKLOADS[name])


def _measure(session: Session, workload: Workload) -> None:
    comm = session.transport(session.settings.transport)
    batches = workload.batches(comm.rank)
    plans = {
        name: session.plan(name, workload.tables(), batches, workload.lookups())
        for name in session.rules
    }
    backend = session.settings.backend
    steps = {
        name: EmbeddingStep(shard_workload(workload, plan, comm, backend), batches, session.comm)
        for name, plan in plans.items()
    }
    measured = session.measure(workload.name, steps)
    fastest = min(measured.values(), key=lambda each: each.median())
    for name, step in steps.items():
        session.add(
            {
                "workload": workload.name,
                "plan": name,
                "transport": comm.transport,
                **compared(measured[name], {"best_plan": fastest}),
                "pooled_tables": sum(s.mode == "pooled" for s in plans[name].tables.values()),
                "bytes_exchanged": step.bytes_exchanged(),
                **step.phases(),
            }
        )


def workload_of(tables: Sequence[EmbeddingConfig]) -> Workload:
    """Return tables as a workload of one sample and one id a bag, with a feature for each table."""
    rows_F = tuple(t.num_embeddings for t in tables)
    dim_F = tuple(t.embedding_dim for t in tables)
    return Workload("listed", 1, rows_F, dim_F, (1,) * len(tables))


def measure_strategies(session: Session) -> None:
    """Measure every strategy with every batch size and every kind of ids."""
    comm = session.transport(session.settings.transport)
    settings = session.settings
    tables = listed_tables(settings.tables).tables
    whole = workload_of(tables)
    tables = [
        replace(t, feature_names=[feature])
        for t, feature in zip(tables, whole.features, strict=True)
    ]
    workloads = [
        whole.of_shape(batch_size, settings.bag, ids)
        for ids in listed(settings.ids)
        for batch_size in listed(settings.batch_size)
    ]
    batches = {w.name: w.batches(comm.rank) for w in workloads}
    largest = max(workloads, key=lambda w: w.batch_size).name
    steps: dict[str, dict[str, EmbeddingStep]] = {w.name: {} for w in workloads}
    memory: dict[tuple[str, str], dict[str, float]] = {}
    for name in session.rules:
        before = settled_bytes()
        collection = session.shard(tables, session.plan(name, tables, batches[largest]), comm)
        for w in workloads:
            step = EmbeddingStep(collection, batches[w.name], session.comm)
            steps[w.name][name] = step
            memory[w.name, name] = step.memory(before)
    for w in workloads:
        _compare_strategies(session, w, steps[w.name], memory)


def _compare_strategies(
    session: Session,
    workload: Workload,
    both: dict[str, EmbeddingStep],
    memory: dict[tuple[str, str], dict[str, float]],
) -> None:
    """Time forward alone and whole steps of all strategies, and add their records."""
    forward = {
        name: forward_alone(step.collection, step.batches, step.comm, step.messages)
        for name, step in both.items()
    }
    for kind, contenders in (("forward", forward), ("forward+backward", both)):
        measured = session.measure(f"{kind}, batch {workload.batch_size}", contenders)
        for name, contender in contenders.items():
            session.add(
                {
                    "strategy": name,
                    "ids": "zipf" if workload.zipf else "uniform",
                    "batch_size": workload.batch_size,
                    "step": kind,
                    **batch_times(measured[name], workload.batch_size, session.comm.world),
                    **memory[workload.name, name],
                    "bytes_exchanged": contender.bytes_exchanged(),
                    "transport": contender.messages.transport,
                    "ranks": session.comm.world,
                    "rounds": session.settings.rounds,
                }
            )
