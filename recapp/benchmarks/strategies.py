"""`strategies`: compare sharding strategies, without a model around the tables.

Every strategy shards the same tables, looks up the same ids and takes the same gradient. Forward is
timed alone and together with backward, which includes the update. Memory is the growth of a rank's
process: with its tables and buffers, and at its peak during steps.
"""

from collections.abc import Sequence
from dataclasses import replace

from recapp.benchmarks.embedding_step import EmbeddingStep
from recapp.benchmarks.forward import batch_times, forward_alone
from recapp.benchmarks.resident import peak_bytes, settled_bytes
from recapp.benchmarks.session import Session
from recapp.benchmarks.workloads import Workload
from recapp.processes.process_memory import forget_peak_resident
from recapp.tables.config import EmbeddingConfig
from recapp.transport.communicator import Comm

MEMORY_STEPS = 3

Key = tuple[str, str]
"""The names of a workload and of a strategy."""


def workload_of(tables: Sequence[EmbeddingConfig]) -> Workload:
    """Return tables as a workload of one sample and one id a bag, with a feature for each table."""
    rows_F = tuple(t.num_embeddings for t in tables)
    dim_F = tuple(t.embedding_dim for t in tables)
    return Workload("listed", 1, rows_F, dim_F, (1,) * len(tables))


def run(session: Session) -> None:
    """Measure every strategy with every batch size and every kind of ids."""
    settings = session.settings
    (comm,) = session.open_transports().values()
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
    memory: dict[Key, dict[str, float]] = {}
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
