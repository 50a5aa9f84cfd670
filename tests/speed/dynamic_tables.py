"""`dynamic`: compare dynamic tables, which take any keys and grow, with static tables.

    step     the embedding step of workloads and the training step of DLRMs: the same ids, once as
             keys of dynamic tables and once as rows of static ones
    new      one table, one rank: every step trains keys that the table has never seen
    known    the same table afterwards: steps, and lookups without a gradient, of keys with a row

Both kinds of table take turns in every round, or in every step where keys are new. `static_ratio`
is the static table's time over the dynamic one's. Every row of the static table has been trained
once before, so the difference is the time to find and to make rows.

Memory is the growth of the process while keys are added: rows, their index, the state of their
optimiser, and buffers that grow with the table. A pause is the longest step with new keys over the
median step: once in wall-clock time, and once in CPU time, which other programs do not lengthen.
Python's dict numbers the same keys for comparison, and does nothing else.

B samples of a rank's batch, N keys.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recapp.benchmarks.calibrate import first_ranks
from recapp.benchmarks.steps import EmbeddingStep, TrainingStep, batches_of
from recapp.benchmarks.timing import Contender, Measured, Steps, Times, compared, in_turn, spread
from recapp.benchmarks.workloads import MODELS, WORKLOADS, Workload
from recapp.console import progress
from recapp.processes.process_memory import (
    forget_peak_resident,
    peak_resident_bytes,
    settled_bytes,
)
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig
from recapp.transport.communicator import Comm

from .kernels import part
from .lab import Lab
from .rivals import Absent

DIM = 16
STATE_BYTES = 4  # of a row's optimiser: row-wise Adagrad
KNOWN_BATCHES = 6
KINDS = ("dynamic", "static")
Tables = list[EmbeddingConfig]


def run(session: Lab) -> None:
    """Measure steps of workloads and models under every plan, then one table that grows."""
    settings = session.settings
    comm = session.ranks()
    for plan in settings.plan:
        for name in settings.workload:
            _measure_lookups(session, name, plan, comm)
        for name in settings.model:
            _measure_training(session, name, plan, comm)
    _measure_growth(session, Comm() if comm.world == 1 else first_ranks(1, "auto", comm.device))


def _measure_growth(session: Lab, alone: Comm | None) -> None:
    """Measure one table on the first rank; the others wait."""
    table = None
    if alone is not None:
        table = GrowingTable(session, alone)
        session.add(table.grow())
    contenders: dict[str, Contender] = {
        kind: Absent() if table is None else table.known(kind) for kind in KINDS
    }
    measured = session.measure("known keys", contenders)
    if table is not None:
        for name, what in (("lookup", "lookup"), ("training", "step")):
            own = {kind: part(measured[kind], name) for kind in KINDS}
            what = f"known keys, {what}"
            session.add(_row(what, "table_wise", table.comm, table.batch_size, own))
        for row in _of_dict(table):
            session.add(row)


def as_dynamic(table: EmbeddingConfig) -> EmbeddingConfig:
    """Return a dynamic table with the columns and features of a static one."""
    return replace(table, num_embeddings="dynamic")  # type: ignore[arg-type]


def _measure_lookups(session: Lab, name: str, plan: str, comm: Comm) -> None:
    workload = WORKLOADS[name]
    batches = session.batches(workload)
    _measure(
        session,
        f"{name} step",
        workload,
        batches,
        plan,
        lambda tables, own: EmbeddingStep(session.shard(tables, own, comm), batches, comm),
    )


def _measure_training(session: Lab, name: str, plan: str, comm: Comm) -> None:
    model = MODELS[name]
    workload = model.workload()
    features = session.batches(workload)
    batches = batches_of(model, features)
    _measure(
        session,
        f"{name} training",
        workload,
        features,
        plan,
        lambda tables, own: TrainingStep(session, model, tables, own, comm).in_memory(batches),
    )


def _measure(
    session: Lab,
    what: str,
    workload: Workload,
    batches: list[KeyedJaggedTensor],
    plan: str,
    step_of: Callable[[Tables, ShardingPlan], Steps],
) -> None:
    """Time the steps of dynamic and static tables under one plan, and add their row."""
    steps = {}
    for kind in KINDS:
        tables = [as_dynamic(t) if kind == "dynamic" else t for t in workload.tables()]
        steps[kind] = step_of(tables, session.plan(plan, tables, batches))
        steps[kind].run(len(batches))  # every key has its row
    measured = session.measure(f"{workload.name}, {plan}", steps)
    session.add(_row(what, plan, session.comm, workload.ids, measured))


def _row(
    what: str, plan: str, comm: Comm, ids: int, measured: dict[str, Measured]
) -> dict[str, Any]:
    own = measured["dynamic"]
    static = measured["static"]
    return {
        "what": what,
        "plan": plan,
        "ranks": comm.world,
        **compared(own, {"static": static}),
        **spread(static, prefix="static_"),
        "ids_per_second": ids * comm.world / own.median() * 1e3,
    }


class GrowingTable:
    """A dynamic table on one rank that gets new keys, and a static table with the same number of
    rows.

    Args:
        session: The session; its settings have all `keys`, and the `batch_size` of a step.
        comm: The one rank.
    """

    def __init__(self, session: Lab, comm: Comm) -> None:
        settings = session.settings
        self.comm = comm
        self.batch_size = min(settings.batch_size[0], settings.keys)
        batches = settings.keys // self.batch_size
        generator = torch.Generator().manual_seed(0)
        any_key = torch.iinfo(torch.int64)
        self.keys_N = torch.randint(
            any_key.min, any_key.max, (batches * self.batch_size,), generator=generator
        )
        self.lengths_B = torch.ones(self.batch_size, dtype=torch.int64)
        self.gradient_BD = torch.randn(self.batch_size, DIM)
        static = EmbeddingBagConfig(
            name="keys",
            num_embeddings=len(self.keys_N),
            embedding_dim=DIM,
            feature_names=["keys"],
        )
        no_batch = self.features(self.keys_N[:0])
        self.collections = {
            kind: session.whole([table], [no_batch], comm)
            for kind, table in (("dynamic", as_dynamic(static)), ("static", static))
        }

    def features(self, ids_B: Tensor) -> KeyedJaggedTensor:
        """Return ids as a batch of bags with one id each."""
        return KeyedJaggedTensor(["keys"], ids_B, lengths=self.lengths_B[: len(ids_B)])

    def train(self, kind: str, ids_B: Tensor) -> None:
        """Train the rows of one table."""
        self.collections[kind](self.features(ids_B)).values().backward(self.gradient_BD)

    def read(self, kind: str, ids_B: Tensor) -> None:
        """Look up rows of one table without a gradient."""
        with torch.no_grad():
            self.collections[kind](self.features(ids_B)).values()

    def grow(self) -> dict[str, Any]:
        """Train new keys, batch after batch, and return the row of these steps.

        The first batch does not count, because buffers grow then.
        """
        key_NB = self.keys_N.view(-1, self.batch_size)
        row_NB = torch.arange(len(self.keys_N)).view(-1, self.batch_size)
        for row_B in row_NB:
            self.train("static", row_B)
        self.train("dynamic", key_NB[0])
        measured = {kind: Measured() for kind in KINDS}
        cpu_ms = []
        before = settled_bytes()
        forget_peak_resident()
        with progress("new keys, batches", len(key_NB) - 1) as advance:
            for number in range(1, len(key_NB)):
                begin = time.process_time()
                measured["dynamic"].add(self._timed("dynamic", key_NB[number]))
                cpu_ms.append((time.process_time() - begin) * 1e3)
                measured["static"].add(self._timed("static", row_NB[number]))
                advance(1)
        new = len(self.keys_N) - self.batch_size
        peak_bytes_per_key = max(0, (peak_resident_bytes() or 0) - before) / new
        ms = {kind: measured[kind].by_round() for kind in KINDS}
        longest = max(ms["dynamic"])
        payload = 4 * DIM + STATE_BYTES
        return _row("new keys, step", "table_wise", self.comm, self.batch_size, measured) | {
            "keys": len(self.keys_N),
            "batch_size": self.batch_size,
            "longest_ms": longest,
            "pause_ratio": longest / measured["dynamic"].median(),
            "cpu_pause_ratio": max(cpu_ms) / statistics.median(cpu_ms),
            "payload_bytes": payload,
            "bytes_per_key": max(0, settled_bytes() - before) / new,
            "peak_bytes_per_key": peak_bytes_per_key,
            "bytes_ratio": peak_bytes_per_key / payload,
            "batch_ms": ms["dynamic"],
            "static_batch_ms": ms["static"],
        }

    def _timed(self, kind: str, ids_B: Tensor) -> Times:
        return Steps({"step": lambda _: self.train(kind, ids_B)}).run(1)

    def known_rows(self) -> Tensor:
        """Return the numbers of random keys of the filled table, [N, B]."""
        generator = torch.Generator().manual_seed(1)
        shape = (KNOWN_BATCHES, self.batch_size)
        return torch.randint(len(self.keys_N), shape, generator=generator)

    def known(self, kind: str) -> Steps:
        """Return a contender that looks up and then trains keys of a filled table.

        Args:
            kind: The kind of the table: `dynamic` or `static`.
        """
        row_NB = self.known_rows()
        ids_NB = list(self.keys_N[row_NB] if kind == "dynamic" else row_NB)
        return Steps(
            {
                "lookup": in_turn(partial(self.read, kind), ids_NB),
                "training": in_turn(partial(self.train, kind), ids_NB),
            }
        )


def _of_dict(table: GrowingTable) -> list[dict[str, Any]]:
    """Return the rows of a dict that numbers the same keys, and then finds some of them."""
    numbers: dict[int, int] = {}
    new = table.keys_N.view(-1, table.batch_size).tolist()
    known = table.keys_N[table.known_rows()].tolist()

    def add(number: int) -> None:
        keys = new[number]
        numbers.update(zip(keys, range(len(numbers), len(numbers) + len(keys)), strict=True))

    def find(number: int) -> None:
        list(map(numbers.__getitem__, known[number]))

    found = []
    for what, work, batches in (("new", add, new), ("known", find, known)):
        ms = Steps({"step": work}).run(len(batches))["step"]
        median = statistics.median(ms)
        found.append(
            {
                "what": f"Python's dict, {what} keys",
                "plan": None,
                "ranks": 1,
                **spread(Measured({"step": [ms]})),
                "ids_per_second": table.batch_size / median * 1e3,
                "pause_ratio": max(ms) / median,
            }
        )
    return found
