"""`step` and `strategies`: the embedding step on several ranks (exchange, lookup, backward, and the
update by row-wise Adagrad), without a model around the tables; and steps that all ranks begin
together, with the bytes of their messages, such as a model's forward alone.

`step` compares plans and transports, and recapp with TorchRec. All plans and transports of recapp
are timed in the same rounds first, so that they compare with each other (`best_plan_ratio`: the
fastest plan's time over this plan's). Then recapp and TorchRec are timed under the same plan, one
plan after the other. Bags are summed, looked up as sequences, or concatenated. TorchRec has no
concatenation: its `EmbeddingCollection` gives the same vectors, one after the other.

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

from recapp.benchmarks.resident import peak_bytes, settled_bytes
from recapp.benchmarks.session import Session, rule
from recapp.benchmarks.timing import Measured, Steps, beside, compared, in_turn, ratio, spread
from recapp.benchmarks.workloads import WORKLOADS, Workload
from recapp.engine.sharded_collection import ShardedCollection, shard_model
from recapp.engine.state import EngineObserver
from recapp.processes.process_memory import forget_peak_resident
from recapp.reporting.phases import PhaseClock
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import EmbeddingConfig, PoolingType
from recapp.tables.unsharded_collection import EmbeddingBagCollection, EmbeddingCollection
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


PHASE_STEPS = 20

Key = tuple[str, str]
"""The names of a plan and of a transport."""


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
        found = self.collection(batch)
        if isinstance(found, KeyedTensor):
            return [found.values()]
        return [sequence.values() for sequence in found.values()]

    def phases(self) -> dict[str, float]:
        """Run some steps, and return the mean milliseconds of each part on this rank.

        `rest` begins at the end of the last part that the collection marks.
        """
        clock = PhaseClock()
        state = self.collection.shared.state
        own_observer = state.observer
        state.observer = EngineObserver(ends=clock)
        for _ in range(PHASE_STEPS):
            self.comm.barrier()
            clock.start()
            self.step()
            clock.end("rest")
        state.observer = own_observer
        return clock.means()


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


def run(session: Session) -> None:
    """Measure workloads under plans through transports, or strategies, as the verb says."""
    comms = session.open_transports()
    if session.settings.verb == "strategies":
        _measure_strategies(session, *comms.values())
        return
    for name in session.settings.workload:
        _measure(session, WORKLOADS[name], comms)


def _measure(session: Session, workload: Workload, comms: dict[str, Comm]) -> None:
    batches = session.batches(workload)
    plans = {
        name: session.plan(name, workload.tables(), batches, workload.lookups())
        for name in session.settings.plans
    }
    backend = session.settings.backend
    steps = {
        (name, transport): EmbeddingStep(
            shard_workload(workload, plan, comm, backend), batches, session.comm
        )
        for name, plan in plans.items()
        for transport, comm in comms.items()
    }
    all_plans: dict[Key, Measured] = {}
    if len(steps) > 1:
        by_label = session.measure(
            f"{workload.name}, all plans", {"/".join(key): step for key, step in steps.items()}
        )
        all_plans = {key: by_label["/".join(key)] for key in steps}
    for name, plan in plans.items():
        own = {transport: steps[name, transport] for transport in comms}
        measured = {transport: all_plans[name, transport] for transport in comms if all_plans}
        specs = session.specs("step", workload, plan)
        with session.rivals("torchrec", specs) as others:
            if others or not all_plans:  # both under one plan, in the same rounds
                measured = session.measure(f"{workload.name}, {name}", {**own, **others})
        for transport, step in own.items():
            session.add(
                {
                    "workload": workload.name,
                    "plan": name,
                    "transport": transport,
                    **compared(measured[transport], beside("torchrec", measured)),
                    **_against_plans((name, transport), all_plans),
                    "pooled_tables": sum(s.mode == "pooled" for s in plan.tables.values()),
                    "bytes_exchanged": step.bytes_exchanged(),
                    **_phases(step),
                }
            )


def _against_plans(key: Key, all_plans: dict[Key, Measured]) -> dict[str, Any]:
    """Return the ratio of the fastest plan's time to this plan's, through the same transport."""
    comparable = [m for (_, transport), m in all_plans.items() if transport == key[1]]
    if len(comparable) < 2:
        return ratio("best_plan", None, Measured())
    return ratio("best_plan", min(comparable, key=lambda m: m.median()), all_plans[key])


def _phases(step: EmbeddingStep) -> dict[str, float]:
    """Return the parts of a step as `phase_<name>_ms`, means of all ranks, and their sum as
    `phases_ms`.
    """
    of_ranks = step.comm.all_gather(step.phases())
    phases = {
        f"phase_{name}_ms": sum(ms[name] for ms in of_ranks) / len(of_ranks) for name in of_ranks[0]
    }
    return phases | {"phases_ms": sum(phases.values())}


MEMORY_STEPS = 3


def workload_of(tables: Sequence[EmbeddingConfig]) -> Workload:
    """Return tables as a workload of one sample and one id a bag, with a feature for each table."""
    rows_F = tuple(t.num_embeddings for t in tables)
    dim_F = tuple(t.embedding_dim for t in tables)
    return Workload("listed", 1, rows_F, dim_F, (1,) * len(tables))


def _measure_strategies(session: Session, comm: Comm) -> None:
    """Measure every strategy with every batch size and every kind of ids."""
    settings = session.settings
    made = session.listed_tables()
    listed = workload_of(made)
    tables = [
        replace(t, feature_names=[feature])
        for t, feature in zip(made, listed.features, strict=True)
    ]
    workloads = [
        listed.of_shape(batch_size, settings.bag, ids)
        for ids in settings.ids
        for batch_size in settings.batch_size
    ]
    batches = {w.name: session.batches(w) for w in workloads}
    largest = max(workloads, key=lambda w: w.batch_size).name
    steps: dict[str, dict[str, EmbeddingStep]] = {w.name: {} for w in workloads}
    memory: dict[tuple[str, str], dict[str, float]] = {}
    for name in settings.plans:
        session.print_note(f"{name}: tables are made")
        before = settled_bytes()
        plan = session.plan(name, tables, batches[largest])
        collection = session.shard(tables, plan, comm)
        for w in workloads:
            step = EmbeddingStep(collection, batches[w.name], session.comm)
            steps[w.name][name] = step
            memory[w.name, name] = _memory(step, before, session.comm)
    for w in workloads:
        both = steps[w.name]
        forward = {
            name: forward_alone(step.collection, step.batches, step.comm, comm)
            for name, step in both.items()
        }
        for kind, contenders in (("forward", forward), ("forward+backward", both)):
            measured = session.measure(f"{kind}, batch {w.batch_size}", contenders)
            for name, contender in contenders.items():
                session.add(
                    {
                        "strategy": name,
                        "ids": "zipf" if w.zipf else "uniform",
                        "batch_size": w.batch_size,
                        "step": kind,
                        **batch_times(measured[name], w.batch_size, comm.world),
                        **memory[w.name, name],
                        "bytes_exchanged": contender.bytes_exchanged(),
                        "transport": comm.transport,
                        "ranks": comm.world,
                        "rounds": len(measured[name].rounds["step"]),
                    }
                )


def _memory(step: EmbeddingStep, before: int, comm: Comm) -> dict[str, float]:
    """Run some steps, and return the GB that tables and buffers hold afterwards, and the peak of
    the steps, each on the rank with the most.

    Args:
        step: The step to run.
        before: The resident bytes of this process before it made the tables.
        comm: The ranks.
    """
    forget_peak_resident()
    step.run(MEMORY_STEPS)
    of_ranks = comm.all_gather((settled_bytes() - before, peak_bytes() - before))
    return {
        "memory_gb": max(now for now, _ in of_ranks) / 1e9,
        "memory_peak_gb": max(peak for _, peak in of_ranks) / 1e9,
    }
