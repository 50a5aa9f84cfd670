"""`dynamic`: dynamic tables, which take any keys and grow, beside static ones.

    step     the embedding step of workloads and the training step of DLRMs: the same ids, once as
             keys of dynamic tables and once as rows of static ones
    new      one table, one rank: every step trains keys that the table has never seen
    known    the same table afterwards: steps, and lookups without a gradient, of keys that it has

Both kinds of table have their turn in every round, or after each other in every step where keys
are new; `static_ratio` is the static table's time over the dynamic one's. The static table's rows
have all been trained once before: what is compared is finding and making rows.

Memory is what the process grows by while keys are added: rows, what finds them, the state of their
optimiser, and the buffers that grow with it. A pause is the longest step with new keys over the
median one, by the clock and in the processor's time, which does not grow where others compute.
Python's dict numbers the same keys for comparison, and does nothing else.

B samples of a rank's batch, N keys.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recapp.benchmarks.embedding_step import EmbeddingStep
from recapp.benchmarks.models import MODELS
from recapp.benchmarks.ranks import first_ranks, open_transports
from recapp.benchmarks.resident import peak_bytes, settled_bytes
from recapp.benchmarks.rivals import Absent
from recapp.benchmarks.session import Session
from recapp.benchmarks.setup import make_collection, make_plan
from recapp.benchmarks.timing import (
    Contender,
    Measured,
    Times,
    quartiles,
    ratio,
    spread,
    time_steps,
)
from recapp.benchmarks.whole_step import InMemory, TrainingStep, batches_of
from recapp.benchmarks.workloads import WORKLOADS
from recapp.console import progress
from recapp.processes.process_memory import forget_peak_resident
from recapp.sparse.batch import Batch
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig
from recapp.transport.communicator import Comm

DIM = 16
STATE_BYTES = 4  # of a row's optimiser: row-wise Adagrad
KNOWN_BATCHES = 6
WHOLE_NAME = "table_wise"
WHOLE = {"rules": [{"type": WHOLE_NAME}]}
KINDS = ("dynamic", "static")


def run(session: Session) -> None:
    """Measure steps of workloads and models under every plan, then one table that grows."""
    settings = session.settings
    torch.set_num_threads(settings["threads"][0])
    (comm,) = open_transports(settings["transport"]).values()
    for plan_name, plan_settings in settings["plans"].items():
        for name in settings["workload"]:
            _measure_lookups(session, name, plan_name, plan_settings, comm)
        for name in settings["model"]:
            _measure_training(session, name, plan_name, plan_settings, comm)
    _measure_growth(session, Comm() if comm.world == 1 else first_ranks(1, "auto", comm.device))


def _measure_growth(session: Session, alone: Comm | None) -> None:
    """Measure one table on the first rank; the others wait."""
    table = None
    if alone is not None:
        table = GrowingTable(session, alone)
        table.fill()
        session.add(table.record())
    contenders: dict[str, Contender] = {
        kind: Absent() if table is None else Known(table, kind) for kind in KINDS
    }
    measured = session.measure("known keys", contenders)
    if table is not None:
        for part in ("lookup", "training"):
            what = f"known keys, {'step' if part == 'training' else part}"
            session.add(_record(what, WHOLE_NAME, table.comm, table.batch_size, measured, part))
        for record in _of_dict(table):
            session.add(record)


def as_dynamic(table: EmbeddingConfig) -> EmbeddingConfig:
    """Return a table of any keys with the columns and features of a static one."""
    return replace(table, num_embeddings="dynamic")  # type: ignore[arg-type]


def _measure_lookups(
    session: Session, name: str, plan_name: str, plan_settings: dict[str, Any], comm: Comm
) -> None:
    workload = WORKLOADS[name]
    batches = session.batches(workload)
    backend = session.settings["backend"]
    steps: dict[str, Contender] = {}
    for kind in KINDS:
        tables = [as_dynamic(t) if kind == "dynamic" else t for t in workload.tables()]
        plan = make_plan(plan_name, plan_settings, tables, comm, batches)
        steps[kind] = EmbeddingStep(make_collection(tables, plan, comm, backend), batches, comm)
        steps[kind].run(len(batches))  # every key has its row
    measured = session.measure(f"{name}, {plan_name}", steps)
    session.add(_record(f"{name} step", plan_name, comm, workload.ids, measured))


def _measure_training(
    session: Session, name: str, plan_name: str, plan_settings: dict[str, Any], comm: Comm
) -> None:
    model = MODELS[name]
    workload = model.workload()
    features = session.batches(workload)
    batches: list[Batch] = batches_of(model, features)
    steps: dict[str, Contender] = {}
    for kind in KINDS:
        tables = [as_dynamic(t) if kind == "dynamic" else t for t in workload.tables()]
        plan = make_plan(plan_name, plan_settings, tables, comm, features)
        training = TrainingStep(model, tables, plan, comm, comm, session.settings["backend"])
        steps[kind] = InMemory(training, batches)
        steps[kind].run(len(batches))
    measured = session.measure(f"{name}, {plan_name}", steps)
    session.add(_record(f"{name} training", plan_name, comm, workload.ids, measured))


def _record(
    what: str, plan: str, comm: Comm, ids: int, measured: dict[str, Measured], part: str = "step"
) -> dict[str, Any]:
    own = Measured({"step": measured["dynamic"].rounds[part]})
    static = Measured({"step": measured["static"].rounds[part]})
    return {
        "what": what,
        "plan": plan,
        "ranks": comm.world,
        **spread(own),
        **spread(static, prefix="static_"),
        **ratio("static", static, own),
        "ids_per_second": ids * comm.world / own.median() * 1e3,
        "rounds": len(own.rounds["step"]),
    }


class GrowingTable:
    """A dynamic table on one rank that gets new keys, and a static one of as many rows.

    Args:
        session: The settings: `keys` in all, `batch_size` of a step.
        comm: The one rank.
    """

    def __init__(self, session: Session, comm: Comm) -> None:
        settings = session.settings
        self.session = session
        self.comm = comm
        self.batch_size = min(settings["batch_size"][0], settings["keys"])
        batches = settings["keys"] // self.batch_size
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
        self.collections = {}
        for kind, table in (("dynamic", as_dynamic(static)), ("static", static)):
            plan = make_plan(WHOLE_NAME, WHOLE, [table], comm, [self.features(self.keys_N[:0])])
            self.collections[kind] = make_collection([table], plan, comm, settings["backend"])
        self.ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.cpu_ms: list[float] = []
        self.grown = self.peak = 0

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

    def fill(self) -> None:
        """Train new keys, batch after batch; the first batch is not counted: buffers grow in it."""
        key_NB = self.keys_N.view(-1, self.batch_size)
        row_NB = torch.arange(len(self.keys_N)).view(-1, self.batch_size)
        for row_B in row_NB:
            self.train("static", row_B)
        self.train("dynamic", key_NB[0])
        before = settled_bytes()
        forget_peak_resident()
        with progress("new keys, batches", len(key_NB) - 1) as advance:
            for key_B, row_B in zip(key_NB[1:], row_NB[1:], strict=True):
                begin = time.process_time()
                self._time("dynamic", key_B)
                self.cpu_ms.append((time.process_time() - begin) * 1e3)
                self._time("static", row_B)
                advance(1)
        self.peak = max(0, peak_bytes() - before)
        self.grown = max(0, settled_bytes() - before)

    def _time(self, kind: str, ids_B: Tensor) -> None:
        step = partial(self.train, kind, ids_B)
        self.ms[kind] += time_steps([("step", step)], 1)["step"]

    def record(self) -> dict[str, Any]:
        """Return the record of the steps with new keys."""
        measured = {kind: Measured({"step": [[ms] for ms in self.ms[kind]]}) for kind in KINDS}
        new = len(self.keys_N) - self.batch_size
        longest = max(self.ms["dynamic"])
        payload = 4 * DIM + STATE_BYTES
        return _record("new keys, step", WHOLE_NAME, self.comm, self.batch_size, measured) | {
            "keys": len(self.keys_N),
            "batch_size": self.batch_size,
            "longest_ms": longest,
            "pause_ratio": longest / measured["dynamic"].median(),
            "cpu_pause_ratio": max(self.cpu_ms) / quartiles(self.cpu_ms)[0],
            "payload_bytes": payload,
            "bytes_per_key": self.grown / new,
            "peak_bytes_per_key": self.peak / new,
            "bytes_ratio": self.peak / new / payload,
            "batch_ms": self.ms["dynamic"],
            "static_batch_ms": self.ms["static"],
        }


class Known:
    """A contender that looks up and trains keys of a filled table, drawn at random.

    Args:
        table: The tables.
        kind: Which of them.
    """

    def __init__(self, table: GrowingTable, kind: str) -> None:
        self.table = table
        self.kind = kind
        generator = torch.Generator().manual_seed(1)
        shape = (KNOWN_BATCHES, table.batch_size)
        row_NB = torch.randint(len(table.keys_N), shape, generator=generator)
        self.ids_NB = table.keys_N[row_NB] if kind == "dynamic" else row_NB
        self.number = 0

    def run(self, steps: int) -> Times:
        """Time so many batches, each looked up and then trained."""
        return time_steps([("lookup", self._look_up), ("training", self._train)], steps)

    def _look_up(self) -> None:
        self.number += 1
        self.table.read(self.kind, self.ids_NB[self.number % KNOWN_BATCHES])

    def _train(self) -> None:
        self.table.train(self.kind, self.ids_NB[self.number % KNOWN_BATCHES])


def _of_dict(table: GrowingTable) -> list[dict[str, Any]]:
    """Return the records of a dict that numbers the same keys, and then finds some."""
    numbers: dict[int, int] = {}
    new_ms = []
    for keys_B in table.keys_N.view(-1, table.batch_size):
        keys = keys_B.tolist()
        begin = time.perf_counter()
        numbers.update(zip(keys, range(len(numbers), len(numbers) + len(keys)), strict=True))
        new_ms.append((time.perf_counter() - begin) * 1e3)
    known_ms = []
    for keys_B in Known(table, "dynamic").ids_NB:
        keys = keys_B.tolist()
        begin = time.perf_counter()
        list(map(numbers.__getitem__, keys))
        known_ms.append((time.perf_counter() - begin) * 1e3)
    return [
        {
            "what": f"Python's dict, {what} keys",
            "plan": None,
            "ranks": 1,
            **spread(Measured({"step": [ms]})),
            "ids_per_second": table.batch_size / quartiles(ms)[0] * 1e3,
            "pause_ratio": max(ms) / quartiles(ms)[0],
        }
        for what, ms in (("new", new_ms), ("known", known_ms))
    ]
