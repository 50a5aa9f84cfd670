"""`strategies`: sharding strategies side by side, without a model around the tables.

Every strategy shards the same tables, looks up the same ids and takes the same gradient. Forward is
timed alone and with backward (and so with the update). Memory is what a rank's process has grown
by: once tables and buffers are made, and at its highest during steps.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from recapp.benchmarks.embedding_step import EmbeddingStep
from recapp.benchmarks.forward import ForwardAlone, batch_times
from recapp.benchmarks.ranks import open_transports
from recapp.benchmarks.resident import peak_bytes, settled_bytes
from recapp.benchmarks.session import Session
from recapp.benchmarks.setup import make_collection, make_plan
from recapp.benchmarks.workloads import Workload
from recapp.processes.process_memory import forget_peak_resident
from recapp.tables.config import EmbeddingConfig
from recapp.tables.listed import listed_tables
from recapp.transport.communicator import Comm

MEMORY_STEPS = 3
FORWARD = "forward"
BOTH = "forward+backward"

Key = tuple[str, int, str]
"""The name of a strategy, the batch size and the kind of ids."""


def workload_of(tables: Sequence[EmbeddingConfig], batch_size: int, bag: int, ids: str) -> Workload:
    """Return tables as a workload, with one feature for each.

    Args:
        tables: The tables.
        batch_size: The samples of a rank.
        bag: The ids of each bag.
        ids: How ids are drawn: `uniform` or `zipf`.
    """
    return Workload(
        f"{ids}_{batch_size}",
        batch_size,
        tuple(t.num_embeddings for t in tables),
        tuple(t.embedding_dim for t in tables),
        (bag,) * len(tables),
        ids == "zipf",
    )


def run(session: Session) -> None:
    """Measure every strategy with every batch size and every kind of ids."""
    settings = session.settings
    torch.set_num_threads(settings["threads"][0])
    (comm,) = open_transports(settings["transport"]).values()
    made, _ = listed_tables(settings["tables"]["tables"], settings["tables"].get("lookups"))
    workloads = [
        workload_of(made, B, settings["bag"], ids)
        for ids in settings["ids"]
        for B in settings["batch_size"]
    ]
    tables = [
        replace(t, feature_names=[feature])
        for t, feature in zip(made, workloads[0].features, strict=True)
    ]
    batches = {w.name: session.batches(w) for w in workloads}
    largest = max(workloads, key=lambda w: w.batch_size).name
    steps: dict[tuple[str, str], EmbeddingStep] = {}
    memory: dict[tuple[str, str], dict[str, float]] = {}
    for name, plan_settings in settings["plans"].items():
        session.print_note(f"{name}: tables are made")
        before = settled_bytes()
        plan = make_plan(name, plan_settings, tables, session.comm, batches[largest])
        collection = make_collection(tables, plan, comm, settings["backend"])
        for w in workloads:
            steps[name, w.name] = EmbeddingStep(collection, batches[w.name], session.comm)
            memory[name, w.name] = _memory(steps[name, w.name], before, session.comm)
    for w in workloads:
        own = {name: steps[name, w.name] for name in settings["plans"]}
        for kind in (FORWARD, BOTH):
            _measure(session, w, kind, own, {name: memory[name, w.name] for name in own}, comm)


def _measure(
    session: Session,
    workload: Workload,
    kind: str,
    steps: dict[str, EmbeddingStep],
    memory: dict[str, dict[str, float]],
    comm: Comm,
) -> None:
    contenders = {
        name: step
        if kind == BOTH
        else ForwardAlone(step.collection, step.batches, step.comm, step.collection.shared.comm)
        for name, step in steps.items()
    }
    measured = session.measure(f"{kind}, batch {workload.batch_size}", contenders)
    for name, contender in contenders.items():
        session.add(
            {
                "strategy": name,
                "ids": "zipf" if workload.zipf else "uniform",
                "batch_size": workload.batch_size,
                "step": kind,
                **batch_times(measured[name], workload.batch_size, comm.world),
                **memory[name],
                "bytes_exchanged": contender.bytes_exchanged(),
                "transport": comm.transport,
                "ranks": comm.world,
                "rounds": len(measured[name].rounds["step"]),
            }
        )


def _memory(step: EmbeddingStep, before: int, comm: Comm) -> dict[str, float]:
    """Return the GB that tables and buffers hold on the rank with most, and the peak of some steps.

    Args:
        step: The step that is run.
        before: The bytes of this process before the tables were made.
        comm: The ranks.
    """
    forget_peak_resident()
    step.run(MEMORY_STEPS)
    of_ranks = comm.all_gather((settled_bytes() - before, peak_bytes() - before))
    return {
        "memory_gb": max(now for now, _ in of_ranks) / 1e9,
        "memory_peak_gb": max(peak for _, peak in of_ranks) / 1e9,
    }
