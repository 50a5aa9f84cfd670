"""`memory`: measure the memory that one backward and its update need in addition to the table, and
compare it with `nn.EmbeddingBag` with dense and with sparse gradients.

A dense gradient is as large as the table, even if the batch touches few rows. A sparse gradient
holds a row for every id before equal rows are added. recapp updates a row while it sums the row's
gradients, so only messages need further vectors of a row's width.

The table is the largest of `tables`, in one process. Every method updates by plain gradient
descent, which keeps no optimiser state. The peak is the growth of the process from before the
backward to its highest point during backward and update. Each round takes another batch. Buffers
for reuse stay allocated after the first round, so they count in that round.

B samples of the batch, D columns of the table, L ids of the batch.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from recapp.benchmarks.embedding_step import workload_of
from recapp.benchmarks.plain_torch import LEARNING_RATE, PlainTorch, pool_of, training
from recapp.benchmarks.resident import peak_bytes, settled_bytes
from recapp.benchmarks.session import Session
from recapp.benchmarks.timing import Measured, Steps, compared
from recapp.benchmarks.workloads import Workload
from recapp.console import progress
from recapp.optim.rules import sgd
from recapp.processes.process_memory import forget_peak_resident
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def run(session: Session) -> None:
    """Measure every method at every batch size with every kind of ids."""
    settings = session.settings
    torch.set_num_threads(settings.threads[0])
    tables = session.listed_tables()
    largest = workload_of([max(tables, key=lambda t: t.num_embeddings * t.embedding_dim)])
    for ids, batch_size in product(settings.ids, settings.batch_size):
        workload = largest.of_shape(batch_size, settings.bag, ids)
        batches = session.batches(workload)
        with progress(f"{ids} ids, batch {batch_size}, methods", len(METHODS)) as advance:
            for name, method in METHODS.items():
                measured = _measure(method(session, workload, batches), settings.rounds)
                session.add(_record(name, workload, ids, measured))
                advance(1)


def _recapp(session: Session, workload: Workload, batches: list[KeyedJaggedTensor]) -> Steps:
    """Return steps of recapp's tables, whose backward updates the rows."""
    collection = session.whole(workload.tables(), batches[:1], session.comm, sgd(LEARNING_RATE))
    return training(pool_of(collection), batches, _gradient(workload))


def _plain(
    sparse: bool, session: Session, workload: Workload, batches: list[KeyedJaggedTensor]
) -> Steps:
    """Return steps of `nn.EmbeddingBag` with `torch.optim.SGD`."""
    tables = PlainTorch(workload, sparse, torch.optim.SGD)
    return training(tables, batches, _gradient(workload), tables.update)


def _gradient(workload: Workload) -> Tensor:
    return torch.ones(workload.batch_size, workload.width)


METHODS: dict[str, Callable[[Session, Workload, list[KeyedJaggedTensor]], Steps]] = {
    "recapp": _recapp,
    "sparse gradient": partial(_plain, True),
    "dense gradient": partial(_plain, False),
}


def _measure(method: Steps, rounds: int) -> dict[str, Any]:
    """Return the highest peak over all rounds in bytes, and the time of backward and update."""
    peaks = []
    measured = Measured()
    backward = Steps({"step": method.parts["backward"]})
    for number in range(rounds):
        method.parts["forward"](number)
        before = settled_bytes()
        forget_peak_resident()
        measured.add(backward.run(1))
        peaks.append(max(0, peak_bytes() - before))
    return {"peak_bytes": max(peaks), **compared(measured, {})}


def _record(name: str, workload: Workload, ids: str, measured: dict[str, Any]) -> dict[str, Any]:
    rows = workload.rows_F[0]
    dim = workload.dim_F[0]
    touched = max(len(torch.unique(ids_L)) for ids_L in workload.draw(0))
    return {
        "way": name,
        "rows": rows,
        "dim": dim,
        "ids": ids,
        "batch_size": workload.batch_size,
        "bag": workload.bag_F[0],
        "table_bytes": 4 * rows * dim,
        "touched_rows": touched,
        "touched_bytes": 4 * touched * dim,
        **measured,
    }
