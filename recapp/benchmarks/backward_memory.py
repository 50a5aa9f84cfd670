"""`memory`: what one backward and its update need beside the table, against `nn.EmbeddingBag` with
dense and with sparse gradients.

A dense gradient is as large as the table, however few rows were touched; a sparse one holds every
id's row before equal rows are added. Here rows are updated where gradients are summed, so nothing
of a row's width is made but what travels.

The table is the largest of `tables`, in one process. Every method updates by plain gradient
descent, which keeps no state of its own. The peak is what the process grows by, from before the
backward to its highest during backward and update, with another batch each round. What stays
allocated after the first round (buffers that are used again) is counted in that round.

B samples of the batch, D columns of the table, L ids of the batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recapp.benchmarks.resident import peak_bytes, settled_bytes
from recapp.benchmarks.session import Session
from recapp.benchmarks.setup import make_plan
from recapp.benchmarks.strategies import workload_of
from recapp.benchmarks.timing import quartiles, time_steps
from recapp.benchmarks.workloads import Workload
from recapp.console import progress
from recapp.engine.sharded_embedding_bag import shard_bags
from recapp.optim.rules import sgd
from recapp.processes.process_memory import forget_peak_resident
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.listed import listed_tables

LEARNING_RATE = 0.01
WHOLE = {"rules": [{"type": "table_wise"}]}


class Recapp:
    """A sharded collection of recapp, whose backward updates the rows.

    Args:
        workload: The table and the shape of a batch.
        batch: The batch that the mode of the table is chosen by.
        session: The rank and the backend.
    """

    def __init__(self, workload: Workload, batch: KeyedJaggedTensor, session: Session) -> None:
        tables = workload.tables()
        plan = make_plan("table_wise", WHOLE, tables, session.comm, [batch])
        self.collection = shard_bags(
            tables, plan, session.comm, sgd(LEARNING_RATE), backend=session.settings["backend"]
        )

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        """Return the pooled vectors of a batch, [B, D]."""
        pooled: Tensor = self.collection(batch).values()
        return pooled

    def update(self) -> None:
        """Do nothing: backward has updated the rows."""


class PlainBag:
    """`nn.EmbeddingBag` with `torch.optim.SGD`.

    Args:
        workload: The table and the shape of a batch.
        batch: Not used; `Recapp` takes one.
        session: Not used; `Recapp` takes one.
        sparse: Whether the gradient is a sparse tensor of the ids' rows, else one of the table's
            size.
    """

    def __init__(
        self, workload: Workload, batch: KeyedJaggedTensor, session: Session, sparse: bool
    ) -> None:
        self.bag = nn.EmbeddingBag(
            workload.rows_F[0],
            workload.dim_F[0],
            mode="sum",
            sparse=sparse,
            include_last_offset=True,
        )
        self.optimizer = torch.optim.SGD(self.bag.parameters(), lr=LEARNING_RATE)
        self.offsets = torch.arange(0, workload.ids + 1, workload.bag_F[0])

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        """Return the pooled vectors of a batch, [B, D]."""
        pooled: Tensor = self.bag(batch.values(), self.offsets)
        return pooled

    def update(self) -> None:
        """Update the whole table, or only the rows of a sparse gradient."""
        self.optimizer.step()
        self.optimizer.zero_grad()


METHODS: dict[str, Callable[[Workload, KeyedJaggedTensor, Session], Recapp | PlainBag]] = {
    "recapp": Recapp,
    "sparse gradient": partial(PlainBag, sparse=True),
    "dense gradient": partial(PlainBag, sparse=False),
}


def run(session: Session) -> None:
    """Measure every method at every batch size with every kind of ids."""
    settings = session.settings
    torch.set_num_threads(settings["threads"][0])
    tables, _ = listed_tables(settings["tables"]["tables"], settings["tables"].get("lookups"))
    table = max(tables, key=lambda t: t.num_embeddings * t.embedding_dim)
    for ids in settings["ids"]:
        for batch_size in settings["batch_size"]:
            workload = workload_of([table], batch_size, settings["bag"], ids)
            batches = session.batches(workload)
            with progress(f"{ids} ids, batch {batch_size}, methods", len(METHODS)) as advance:
                for name, make in METHODS.items():
                    session.add(
                        _record(
                            name,
                            workload,
                            ids,
                            _measure(
                                make(workload, batches[0], session), batches, settings["rounds"]
                            ),
                        )
                    )
                    advance(1)


def _measure(
    method: Recapp | PlainBag, batches: list[KeyedJaggedTensor], rounds: int
) -> dict[str, Any]:
    """Return the highest peak of so many rounds in bytes, and how long backward and update took."""
    peaks = []
    times = []
    for i in range(rounds):
        pooled_BD = method.forward(batches[i % len(batches)])
        gradient_BD = torch.ones_like(pooled_BD)
        before = settled_bytes()
        forget_peak_resident()
        times += time_steps(
            [
                ("backward", partial(torch.autograd.backward, pooled_BD, gradient_BD)),
                ("update", method.update),
            ],
            1,
        )["step"]
        peaks.append(max(0, peak_bytes() - before))
    return {
        "peak_bytes": max(peaks),
        **dict(zip(("median_ms", "q1_ms", "q3_ms"), quartiles(times), strict=True)),
        "rounds": rounds,
    }


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
