"""`step` and `strategies`: the embedding step on several ranks (exchange, lookup, backward, and the
update by row-wise Adagrad), without a model around the tables; and the forward of a model alone.

`step` compares plans on a workload: all of them are timed in the same rounds (`best_plan_ratio`:
the fastest plan's time over this plan's). Bags are summed, looked up as sequences, or concatenated.

`strategies` compares sharding strategies on tables that the settings list. Every strategy shards
the same tables, looks up the same ids and takes the same gradient. Forward is timed alone and
together with backward, which includes the update. Memory is the growth of a rank's process: with
its tables and buffers, and at its peak during steps.

`train` compares plans by whole training steps of DLRMs on several ranks, and with `compile=true`
the dense part under torch.compile, in the same rounds. A step is forward, loss, backward (which
updates tables, while DDP reduces dense gradients) and Adam for the dense part, on batches in
memory. On GPUs each plan runs twice: on batches that are on the GPU, and on batches that come from
the host one step ahead.

`data` measures how fast Parquet becomes batches, stage by stage, and how much reading slows
training:

    parquet    decompressed into Arrow's columns
    decoded    + ids, numbers and labels as arrays, checked and transformed
    batches    + shuffled, cut into batches, as a rank gets them

Each stage includes the one before it. Rates are for one process. Then DLRMs train on the same
stream and, in the same rounds, on batches of it that are held in memory; a round counts as the mean
of its steps.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from recapp.benchmarks.session import Session, listed, rule
from recapp.benchmarks.timing import Measured, Steps, compared, in_turn, spread
from recapp.benchmarks.workloads import DENSE, MODELS, WORKLOADS, NamedModel, Workload
from recapp.data_parallel import compile_dense, wrap_dense
from recapp.engine.sharded_collection import ShardedCollection, shard_model, sharded_tables
from recapp.models.published_dlrm import DLRM
from recapp.optim.optimizer import hybrid
from recapp.processes.process_memory import forget_peak_resident, peak_resident_bytes, settled_bytes
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.jagged_tensor import KeyedTensor
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingConfig, PoolingType
from recapp.tables.table_settings import listed_tables
from recapp.trainer.lookahead import LookAhead
from recapp.transport.batch_slots import BatchSlots
from recapp.transport.communicator import Comm

MEMORY_STEPS = 3


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock, in seconds, that a device has reached when it is read."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


class StepOnRanks(Steps):
    """A contender whose steps all ranks begin together.

    Args:
        work: The function that runs a step; it gets the number of the step.
        comm: The ranks, which meet at a barrier before each step.
        messages: The Comm of the tables, which counts the bytes of messages.
    """

    def __init__(self, work: Callable[[int], object], comm: Comm, messages: Comm) -> None:
        super().__init__({"step": work}, comm.barrier, clock=clock_of(messages.device))
        self.comm = comm
        self.messages = messages

    def bytes_exchanged(self) -> int:
        """Run a step, and return the bytes that all ranks send in the step. Every rank calls this
        method.
        """
        before = self.messages.bytes_sent
        self.run(1)
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

    steps = StepOnRanks(in_turn(model, batches), comm, messages)
    steps.inside = torch.no_grad
    return steps


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
            self.gradients = [torch.randn_like(v) for v in self._vectors(batches[0])]

    def _train(self, batch: KeyedJaggedTensor) -> None:
        """Look up a batch and run its backward, which updates the tables."""
        torch.autograd.backward(self._vectors(batch), self.gradients)

    def _vectors(self, batch: KeyedJaggedTensor) -> list[Tensor]:
        """Return the vectors of all bags, or the vectors of each sequence."""
        output = self.collection(batch)
        if isinstance(output, KeyedTensor):
            return [output.values()]
        return [sequence.values() for sequence in output.values()]

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
    for workload in (WORKLOADS[name] for name in listed(session.settings.workload)):
        comm = session.transport(session.settings.transport)
        on_host = workload.batches(comm.rank)
        plans = {
            name: session.plan(name, workload.tables(), on_host, workload.lookups())
            for name in session.rules
        }
        batches = [batch.to(comm.device) for batch in on_host]
        steps = {
            name: EmbeddingStep(
                shard_workload(workload, plan, comm, session.settings.backend),
                batches,
                session.comm,
            )
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
    """Time forward alone and whole steps of all strategies, and add their rows."""
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


# ---- whole training steps


class TrainingStep:
    """The training step of recapp: a DLRM under DDP with sharded tables.

    Args:
        session: The ranks, which meet at a barrier before each step, and the backend.
        model: The shape of the DLRM.
        tables: Its tables.
        plan: The plan of the tables.
        comm: The ranks, through the measured transport.
        compiled: Whether the dense part runs under torch.compile.
    """

    def __init__(
        self,
        session: Session,
        model: NamedModel,
        tables: Sequence[EmbeddingConfig],
        plan: ShardingPlan,
        comm: Comm,
        compiled: bool = False,
    ) -> None:
        torch.manual_seed(0)
        collection = session.shard(tables, plan, comm)
        dlrm = DLRM(collection, DENSE, model.bottom_layers, model.top).to(comm.device)
        if compiled:
            compile_dense(dlrm)
        self.model = wrap_dense(
            dlrm, comm, static_graph=True, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        dense = [p for p in dlrm.parameters() if p.requires_grad and p.numel()]
        self.optimizer = hybrid(torch.optim.Adam(dense, lr=1e-3, fused=True), sharded_tables(dlrm))
        self.barrier = session.comm
        self.device = comm.device

    def in_memory(self, batches: Sequence[Batch]) -> Steps:
        """Return a contender that trains on batches in memory.

        Args:
            batches: The batches of this rank, which steps take in turn.
        """
        moved = [batch.to(self.device) for batch in batches]
        work = {"step": in_turn(self.step, moved)}
        return Steps(work, self.barrier.barrier, clock=clock_of(self.device))

    def from_host(self, batches: Sequence[Batch]) -> Steps:
        """Return a contender that copies each batch to the GPU, and starts its exchange, one step
        ahead, as training does with a reader that is never late.

        Args:
            batches: The batches of this rank, in the host's memory, which steps take in turn.
        """
        tables = sharded_tables(self.model)
        move = BatchSlots(self.device).to_device
        ahead = iter(LookAhead(cycle(batches), 1, lambda: tables, move, tables[0].comm.side))
        work = {"step": lambda _: self.step(next(ahead))}
        return Steps(work, self.barrier.barrier, clock=clock_of(self.device))

    def from_parquet(self, batches: Iterator[Batch]) -> Steps:
        """Return a contender that trains on each batch after reading it. Its part `read` is the
        wait for the next batch.

        Args:
            batches: The endless batches of this rank.
        """
        read: list[Batch] = []
        parts = {
            "read": lambda _: read.append(next(batches)),
            "train": lambda _: self.step(read.pop()),
        }
        return Steps(parts, self.barrier.barrier)

    def step(self, batch: Batch) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        logits_B = self.model(batch)
        loss: Any = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels_B)
        loss.backward()
        self.optimizer.step()


def batches_of(model: NamedModel, features: list[KeyedJaggedTensor]) -> list[Batch]:
    """Return batches with the given ids, and with random dense inputs and labels.

    Args:
        model: The shape of the DLRM.
        features: The ids of each batch.
    """
    torch.manual_seed(1)
    return [
        Batch(
            torch.rand(model.batch_size, DENSE), ids, torch.randint(2, (model.batch_size,)).float()
        )
        for ids in features
    ]


def measure_training(session: Session) -> None:
    """Measure every model under every plan."""
    comm = session.transport(session.settings.transport)
    for model in (MODELS[name] for name in listed(session.settings.models)):
        tables = model.workload().tables()
        features = model.workload().batches(comm.rank)
        batches = batches_of(model, features)
        steps: dict[str, Steps] = {}
        for name in session.rules:
            plan = session.plan(name, tables, features)
            for compiled in (False, True)[: 1 + session.settings.compile]:
                step = TrainingStep(session, model, tables, plan, comm, compiled)
                label = f"{name}, compiled" if compiled else name
                steps[label] = step.in_memory(batches)
                if comm.device.type == "cuda":
                    steps[f"{label}, from the host"] = step.from_host(batches)
        measured = session.measure(model.name, steps)
        fastest = min(measured.values(), key=lambda each: each.median())
        for name, result in measured.items():
            session.add(
                {
                    "model": model.name,
                    "plan": name,
                    "transport": comm.transport,
                    "threads": torch.get_num_threads(),
                    **compared(result, {"best_plan": fastest}),
                    "samples_per_second": model.batch_size * comm.world / result.median() * 1e3,
                }
            )
